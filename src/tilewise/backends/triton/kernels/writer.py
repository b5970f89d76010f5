"""One expression of a mask or a score as lines of Triton source."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise import expr
from tilewise.backends.triton.kernels.leaf_reads import LeafLayout
from tilewise.distances import by_distance
from tilewise.expr import Expr

_FLOAT_CALLS = {name: f"tl.{name}" for name in ("exp", "exp2", "log", "log2", "erf", "sin", "cos")}
_CALLS = {
    **_FLOAT_CALLS,
    "tanh": "maths.tanh",
    "expm1": "maths.expm1",
    "log1p": "maths.log1p",
    "sigmoid": "tl.sigmoid",
    "sqrt": "maths.sqrt",
    "rsqrt": "maths.rsqrt",
    "floordiv": "maths.floordiv",
    "mod": "maths.mod",
    "pow": "maths.power",
    "sign": "maths.sign",
    "abs": "tl.abs",
    "lshift": "maths.lshift",
    "rshift": "maths.rshift",
    "maximum": "maths.maximum",
    "minimum": "maths.minimum",
    "clamp_min": "maths.maximum",
    "clamp_max": "maths.minimum",
}
_INFIXES = ("add", "sub", "mul", "div", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne")
_INFIX = {name: expr.OPERATIONS[name].infix for name in _INFIXES}
_ROUNDING = {"floor": "tl.floor", "ceil": "tl.ceil", "round": "maths.round_even", "trunc": "maths.trunc"}
# The operations that are exact on few positions in fp32, and how those of one operand are written.
_OF_POSITIONS = {"symbol": "", "add": "", "sub": "", "mul": "", "neg": "-", "abs": "tl.abs"}
_STEPS = frozenset(
    {*_ROUNDING, "int", "floordiv", "mod", "sign", "lt", "le", "gt", "ge", "eq", "ne"}
)  # an ulp may be one
_OF_BOOLS = {"add": "|", "mul": "&"}  # torch's sums and products of truth values
_TYPES = {"float": "tl.float32", "int": "tl.int32", "bool": "tl.int1"}
OPERATIONS = frozenset({*_CALLS, *_INFIX, *_ROUNDING, *_TYPES, "where", "relu", "neg", "not", "selected"})
"""The operations that can be written; the last five have branches of their own in ``_operation`` and ``_text``."""


@dataclass(frozen=True)
class Ways:
    """How a writer reads tensors and computes with positions.

    Attributes:
        rough: whether a tanh of s may err as much as the rounding of s to 16 bits makes it err.
        described: the slot whose tile a descriptor brings, as ``work.pair``; None where there is none.
        gathers: whether tensors are read by :func:`maths.element`.
        heads: takes functions that read a tensor at b and h alone, once for all tiles of a head; None where there are none.
        corner: whether ``work.corner`` is there.
        distant: takes functions that read a tensor by distance, once for a tile far from the diagonal; None where there are none.
    """

    rough: bool = False
    described: int | None = None
    distant: list[str] | None = None
    gathers: bool = False
    heads: list[str] | None = None
    corner: bool = False


PLAIN = Ways()


class Writer:
    """Lines of source that compute expressions of ``s, b, h, i, j`` and a ``WorkTile`` called ``work``; each shared node once.

    Args:
        position: of each slot among ``work.leaves``.
        layouts: of the leaves, where i and j are a tile's; empty where they are ends of intervals.
        wide: the slots whose elements need 64-bit offsets.
        small: whether every position is below ``emit.SMALL``.
        ways: how it writes.
    """

    def __init__(
        self,
        position: dict[int, int],
        layouts: dict[int, LeafLayout],
        wide: frozenset[int],
        small: bool,
        ways: Ways = PLAIN,
    ):
        self.position, self.layouts, self.wide, self.small, self.ways = position, layouts, wide, small, ways
        self.lines: list[str] = []
        self.roots: list[Expr] = []  # kept, as names go by identity
        self.names: dict[int, str] = {}
        self.floats: dict[int, str] = {}
        self.exact: set[int] = set()  # the nodes that a step depends on

    def value(self, root: Expr) -> str:
        """The name of an expression's value, after the lines that compute it."""
        self.roots.append(root)
        every = expr.nodes(root)
        self.exact.update(map(id, expr.nodes(*[x for x in every if x.op in _STEPS])))
        for node in every:
            if id(node) not in self.names:
                self.names[id(node)] = self._name(node)
        return self.names[id(root)]

    def _name(self, node: Expr) -> str:
        """The name of one node, whose arguments have names; a line of its own unless it is a symbol."""
        if node.op == "symbol":
            name = node.args[0]
            if name == "off":
                return "(work.seqlen_k - work.seqlen_q)"
            return f"work.{name}" if name.startswith("seqlen") else name
        text = _text(self, node)  # which may add lines of its own
        self.lines.append(f"v{len(self.lines)} = {text}")
        return f"v{len(self.lines) - 1}"

    def offset(self, lookup: Expr, extents: str, layout: LeafLayout | None = None) -> str:
        """The offset of a lookup's element in its tensor, in elements; ``extents`` is the field of ``work`` with its sizes and strides.

        Each index is clamped into its axis, or left as it is where :meth:`inside` bounds it: where the compiler can see that
        elements are consecutive, a thread reads several at once.
        """
        slot = lookup.args[0][1]
        sizes, layout = f"work.{extents}[{self.position[slot]}]", layout or self.layouts.get(slot, LeafLayout())
        terms = []
        for axis, index in enumerate(
            lookup.args[1:], 1 - len(lookup.args)
        ):  # from the last, -1, as there may be more before the first
            value, stride = self.value(index), f"maths.plain({sizes}[{2 * axis + 1}])"
            if not layout.holds(index):
                # As the reference does with an index out of range.
                value = f"tl.minimum(tl.maximum({value}, 0), maths.plain({sizes}[{2 * axis}]) - 1)"
            if layout.unit > 1:
                # The last axis lies side by side and rows begin at multiples of 16 bytes: said so, a load takes 16
                # bytes at a time.
                stride = "1" if axis == -1 else f"maths.multiple({stride}, {layout.unit})"
            # 64 bits only where the tensor needs them, since each such product is several instructions for every pair.
            value = f"({value}).to(tl.int64)" if slot in self.wide else value
            terms.append(value if stride == "1" else f"{value} * {stride}")
        return " + ".join(terms) or "0"

    def row_of(self, selection: Expr) -> tuple[str, str, str, str]:
        """The tensor of a selection, the offset of its row's first element, how many it has, and how far apart they lie. Every index
        is clamped: a tile's last rows may lie outside."""
        leaf, *index, _ = selection.args
        position, axis = self.position[leaf[1]], len(index)
        first = self.offset(Expr("lookup", (leaf, *index, expr.ZERO)), "extents", LeafLayout())
        count, stride = (f"maths.plain(work.extents[{position}][{2 * axis + n}])" for n in (0, 1))
        return f"work.leaves[{position}]", first, count, stride

    def inside(self, lookup: Expr, extents: str) -> str:
        """Whether a tile's i and j, which are never negative, lie within the axes that they index without a clamp; "" if there are none."""
        slot = lookup.args[0][1]
        layout, terms = self.layouts.get(slot, LeafLayout()), []
        for axis, index in enumerate(lookup.args[1:], 1 - len(lookup.args)):
            if layout.holds(index):
                size = f"maths.plain(work.{extents}[{self.position[slot]}][{2 * axis}])"
                # The size said to be a multiple of the unit: one mask then holds for all elements of a vector.
                last = axis == -1 and layout.unit > 1
                terms.append(f"({self.value(index)} < {f'maths.multiple({size}, {layout.unit})' if last else size})")
        return " & ".join(terms)

    def floating(self, node: Expr) -> str:
        """The name of a node as fp32; the node has a name already.

        Sums of a few positions are added as fp32, which is exact, so that rows and columns of positions are converted and not a
        whole tile: a conversion of each element takes as long as four additions.
        """
        if expr.kind(node) == "float":
            return self.names[id(node)]
        if id(node) not in self.floats:
            # -1 is how the trees write a difference's sign; it is no position.
            few = [x for x in expr.nodes(node) if not expr.is_number(x, -1)]
            # Eight positions below SMALL stay below 2**24, so that no order of additions rounds.
            exact = self.small and all(x.op in _OF_POSITIONS for x in few) and len(few) < 9
            signs = _signs(node) if exact and self.ways.corner else {}
            if exact and node.op == "number":
                text = "-1.0"
            elif {"i", "j"} <= set(signs):
                text = _from_corner(self, signs)
            elif exact and node.op != "symbol":
                args = [self.floating(x) for x in node.args]
                infix = expr.OPERATIONS[node.op].infix
                text = f" {infix} ".join(args) if len(args) == 2 else f"{_OF_POSITIONS[node.op]}({args[0]})"
            else:
                text = f"{self.names[id(node)]}.to(tl.float32)"
            self.lines.append(f"f{len(self.lines)} = {text}")
            self.floats[id(node)] = f"f{len(self.lines) - 1}"
        return self.floats[id(node)]


def _from_corner(writer: Writer, signs: dict[str, int]) -> str:
    """A sum of positions with these ``signs``, as fp32: counted from the tile's corner, rows and columns are the same numbers in
    every tile, which are converted once."""
    corner = {"i": "work.corner[0]", "j": "work.corner[1]"}
    terms = (f"{'+-'[sign < 0]} {corner.get(name) or writer.value(expr.symbol(name))}" for name, sign in signs.items())
    i, j = (f"{'-' if signs[name] < 0 else ''}({name} - {corner[name]}).to(tl.float32)" for name in "ij")
    return f"maths.together((0 {' '.join(terms)}).to(tl.float32), {i}, {j})"


def _signs(node: Expr) -> dict[str, int]:
    """The sign of each symbol in a sum and difference of symbols, each at most once; empty for any other expression."""
    if node.op == "symbol":
        return {node.args[0]: 1}
    if node.op not in ("add", "sub", "mul", "neg"):
        return {}
    if node.op == "mul":
        numbers = [x for x in node.args if expr.is_number(x, -1)]
        others = [x for x in node.args if not expr.is_number(x, -1)]
        parts = [_signs(x) for x in others]
        return {name: -sign for name, sign in parts[0].items()} if len(numbers) == len(parts) == 1 else {}
    parts = [_signs(x) for x in node.args]
    if not all(parts) or (len(parts) == 2 and set(parts[0]) & set(parts[1])):
        return {}
    last = {name: -sign if node.op in ("sub", "neg") else sign for name, sign in parts[-1].items()}
    return last if len(parts) == 1 else parts[0] | last


def _text(writer: Writer, node: Expr) -> str:
    """The right-hand side of a node's line; the lines that it needs before are added to the writer's."""
    if node.op == "number":
        # A scalar with a type: a literal of Python would take the type of the other operand, and expressions have
        # torch's.
        return f"tl.full((), {node.args[0]}, {_TYPES[expr.kind(node)]})"
    if node.op == "param":
        number = f"work.numbers[{node.args[0]}]"
        # Whole numbers come as 2 x + 3, floats as they are (docs/decisions.md#triton-opaque-sizes).
        value = number if node.args[1] == "float" else f"maths.plain({number})"
        return f"tl.full((), {value}, {_TYPES[node.args[1]]})"
    if node.op == "selected":
        return _among(writer, node)
    if node.op == "lookup" and node.args[0][1] == writer.ways.described:
        # A tile (tile_m, tile_n) in the tensor's dtype, which the kernel has loaded a step ahead by its descriptor.
        return "work.pair.to(tl.float32)"
    if node.op == "lookup" and writer.ways.distant is not None and by_distance(*node.args[1:]):
        return f"at_distance_{_read_apart(writer, node, writer.ways.distant, Ways(gathers=True))}(b, h, i, j, work)"
    if node.op == "lookup" and writer.ways.heads is not None and expr.depends_on(*node.args[1:]) <= {"b", "h"}:
        return f"work.heads[{_read_apart(writer, node, writer.ways.heads, PLAIN)}]"
    if node.op == "lookup":
        position = writer.position[node.args[0][1]]
        inside = writer.inside(node, "extents")
        # Pairs outside the sequences are hidden afterwards; 0 because what lies there may be a NaN or another
        # tensor.
        text = f"maths.elements(work.leaves[{position}] + ({writer.offset(node, 'extents')}), {inside or None})"
        if writer.ways.gathers:
            text = f"maths.element(work.leaves[{position}] + ({writer.offset(node, 'extents')}))"
        of_kind = {"float": f"{text}.to(tl.float32)", "int": f"maths.whole({text})", "bool": text}
        return of_kind[expr.kind(node)]
    return _operation(writer, node, [writer.names[id(x)] for x in node.args], [expr.kind(x) for x in node.args])


def _among(writer: Writer, selection: Expr) -> str:
    """Whether keys are in their rows."""
    return f"maths.among({', '.join(writer.row_of(selection))}, {writer.names[id(selection.args[-1])]})"


def _read_apart(writer: Writer, lookup: Expr, functions: list[str], ways: Ways) -> int:
    """The number of the function, among ``functions`` from now on, that reads a tensor in these ways: once for a head, or one element where
    a whole tile reads the same (``work.far``)."""
    inner = Writer(writer.position, writer.layouts, writer.wide, writer.small, ways)
    value = _text(inner, lookup)
    body = "\n".join(f"    {line}" for line in [*inner.lines, f"return {value}"])
    if body not in functions:
        functions.append(body)
    return functions.index(body)


def _operation(writer: Writer, node: Expr, args: list[str], kinds: list[str]) -> str:
    """The text of one operation, whose arguments have these names and kinds."""
    operation, result = expr.OPERATIONS[node.op], expr.kind(node)
    if operation.float_args or (result == "float" and (node.op == "pow" or operation.infix)):
        # torch computes these in floats, whatever their operands are.
        args = [writer.floating(x) for x in node.args]
    elif node.op != "where" and result != "bool" and node.op not in ("int", "bool"):
        # As numbers, truth values are 0 and 1.
        args = [f"{x}.to(tl.int32)" if kind == "bool" else x for x, kind in zip(args, kinds, strict=True)]
    if node.op in ("float", "int", "bool"):
        to_bool = node.op == "bool" and kinds[0] != "bool"
        return f"({args[0]} != 0)" if to_bool else f"{args[0]}.to({_TYPES[node.op]})"
    if node.op == "where":
        if result == "float":
            pairs = zip(args[1:], kinds[1:], strict=True)
            # Either side of a float's selection becomes a float, as torch promotes.
            args[1:] = [x if kind == "float" else f"{x}.to(tl.float32)" for x, kind in pairs]
        return f"tl.where({', '.join(args)})"
    if node.op in _ROUNDING:
        # Whole numbers are rounded already.
        return f"{_ROUNDING[node.op]}({args[0]})" if kinds[0] == "float" else args[0]
    if node.op == "relu":
        return f"maths.maximum({args[0]}, 0)"
    if node.op == "neg":
        return f"{args[0]} * -1.0" if result == "float" else f"-{args[0]}"  # Triton's is 0 - x, and -0.0 another number
    if node.op == "not":
        # torch's `~`: the opposite of a truth value, the complement of a whole number.
        return f"{args[0]} == 0" if result == "bool" else f"{args[0]} ^ -1"
    if node.op in _CALLS:
        # A tanh of positions is exact: its error would have nothing to hide behind.
        rough = writer.ways.rough and node.op == "tanh" and "s" in expr.depends_on(node)
        call = f"{'maths.rough_tanh' if rough else _CALLS[node.op]}({', '.join(args)})"
        return f"maths.whole_power({', '.join(args)})" if node.op == "pow" and result != "float" else call
    if is_scaled_tanh(node) and not writer.ways.rough:
        return f"maths.scaled_tanh({writer.floating(node.args[0].args[0])}, {args[1]})"
    if node.op == "div" and id(node) in writer.exact:
        return f"maths.divide({', '.join(args)})"
    # A comparison's result is a truth value too, and keeps its operator.
    infix = _OF_BOOLS.get(node.op, _INFIX[node.op]) if result == "bool" else _INFIX[node.op]
    return f"{args[0]} {infix} {args[1]}"


def is_scaled_tanh(node: Expr) -> bool:
    """Whether an expression is ``tanh(x) · c`` with a number c."""
    if node.op != "mul" or expr.kind(node) != "float":
        return False
    return node.args[0].op == "tanh" and node.args[1].op == "param"
