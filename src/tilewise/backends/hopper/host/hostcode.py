"""The :class:`tilewise.backends.hopper.host.recipe.Recipe` of a launch, read from its compiled host function.

The compiler leaves the host side of ``@cute.jit`` in MLIR's dialect of LLVM: it takes sizes out of tensors, packs tensor
maps, and fills the launch's configuration and parameters in local memory. Here that function is run once on symbols: known
values are computed, the others become rows of the recipe (:class:`Interpreter`), and the launch's parameters are then read from
memory (:class:`LaunchReader`). An unknown operation is refused, never guessed; a test holds the result against the driver calls
that the compiler's own object makes. That object is not shipped (docs/decisions.md#own-recipes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tilewise.backends.hopper.host import recipe as recipes
from tilewise.backends.hopper.host.cubin import parameter_sizes
from tilewise.backends.hopper.host.llvm_types import Refused, members, placed, scalar_size, scalars, size
from tilewise.backends.hopper.host.recipe import Argument, Extent, Field, Launch, Patch, Recipe, Row, TensorArgument

_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")  # by LLVM's number
_DYNAMIC = -(1 << 31)  # in a getelementptr's constant indices: take the next operand
_STEPS = 100_000  # blocks that a host function runs at most
# Where the launch's configuration has its parts: struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>.
_GRID, _BLOCK, _SHARED, _STREAM, _ATTRIBUTES, _ATTRIBUTE_COUNT = 0, 12, 24, 32, 40, 48
_ATTRIBUTE = "struct<(i32, array<4 x i8>, array<64 x i8>)>"


# -- Values --------------------------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A number: a row of the recipe."""

    row: int
    bits: int


class Local(NamedTuple):
    """An address in the function's own memory: in which of its variables, and how many bytes from its start."""

    variable: int
    offset: int


class Global(NamedTuple):
    """The address of a global."""

    name: str


class Handle(NamedTuple):
    """A value that is loaded from a global: a kernel, where it is one."""

    name: str


class Stream(NamedTuple):
    """The launch's stream."""


class Rows:
    """The rows of a recipe, each once; rows of constants are computed."""

    def __init__(self):
        self.rows: list[Row] = []
        self._known: dict[Row, int] = {}

    def add(self, operation: str, bits: int, *operands: int, width: int = 0) -> Value:
        """The value of an operation, whose row is added if it is new."""
        operand_rows = [self.rows[n] for n in operands] if operation not in recipes.LEAVES else []
        if operand_rows and all(row.operation == "constant" for row in operand_rows):
            return self.constant(
                recipes.apply(operation, bits, width, *[row.operands[0] for row in operand_rows]), bits
            )
        row = Row(operation, bits, tuple(operands), width)
        if row not in self._known:
            self._known[row] = len(self.rows)
            self.rows.append(row)
        return Value(self._known[row], bits)

    def constant(self, number: int, bits: int) -> Value:
        return self.add("constant", bits, number & ((1 << bits) - 1))

    def known(self, value: Value) -> int | None:
        """The number that a value is, if it is a constant."""
        row = self.rows[value.row]
        return row.operands[0] if row.operation == "constant" else None

    def known_or_refused(self, value: Value, name: str) -> int:
        """The number that a value must be.

        Raises:
            NotImplementedError: only a call knows it.
        """
        found = self.known(value)
        if found is None:
            raise Refused(f"{name} that only the call knows")
        return found

    def leaves(self, value: Value) -> set[Row]:
        """The leaves under a row that are no constants."""
        row = self.rows[value.row]
        if row.operation in recipes.LEAVES:
            return set() if row.operation == "constant" else {row}
        return set().union(*(self.leaves(Value(n, 0)) for n in row.operands))

    def address(self, value: Value) -> int | None:
        """The number of the tensor whose address a value is; None: the value has nothing to do with an address.

        Raises:
            NotImplementedError: the value is computed from an address and more.
        """
        leaves = self.leaves(value)
        tensors = {row.operands[0] for row in leaves if row.operation == "address"}
        if not tensors:
            return None
        samples = [1 << n for n in range(4, 57)] + [0x7F12_3456_7890, 0x1FF_FFFF_FFFF_FFF0]
        if len(leaves) > 1 or any(self._at_address(value.row, sample) != sample for sample in samples):
            raise Refused("a parameter computed from an address and more")
        return tensors.pop()

    def _at_address(self, row: int, address: int) -> int:
        """The value of a row where the address that it is made from is known."""
        operation, bits, operands, width = self.rows[row]
        if operation == "address":
            return address
        if operation == "constant":
            return operands[0]
        return recipes.apply(operation, bits, width, *[self._at_address(n, address) for n in operands])


class Memory:
    """The function's own variables, and what lies in them."""

    def __init__(self):
        self._types: list[str] = []
        self._stored: list[dict[int, tuple[str, Any]]] = []  # of each variable: offset -> type and value of a scalar

    def allocate(self, kind: str) -> Local:
        """A new variable of a type."""
        self._types.append(kind)
        self._stored.append({})
        return Local(len(self._types) - 1, 0)

    def size(self, variable: int) -> int:
        """The size of a variable in bytes."""
        return size(self._types[variable])

    def store(self, kind: str, value: Any, to: Local) -> None:
        for offset, type_ in scalars(kind):
            self._stored[to.variable][to.offset + offset] = type_, _parts(value)[offset]

    def load(self, kind: str, start: Local) -> Any:
        stored = self._stored[start.variable]
        return _value(kind, lambda offset: stored.get(start.offset + offset, (None, None))[1])

    def at(self, start: Local, offset: int = 0) -> Any:
        """The scalar that lies ``offset`` bytes behind an address."""
        return self._stored[start.variable][start.offset + offset][1]

    def filled(self, start: Local, count: int) -> Iterator[tuple[int, int, Value]]:
        """``(offset, bytes, value)`` of all that was stored in ``count`` bytes from ``start`` on."""
        for offset, (kind, value) in sorted(self._stored[start.variable].items()):
            if start.offset <= offset < start.offset + count and value is not None:
                if not isinstance(value, Value):
                    raise Refused(f"a parameter that is {value}")
                yield offset - start.offset, scalar_size(kind), value


# -- Running the function on symbols -------------------------------------------------------------------------------


class Interpreter:
    """Runs the host function, a method for each operation. ``launches`` collects the launches that it makes."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.registers: dict[int, Any] = {}  # by hash, which is the value's identity: the DSL's == on values emits code
        self.memory = Memory()
        self.launches: list[Launch] = []

    def run(self, function: Any, arguments: Sequence[Any]) -> None:
        block, given = function.regions[0].blocks[0], arguments
        for _ in range(_STEPS):
            self.registers.update(zip(map(hash, block.arguments), given, strict=True))
            *body, last = [op.operation for op in block.operations]
            for op in body:
                self._step(op)
            if last.name == "llvm.return":
                return
            block, given = self._next(last)
        raise Refused("a loop without an end")

    def _next(self, op: Any) -> tuple[Any, list[Any]]:
        """The block that is run after a branch, and its arguments."""
        operands = [self.registers[hash(x)] for x in op.operands]
        if op.name == "llvm.br":
            return op.successors[0], operands
        if op.name != "llvm.cond_br":
            raise Refused(f"{op.name} at a block's end")
        condition = self.rows.known(operands[0])
        if condition is None:
            raise Refused("a branch on what only the call knows; choose with arithmetic, or when tracing")
        _, count, _ = op.attributes["operandSegmentSizes"]
        taken = operands[1 : 1 + count] if condition else operands[1 + count :]
        return op.successors[0 if condition else 1], taken

    def _step(self, op: Any) -> None:
        name = op.name.removeprefix("llvm.").removeprefix("mlir.").removeprefix("intr.")
        operands = [self.registers[hash(x)] for x in op.operands]
        known: Callable | None = getattr(self, f"_{name}", None)
        if known is not None:
            result = known(op, *operands)
        elif name in recipes.OPERATIONS:
            result = self._arithmetic(name, op, operands)
        else:
            raise Refused(f"the operation {op.name}")
        for register in op.results:
            self.registers[hash(register)] = result

    def _arithmetic(self, name: str, op: Any, operands: list[Any]) -> Value:
        if not all(isinstance(x, Value) for x in operands):
            raise Refused(f"{op.name} of what is no number")
        return self.rows.add(name, _bits(op.results[0]), *[x.row for x in operands], width=operands[-1].bits)

    def _icmp(self, op: Any, left: Value, right: Value) -> Value:
        return self._arithmetic(_PREDICATES[op.attributes["predicate"].value], op, [left, right])

    def _constant(self, op: Any) -> Value:
        if not str(op.results[0].type).startswith("i"):
            raise Refused(f"a constant of {op.results[0].type}")
        return self.rows.constant(int(op.attributes["value"].value), _bits(op.results[0]))

    def _poison(self, op: Any) -> Any:
        return _value(str(op.results[0].type), lambda offset: None)

    def _ptrtoint(self, op: Any, address: Any) -> Any:
        return address

    _inttoptr = _ptrtoint

    def _addressof(self, op: Any) -> Global:
        return Global(op.attributes["global_name"].value)

    def _extractvalue(self, op: Any, whole: dict[int, Any]) -> Any:
        start, kind = placed(str(op.operands[0].type), op.attributes["position"])
        return _value(kind, lambda offset: whole[start + offset])

    def _insertvalue(self, op: Any, whole: dict[int, Any], part: Any) -> dict[int, Any]:
        start, _ = placed(str(op.operands[0].type), op.attributes["position"])
        return whole | {start + offset: value for offset, value in _parts(part).items()}

    def _alloca(self, op: Any, count: Value) -> Local:
        kind = str(op.attributes["elem_type"].value).removeprefix("!llvm.")
        return self.memory.allocate(f"array<{self.rows.known(count)} x {kind}>")

    def _getelementptr(self, op: Any, base: Local, *dynamic: Value) -> Local:
        rest = iter(dynamic)
        indices = [n if n != _DYNAMIC else self.rows.known(next(rest)) for n in op.attributes["rawConstantIndices"]]
        if not isinstance(base, Local) or None in indices:
            raise Refused("an address that only the call knows")
        kind, (first, *position) = str(op.attributes["elem_type"].value), indices
        return Local(base.variable, base.offset + first * size(kind) + placed(kind, position)[0])

    def _store(self, op: Any, value: Any, to: Local) -> None:
        if isinstance(to, Local):
            self.memory.store(str(op.operands[0].type), value, to)

    def _load(self, op: Any, start: Any) -> Any:
        return Handle(start.name) if isinstance(start, Global) else self.memory.load(str(op.results[0].type), start)

    def _call(self, op: Any, *operands: Any) -> Value:
        callee = op.attributes["callee"].value
        if callee != "_cudaLaunchKernelEx":
            raise Refused(f"a call of {callee}")
        self.launches.append(LaunchReader(self.rows, self.memory).launch(*operands))
        return self.rows.constant(0, 32)  # success


class LaunchReader(NamedTuple):
    """Reads from memory what a launch is given."""

    rows: Rows
    memory: Memory

    def launch(self, configuration: Local, kernel: Handle, parameters: Local) -> Launch:
        """The launch of a kernel; ``parameters`` holds the address of each one."""
        if not isinstance(self.memory.at(configuration, _STREAM), Stream):
            raise Refused("a launch on another stream than the call's")
        addresses = [self.memory.at(parameters, 8 * n) for n in range(self.memory.size(parameters.variable) // 8)]
        sizes = [self.memory.size(address.variable) for address in addresses]
        fields, patches = [], []
        for start, address in zip(recipes.offsets(sizes), addresses, strict=False):
            for offset, count, value in self.memory.filled(address, self.memory.size(address.variable)):
                tensor = self.rows.address(value)
                patches += [] if tensor is None else [Patch(start + offset, tensor)]
                fields += [Field(start + offset, count, value.row)] if tensor is None else []
        return Launch(
            kernel.name.removeprefix("kernels_"),
            tuple(self.memory.at(configuration, _GRID + 4 * n).row for n in range(3)),
            tuple(self.memory.at(configuration, _BLOCK + 4 * n).row for n in range(3)),
            self._constant(configuration, _SHARED, "shared memory"),
            tuple(sizes),
            tuple(fields),
            tuple(patches),
            tuple(self._attributes(configuration)),
        )

    def _constant(self, start: Local, offset: int, name: str) -> int:
        return self.rows.known_or_refused(self.memory.at(start, offset), name)

    def _attributes(self, configuration: Local) -> Iterator[tuple[int, tuple[Field, ...]]]:
        """The driver's number of each attribute of the launch, and the fields of its value."""
        first = self.memory.at(configuration, _ATTRIBUTES)
        for n in range(self._constant(configuration, _ATTRIBUTE_COUNT, "attributes")):
            here = Local(first.variable, first.offset + n * size(_ATTRIBUTE))
            filled = self.memory.filled(Local(here.variable, here.offset + 8), 64)
            fields = tuple(Field(offset, count, value.row) for offset, count, value in filled)
            yield self._constant(here, 0, "an attribute"), fields


def _bits(register: Any) -> int:
    kind = str(register.type).removeprefix("!llvm.")
    return 64 if kind.startswith("ptr") else int(kind[1:])


def _value(kind: str, scalar_at: Callable[[int], Any]) -> Any:
    """The value of a type: of a struct or an array its scalars by their offsets, however the type nests them."""
    return scalar_at(0) if members(kind) is None else {offset: scalar_at(offset) for offset, _ in scalars(kind)}


def _parts(value: Any) -> dict[int, Any]:
    """The scalars of a value by their offsets."""
    return value if isinstance(value, dict) else {0: value}


# -- Arguments -----------------------------------------------------------------------------------------------------


def arguments_of(traced: Sequence[Any]) -> tuple[Argument, ...]:
    """The recipe's arguments for what ``cute.compile`` was given: fake tensors, numbers, tuples of them. A stream and compile-time
    values are no arguments."""
    symbols: dict[int, int] = {}

    def extent(given: Any) -> int | Extent:
        if isinstance(given, int):
            return given
        return Extent(symbols.setdefault(id(given), len(symbols)), given.divisibility)

    found: list[Argument] = []
    for argument in recipes.flat(traced):
        if hasattr(argument, "element_type"):
            sides = tuple(tuple(map(extent, side)) for side in (argument.shape, argument.stride))
            found.append(TensorArgument(_torch_name(argument.element_type), *sides, argument._assumed_align))
        elif type(argument).__name__ in ("Int32", "Int64", "Float32"):
            name = type(argument).__name__
            found.append({"I": "i", "F": "f"}[name[0]] + name[-2:])
    return tuple(found)


def _torch_name(element: Any) -> str:
    return re.sub(r"([a-z])(\d)", r"\1\2", element.__name__.lower())


def _inputs(arguments: Sequence[Argument], types: Sequence[str], rows: Rows) -> list[Any]:
    """The function's arguments as values: of each tensor its address, then its sizes and strides that are not fixed."""
    found, types = [], list(types)
    for n, argument in enumerate(arguments):
        kind = types.pop(0)
        if isinstance(argument, str):
            found.append(rows.add("number", scalar_size(kind) * 8, n))
            continue
        parts = [("address", n)]
        parts += [("size", n, dim) for dim, extent in enumerate(argument.shape) if isinstance(extent, Extent)]
        parts += [("stride", n, dim) for dim, extent in enumerate(argument.stride) if isinstance(extent, Extent)]
        places = list(scalars(kind))
        if len(places) != len(parts):
            raise Refused(f"argument {n} has {len(places)} scalars, not {len(parts)}")
        leaves = {x.offset: rows.add(op, 8 * x.bytes, *of) for x, (op, *of) in zip(places, parts, strict=True)}
        found.append(_value(kind, leaves.get))
    if [kind.removeprefix("!llvm.") for kind in types] != ["ptr"]:
        raise Refused(f"a host function with {types} behind its arguments, not with one stream")
    return [*found, Stream()]


# -- The whole -----------------------------------------------------------------------------------------------------


def read(module: Any, name: str, traced: Sequence[Any], cubin: bytes) -> Recipe:
    """The recipe of the host function ``name`` in a compiled module; ``traced``: the arguments that it was compiled for.

    Raises:
        NotImplementedError: it does what no recipe can say, or the cubin's kernels take other parameters.
    """
    functions = [op.operation for op in module.body.operations if op.operation.name == "llvm.func"]
    function = next(one for one in functions if one.attributes["sym_name"].value == name)
    arguments, rows = arguments_of(traced), Rows()
    interpreter = Interpreter(rows)
    types = [str(argument.type) for argument in function.regions[0].blocks[0].arguments]
    interpreter.run(function, _inputs(arguments, types, rows))
    sizes = parameter_sizes(cubin)
    for launch in interpreter.launches:
        if sizes.get(launch.kernel) != launch.sizes:
            raise Refused(f"{launch.kernel} takes {sizes.get(launch.kernel)}, and is given {launch.sizes}")
    return _pruned(Recipe(arguments, tuple(rows.rows), tuple(interpreter.launches)))


def _pruned(recipe: Recipe) -> Recipe:
    """The recipe without the rows that no launch needs."""
    lists = [fields for x in recipe.launches for fields in (x.fields, *(fields for _, fields in x.attributes))]
    needed = {field.value for fields in lists for field in fields}
    needed |= {n for x in recipe.launches for n in (*x.grid, *x.block)}
    for n in range(len(recipe.rows) - 1, -1, -1):
        if n in needed and recipe.rows[n].operation not in recipes.LEAVES:
            needed |= set(recipe.rows[n].operands)
    place = {n: at for at, n in enumerate(sorted(needed))}

    def moved(row: Row) -> Row:
        return row if row.operation in recipes.LEAVES else row._replace(operands=tuple(place[n] for n in row.operands))

    def moved_fields(fields: Sequence[Field]) -> tuple[Field, ...]:
        return tuple(field._replace(value=place[field.value]) for field in fields)

    launches = [
        replace(
            launch,
            grid=tuple(place[n] for n in launch.grid),
            block=tuple(place[n] for n in launch.block),
            fields=moved_fields(launch.fields),
            attributes=tuple((number, moved_fields(fields)) for number, fields in launch.attributes),
        )
        for launch in recipe.launches
    ]
    return Recipe(recipe.arguments, tuple(moved(recipe.rows[n]) for n in sorted(needed)), tuple(launches))
