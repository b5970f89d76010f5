"""The factors of a score's products, collected: one multiplication for each chain of them, and the softmax scale as one of them."""

from __future__ import annotations

import math

from tilewise import expr
from tilewise.expr import Expr

LOG2E = math.log2(math.e)


class Factors:
    """Expressions of s as expressions of the product of q and k, the factors of each product made one number.

    A tile would otherwise multiply by them in turn, and round each time.

    Args:
        numbers: values of the parameters; those of new factors are appended, so that the source depends on no value but 1.
    """

    def __init__(self, numbers: list[float], softmax_scale: float):
        self.numbers, self.made = numbers, {}
        # A new factor is a product of others: their powers, 1 or -1, by number.
        self.powers: dict[int, dict[int, int]] = {}
        self.s = expr.symbol("s") * self._new(float(softmax_scale))
        self.log2e_factor = self._new(LOG2E)
        self.log2e = {self.log2e_factor.args[0]: 1}

    def _new(self, value: float) -> Expr:
        """A new parameter with this value."""
        self.numbers.append(value)
        return Expr("param", (len(self.numbers) - 1, "float"))

    def collected(self, root: Expr) -> Expr:
        """``root`` with s replaced by the scaled product; a node that two roots share is one node again."""
        for node in expr.nodes(root):
            if id(node) in self.made:
                continue
            new = node
            if node.op == "symbol":
                new = self.s if node.args == ("s",) else node
            elif "s" in expr.depends_on(node):
                # The first argument of a lookup names its tensor; the others are expressions.
                leaf = node.args[:1] if node.op == "lookup" else ()
                new = self._folded(Expr(node.op, (*leaf, *[self.made[id(x)][1] for x in expr.children(node)])))
            self.made[id(node)] = node, new  # the node too, so that nothing else gets its id
        return self.made[id(root)][1]

    def in_log2(self, root: Expr) -> Expr | None:
        """``root · log2 e`` where that costs nothing, because root has a factor already; else None."""
        return self._times(root, self.log2e) if self._split(root) else None

    def _folded(self, node: Expr) -> Expr:
        """The node with its factor and those inside it made one."""
        found = self._split(node)
        # A product with one number and no factor inside it is as short as it gets.
        if found is None or (node.op == "mul" and self._split(found[0]) is None):
            return node
        return self._times(*found)

    def _times(self, x: Expr, powers: dict[int, int]) -> Expr:
        """``x`` times a product of powers of numbers; x alone where they cancel, as those of a softcap's slope do."""
        inner = self._split(x)
        if inner is not None:
            x, powers = inner[0], _added(inner[1], powers)
        value = math.prod(self._power(n, k) for n, k in powers.items())
        # Half an ulp below 1 in fp32: such a factor would change no number.
        if abs(value - 1) < 2**-25:
            return x
        factor = self._new(value)
        self.powers[factor.args[0]] = powers
        return x * factor

    def _power(self, n: int, k: int) -> float:
        """The k-th power of number n; an infinity for a negative power of 0."""
        x = float(self.numbers[n])
        return x**k if x or k > 0 else math.copysign(math.inf, x)

    def _split(self, node: Expr) -> tuple[Expr, dict[int, int]] | None:
        """``(x, powers)`` of a node that is an x that depends on s, times or divided by a number; None for any other."""
        if node.op not in ("mul", "div") or "s" not in expr.depends_on(node):
            return None
        x, c = node.args if node.op == "div" or "s" in expr.depends_on(node.args[0]) else node.args[::-1]
        inverse = node.op == "div"
        # Derivatives of quotients bring 1 / c.
        if c.op == "div" and expr.is_number(c.args[0], 1):
            c, inverse = c.args[1], not inverse
        if c.op != "param":
            return None
        powers = self.powers.get(c.args[0], {c.args[0]: 1})
        return x, {n: -k for n, k in powers.items()} if inverse else powers


def _added(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    """The powers of a product; those of 0 are left out."""
    return {n: k for n in (*a, *b) if (k := a.get(n, 0) + b.get(n, 0))}
