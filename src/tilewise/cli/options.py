"""A command's options as a dataclass: typer wants a parameter each, people want one record to pass on.

@dataclass(frozen=True)
class Options:
    seqlen: Annotated[int, typer.Option(help="Queries.")] = 4096

def explain(options: Options) -> int: ...

app.command()(from_dataclass(explain))
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps


def from_dataclass(command: Callable) -> Callable:
    """`command(options)` as a function with one keyword for each field of its options' dataclass, for typer."""
    (parameter,) = inspect.signature(command).parameters.values()
    options = parameter.annotation

    @wraps(command)
    def spread(**values: object) -> int:
        return command(options(**values))

    del spread.__wrapped__  # typer would look through it
    spread.__doc__ = "\n\n".join(
        " ".join(part.split()) for part in (command.__doc__ or "").split("\n\n")
    )  # it keeps line ends
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in fields(options)]
    spread.__signature__ = inspect.Signature(parameters)
    spread.__annotations__ = {f.name: f.type for f in fields(options)}
    return spread
