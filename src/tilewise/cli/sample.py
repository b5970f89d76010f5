"""`tilewise sample`: continues a text with the model that `tilewise train` has saved."""

import codecs
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli import checkout
from tilewise.cli.train import CHECKPOINT


@dataclass(frozen=True)
class SampleOptions:
    """Options: which model, what to continue, and how."""

    out: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path("out/train")
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "def "
    length: Annotated[int, typer.Option(min=1, help="Bytes to add.")] = 400
    temperature: Annotated[float, typer.Option(min=0, help="Temperature; 0 takes the likeliest byte.")] = 0.8
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another text.")] = 0
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"


def sample(options: SampleOptions) -> int:
    """Continue a text with a model that tilewise train has saved."""
    device = checkout.choose_device(options.device)
    path = options.out / CHECKPOINT
    if not path.exists():
        raise ValueError(f"{path} does not exist: tilewise train --out {options.out} writes it")
    gpt, generator, store = (checkout.load_example("gpt", f"{n}.py") for n in ("model", "sample", "checkpoint"))
    found = store.load(path)
    names = [f.name for f in fields(gpt.GPTConfig)]
    if not found.settings.keys() >= {"attention", *names}:
        raise ValueError(f"{path} is the checkpoint of another program: tilewise sample reads those of tilewise train")
    sizes = gpt.GPTConfig(**{name: found.settings[name] for name in names})
    model = gpt.GPT(sizes, gpt.ATTENTIONS[found.settings["attention"]]).to(device)
    model.load_state_dict(found.model)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    how = {"context": sizes.context, "temperature": options.temperature, "seed": options.seed}
    continued = generator.generate(model, options.prompt.encode(), options.length, **how)
    print(options.prompt, end="", flush=True)
    for byte in continued:
        print(decoder.decode(bytes([byte])), end="", flush=True)
    print(decoder.decode(b"", final=True))
    return 0
