"""A dimension over which ``torch.vmap`` maps a call, folded into the batch: x examples of B elements are a batch of x B elements.

Masks and scores are written in the batch index of one example. :class:`Mapped` rewrites them once, so that no kernel knows of examples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise import expr
from tilewise.expr import Expr, apply, number, symbol
from tilewise.masks import Region

B = symbol("b")


@dataclass(frozen=True)
class Mapped:
    """Element b of a batch is element ``b % batch`` of example ``b // batch``.

    Attributes:
        batch: elements of one example.
        slots: the extras that are another tensor for each example; they have one dimension more, in front.
    """

    batch: int
    slots: tuple[int, ...]

    def expression(self, e: Expr) -> Expr:
        """Return an expression about one example as one about the whole batch."""
        size = number(self.batch)
        example, element = (B, number(0)) if self.batch == 1 else (apply("floordiv", B, size), apply("mod", B, size))
        new: dict[int, Expr] = {}
        for x in expr.nodes(e):
            inner = [new[id(child)] for child in expr.children(x)]
            if x.op in expr.READS and x.args[0][1] in self.slots:
                inner.insert(0, example)
            head = x.args[: len(x.args) - len(expr.children(x))]
            named_b = x.op == "symbol" and x.args[0] == "b"
            new[id(x)] = element if named_b else Expr(x.op, (*head, *inner))
        return new[id(e)]

    def region(self, region: Region) -> Region:
        """Return a mask of one example as that of the whole batch."""
        names = ("lo", "hi", "first", "last", "predicate")
        ends = {name: getattr(region, name) for name in names}
        return replace(region, **{name: None if e is None else self.expression(e) for name, e in ends.items()})
