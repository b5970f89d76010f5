"""A recipe says how a launch's parameters are made from a call's tensors and numbers: sums and shifts, and where addresses go.

The compiler turns the host side of a kernel (tensor maps, lengths, the grid) into straight code.
:mod:`tilewise.backends.hopper.host.hostcode` writes that code down as a :class:`Recipe`, which lies beside the cubin. The recipe
is worked out by the launcher (native/launcher.cpp, ``tw_run``) at each call. Python has the operations for the compiler's constants, and
to test the launcher's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# A value is a row [operation, bits, operand ..]. Leaves: constant, number (an argument that is one), size and stride (of a
# tensor's dimension), address. Operands of the others are rows before theirs. Values are kept as they are without a sign.
LEAVES = ("constant", "number", "size", "stride", "address")


def signed(n: int, bits: int) -> int:
    """The signed number that a word of ``bits`` stands for."""
    return n - (1 << bits) if n >> (bits - 1) else n


def _quotient(a: int, b: int) -> int:
    """The quotient of two numbers, rounded towards zero."""
    return abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


# Each operation takes the width of its last operand in bits, and its operands.
OPERATIONS: dict[str, Callable[..., int]] = {
    "add": lambda w, a, b: a + b,
    "sub": lambda w, a, b: a - b,
    "mul": lambda w, a, b: a * b,
    "and": lambda w, a, b: a & b,
    "or": lambda w, a, b: a | b,
    "xor": lambda w, a, b: a ^ b,
    "shl": lambda w, a, b: a << b if b < w else 0,
    "lshr": lambda w, a, b: a >> b,
    "ashr": lambda w, a, b: signed(a, w) >> b,
    "udiv": lambda w, a, b: a // b,
    "urem": lambda w, a, b: a % b,
    "sdiv": lambda w, a, b: _quotient(signed(a, w), signed(b, w)),
    "srem": lambda w, a, b: signed(a, w) - signed(b, w) * _quotient(signed(a, w), signed(b, w)),
    "zext": lambda w, a: a,
    "trunc": lambda w, a: a,
    "sext": lambda w, a: signed(a, w),
    "select": lambda w, c, a, b: a if c else b,
    "umin": lambda w, a, b: min(a, b),
    "umax": lambda w, a, b: max(a, b),
    "smin": lambda w, a, b: min(signed(a, w), signed(b, w)),
    "smax": lambda w, a, b: max(signed(a, w), signed(b, w)),
    "eq": lambda w, a, b: a == b,
    "ne": lambda w, a, b: a != b,
    "slt": lambda w, a, b: signed(a, w) < signed(b, w),
    "sle": lambda w, a, b: signed(a, w) <= signed(b, w),
    "sgt": lambda w, a, b: signed(a, w) > signed(b, w),
    "sge": lambda w, a, b: signed(a, w) >= signed(b, w),
    "ult": lambda w, a, b: a < b,
    "ule": lambda w, a, b: a <= b,
    "ugt": lambda w, a, b: a > b,
    "uge": lambda w, a, b: a >= b,
}


def apply(operation: str, bits: int, width: int, *operands: int) -> int:
    """The value of an operation on operands of ``width`` bits, cut to ``bits``."""
    return int(OPERATIONS[operation](width, *operands)) & ((1 << bits) - 1)


class Row(NamedTuple):
    """One operation of a recipe, whose value has ``bits``; ``width``: the bits of its last operand, which all others share but a
    select's condition."""

    operation: str
    bits: int
    operands: tuple[int, ...]
    width: int = 0


class Extent(NamedTuple):
    """A size or a stride that a call brings: all of one symbol are equal, and multiples of ``divisor``."""

    symbol: int
    divisor: int


@dataclass(frozen=True)
class TensorArgument:
    """A tensor that the kernel was compiled for: torch's name of its dtype, its sizes and strides, each a number or an
    :class:`Extent`, and the alignment of its address in bytes."""

    dtype: str
    shape: tuple[int | Extent, ...]
    stride: tuple[int | Extent, ...]
    align: int

    def faults(self, tensor: Any, seen: dict[int, int]) -> list[str]:
        """The reasons why a tensor cannot be this argument; ``seen``: the symbols of the arguments before."""
        if str(tensor.dtype) != f"torch.{self.dtype}" or len(tensor.shape) != len(self.shape):
            return [f"{tensor.dtype} of {len(tensor.shape)} dimensions, not torch.{self.dtype} of {len(self.shape)}"]
        found = []
        for kind, wanted, given in (("size", self.shape, tensor.shape), ("stride", self.stride, tensor.stride())):
            for dim, (want, got) in enumerate(zip(wanted, given, strict=True)):
                free = kind == "stride" and tensor.shape[dim] == 1  # it leads nowhere, but tensor maps may hold it
                if isinstance(want, int):
                    found += [] if free or got == want else [f"{kind} {got} of dimension {dim} is not {want}"]
                    continue
                if not free and seen.setdefault(want.symbol, got) != got:
                    found.append(f"{kind} {got} of dimension {dim} is not {seen[want.symbol]}, as elsewhere")
                if got % want.divisor:
                    found.append(f"{kind} {got} of dimension {dim} is no multiple of {want.divisor}")
        return found


Argument = TensorArgument | str  # or the kind of a number: i32, i64, f32


class Field(NamedTuple):
    """A part of a launch's parameters: the value of a row, in ``bytes`` at ``offset``."""

    offset: int
    bytes: int
    value: int


class Patch(NamedTuple):
    """The address of a tensor, in eight bytes at ``offset`` of a launch's parameters."""

    offset: int
    tensor: int


@dataclass(frozen=True)
class Launch:
    """One kernel of a recipe.

    Attributes:
        grid, block: the rows that hold their three values.
        shared: bytes of shared memory.
        sizes: bytes of each parameter; parameters lie one after the other, each at a multiple of 8.
        attributes: the driver's number of each attribute of the launch, and the fields of its value of 64 bytes.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    sizes: tuple[int, ...]
    fields: tuple[Field, ...]
    patches: tuple[Patch, ...]
    attributes: tuple[tuple[int, tuple[Field, ...]], ...]


def offsets(sizes: Sequence[int]) -> list[int]:
    """The offset of each parameter, and, last, the size of all."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // 8) * 8)
    return found


@dataclass(frozen=True)
class Recipe:
    """The arguments of a host function, flat and in order, and the launches that it makes of them, in order."""

    arguments: tuple[Argument, ...]
    rows: tuple[Row, ...]
    launches: tuple[Launch, ...]

    @property
    def tied(self) -> list[int]:
        """The arguments that have two strides of one symbol: only tensors of equal strides would do."""
        found = []
        for n, argument in enumerate(self.arguments):
            strides = argument.stride if isinstance(argument, TensorArgument) else ()
            symbols = [stride.symbol for stride in strides if isinstance(stride, Extent)]
            found += [n] if len(set(symbols)) < len(symbols) else []
        return found

    def check(self, given: Sequence[Any]) -> None:
        """Raises ValueError with all that is wrong with flat arguments; strides of tensors of one element are free."""
        if len(given) != len(self.arguments):
            raise ValueError(f"the kernel takes {len(self.arguments)} arguments, not {len(given)}")
        found, seen = [], {}
        for n, (argument, tensor) in enumerate(zip(self.arguments, given, strict=True)):
            if not isinstance(argument, str):
                found += [f"argument {n}: {fault}" for fault in argument.faults(tensor, seen)]
        found += [fault for row in self.rows for fault in self._misfit(row, given)] if not found else []
        if found:
            raise ValueError("not what the kernel was compiled for: " + "; ".join(found))

    def _misfit(self, row: Row, given: Sequence[Any]) -> list[str]:
        """The reason why a leaf's number does not fit in its bits, if it does not."""
        if row.operation not in ("size", "stride", "number"):
            return []
        argument, *dim = row.operands
        if row.operation == "number":
            kind, found = self.arguments[argument], given[argument]
            fits = kind == "f32" or (isinstance(found, int) and -(1 << (row.bits - 1)) <= found < 1 << (row.bits - 1))
            return [] if fits else [f"{found!r} of argument {argument} is no {kind}"]
        found = given[argument].shape[dim[0]] if row.operation == "size" else given[argument].stride()[dim[0]]
        words = f"{row.operation} {found} of dimension {dim[0]} of argument {argument} does not fit in {row.bits} bits"
        return [] if 0 <= found < 1 << (row.bits - 1) else [words]


def flat(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a host function in order, plain tuples taken apart; a None that it was compiled for is no argument."""
    found: list[Any] = []
    for argument in arguments:
        if type(argument) is tuple:
            found += flat(argument)
        elif argument is not None:
            found.append(argument)
    return found


# -- As text -------------------------------------------------------------------------------------------------------


def to_json(recipe: Recipe) -> dict:
    """A recipe as ``json.dumps`` takes it."""
    launches = [vars(launch) for launch in recipe.launches]
    arguments = [kind if isinstance(kind, str) else vars(kind) for kind in recipe.arguments]
    return {"arguments": arguments, "rows": recipe.rows, "launches": launches}


def from_json(data: dict) -> Recipe:
    """The recipe that :func:`to_json` wrote."""
    return Recipe(
        tuple(kind if isinstance(kind, str) else _tensor(kind) for kind in data["arguments"]),
        tuple(Row(operation, bits, tuple(operands), width) for operation, bits, operands, width in data["rows"]),
        tuple(map(_launch, data["launches"])),
    )


def _tensor(data: dict) -> TensorArgument:
    sides = (tuple(n if isinstance(n, int) else Extent(*n) for n in data[side]) for side in ("shape", "stride"))
    return TensorArgument(data["dtype"], *sides, data["align"])


def _launch(data: dict) -> Launch:
    return Launch(
        data["kernel"],
        tuple(data["grid"]),
        tuple(data["block"]),
        data["shared"],
        tuple(data["sizes"]),
        _fields(data["fields"]),
        tuple(Patch(*row) for row in data["patches"]),
        tuple((number, _fields(rows)) for number, rows in data["attributes"]),
    )


def _fields(rows: list) -> tuple[Field, ...]:
    return tuple(Field(*row) for row in rows)
