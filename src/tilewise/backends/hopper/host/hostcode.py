"""From the compiled host function of a launch to its :class:`tilewise.backends.hopper.host.recipe.Recipe`.

The compiler leaves the host side of ``@cute.jit`` in MLIR's dialect of LLVM: it takes sizes out of tensors, packs tensor
maps, and fills the launch's configuration and parameters in local memory. Here that function is run once on symbols: what
is known is computed, the rest becomes rows of the recipe. What it does not know is refused, never guessed; a test holds the
result against the driver calls that the compiler's own object makes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tilewise.backends.hopper.host import recipe as recipes
from tilewise.backends.hopper.host.recipe import Argument, Extent, Field, Launch, Patch, Recipe, Row, TensorArgument

_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")  # by LLVM's number
_DYNAMIC = -(1 << 31)  # in a getelementptr's constant indices: take the next operand
_CONFIGURATION = (
    "struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"  # grid, block, shared, stream, attributes
)
_STEPS = 100_000


class Refused(NotImplementedError):
    """The host function does what no recipe can say."""


# -- Types ---------------------------------------------------------------------------------------------------------


class Scalar(NamedTuple):
    """A number or an address in a type: where it lies."""

    offset: int
    type: str

    @property
    def bytes(self) -> int:
        return _scalar_size(self.type)


def _scalar_size(kind: str) -> int:
    if kind.startswith("ptr"):
        return 8
    return -(-int(kind[1:]) // 8)


def _parts(text: str) -> list[str]:
    """Of a list separated by commas, outside brackets."""
    found, depth, start = [], 0, 0
    for n, c in enumerate(text):
        depth += (c in "(<") - (c in ")>")
        if c == "," and not depth:
            found.append(text[start:n].strip())
            start = n + 1
    return [*found, text[start:].strip()] if text.strip() else found


def members(kind: str) -> list[str] | None:
    """The types inside a struct or an array; None: a scalar."""
    kind = kind.removeprefix("!llvm.")
    if kind.startswith("struct<("):
        return _parts(kind[len("struct<(") : -len(")>")])
    array = re.fullmatch(r"array<(\d+) x (.*)>", kind)
    if array:
        return [array[2]] * int(array[1])
    if not re.fullmatch(r"ptr(<\d+>)?|i\d+|f32", kind):
        raise Refused(f"the type {kind}")
    return None


def alignment(kind: str) -> int:
    inner = members(kind)
    return _scalar_size(kind.removeprefix("!llvm.")) if inner is None else max(map(alignment, inner), default=1)


def size(kind: str) -> int:
    inner = members(kind)
    if inner is None:
        return _scalar_size(kind.removeprefix("!llvm."))
    step = alignment(kind)
    return -(-(starts(kind)[-1] if inner else 0) // step) * step


def starts(kind: str) -> list[int]:
    """Where each member starts, and, last, where they end."""
    found, at = [], 0
    for part in members(kind):
        at = -(-at // alignment(part)) * alignment(part)
        found.append(at)
        at += size(part)
    return [*found, at]


def scalars(kind: str, at: int = 0) -> Iterator[Scalar]:
    inner = members(kind)
    if inner is None:
        yield Scalar(at, kind.removeprefix("!llvm."))
        return
    for start, part in zip(starts(kind), inner, strict=False):
        yield from scalars(part, at + start)


# -- Values --------------------------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A row of the recipe."""

    row: int
    bits: int


class Local(NamedTuple):
    """An address in the function's own memory."""

    room: int
    offset: int


class Global(NamedTuple):
    name: str


class Handle(NamedTuple):
    """What is loaded from a global: a kernel, where it is one."""

    name: str


class Stream(NamedTuple):
    """The launch's stream."""


class Rows:
    """Rows, each once; those of constants are computed."""

    def __init__(self):
        self.rows: list[Row] = []
        self._known: dict[Row, int] = {}

    def add(self, operation: str, bits: int, *operands: int, width: int = 0) -> Value:
        parts = [self.rows[n] for n in operands] if operation not in recipes.LEAVES else []
        if parts and all(r.operation == "constant" for r in parts):
            return self.constant(recipes.apply(operation, bits, width, *[r.operands[0] for r in parts]), bits)
        row = Row(operation, bits, tuple(operands), width)
        if row not in self._known:
            self._known[row] = len(self.rows)
            self.rows.append(row)
        return Value(self._known[row], bits)

    def constant(self, n: int, bits: int) -> Value:
        return self.add("constant", bits, n & ((1 << bits) - 1))

    def known(self, value: Value) -> int | None:
        row = self.rows[value.row]
        return row.operands[0] if row.operation == "constant" else None

    def leaves(self, value: Value) -> set[Row]:
        """The leaves under a row that are no constants."""
        row = self.rows[value.row]
        if row.operation in recipes.LEAVES:
            return set() if row.operation == "constant" else {row}
        return set().union(*(self.leaves(Value(n, 0)) for n in row.operands))


# -- Running the function on symbols -------------------------------------------------------------------------------


class Machine:
    """The function's registers and memory. ``launches`` collects what it launches."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.registers: dict[int, Any] = {}  # by hash, which is the value's identity: the DSL's == on values emits code
        self.memory: list[dict[int, tuple[str, Any]]] = []
        self.room_types: list[str] = []
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

    def _icmp(self, op: Any, a: Value, b: Value) -> Value:
        return self._arithmetic(_PREDICATES[op.attributes["predicate"].value], op, [a, b])

    def _constant(self, op: Any) -> Value | None:
        kind = str(op.results[0].type)
        if not re.fullmatch(r"i\d+", kind):
            return None if kind != "f32" else self.rows.constant(recipes.number_bits("f32", _value(op)), 32)
        return self.rows.constant(int(_value(op)), int(kind[1:]))

    def _zero(self, op: Any) -> Value:
        return self.rows.constant(0, _bits(op.results[0]))

    def _poison(self, op: Any) -> Any:
        return _blank(str(op.results[0].type))

    _undef = _poison

    def _ptrtoint(self, op: Any, address: Any) -> Any:
        return address

    _inttoptr = _bitcast = _ptrtoint

    def _addressof(self, op: Any) -> Global:
        return Global(op.attributes["global_name"].value)

    def _extractvalue(self, op: Any, whole: list) -> Any:
        for n in op.attributes["position"]:
            whole = whole[n]
        return whole

    def _insertvalue(self, op: Any, whole: list, part: Any) -> list:
        return _with(whole, list(op.attributes["position"]), part)

    def _alloca(self, op: Any, count: Value) -> Local:
        kind = str(op.attributes["elem_type"].value).removeprefix("!llvm.")
        self.memory.append({})
        self.room_types.append(f"array<{self.rows.known(count)} x {kind}>")
        return Local(len(self.memory) - 1, 0)

    def _getelementptr(self, op: Any, base: Local, *dynamic: Value) -> Local:
        rest = iter(dynamic)
        indices = [n if n != _DYNAMIC else self.rows.known(next(rest)) for n in op.attributes["rawConstantIndices"]]
        if not isinstance(base, Local) or None in indices:
            raise Refused("an address that only the call knows")
        kind = str(op.attributes["elem_type"].value)
        offset = base.offset + indices[0] * size(kind)
        for n in indices[1:]:
            inner = members(kind)
            offset += starts(kind)[n] if n < len(inner) else n * size(inner[0])
            kind = inner[min(n, len(inner) - 1)]
        return Local(base.room, offset)

    def _store(self, op: Any, value: Any, to: Local) -> None:
        if isinstance(to, Local):
            kind = str(op.operands[0].type)
            for part, x in zip(scalars(kind, to.offset), _leaves(kind, value), strict=True):
                self.memory[to.room][part.offset] = (part.type, x)

    def _load(self, op: Any, at: Any) -> Any:
        kind = str(op.results[0].type)
        if isinstance(at, Global):
            return Handle(at.name)
        found = [self.memory[at.room].get(part.offset, (None, None))[1] for part in scalars(kind, at.offset)]
        return _shaped(kind, iter(found))

    def _call(self, op: Any, *operands: Any) -> Value:
        callee = op.attributes["callee"].value
        if callee != "_cudaLaunchKernelEx":
            raise Refused(f"a call of {callee}")
        self.launches.append(self._launch(*operands))
        return self.rows.constant(0, 32)  # success

    # -- What a launch is given, read from memory ------------------------------------------------------------------

    def _launch(self, configuration: Local, kernel: Handle, parameters: Local) -> Launch:
        at = lambda n: self.memory[configuration.room][configuration.offset + n][1]  # noqa: E731
        if not isinstance(at(32), Stream):
            raise Refused("a launch on another stream than the call's")
        rooms = [self.memory[parameters.room][8 * n][1] for n in range(size(self.room_types[parameters.room]) // 8)]
        sizes = [size(self.room_types[x.room]) for x in rooms]
        fields, patches = [], []
        for start, room in zip(recipes.offsets(sizes), rooms, strict=False):
            for offset, count, value in self._filled(room, size(self.room_types[room.room])):
                tensor = self._address(value)
                patches += [] if tensor is None else [Patch(start + offset, tensor)]
                fields += [Field(start + offset, count, value.row)] if tensor is None else []
        return Launch(
            kernel.name.removeprefix("kernels_"),
            tuple(at(4 * n).row for n in range(3)),
            tuple(at(12 + 4 * n).row for n in range(3)),
            self._constant_of(at(24), "shared memory"),
            tuple(sizes),
            tuple(fields),
            tuple(patches),
            tuple(self._attributes(at(40), self._constant_of(at(48), "attributes"))),
        )

    def _constant_of(self, value: Value, what: str) -> int:
        found = self.rows.known(value)
        if found is None:
            raise Refused(f"{what} that only the call knows")
        return found

    def _attributes(self, first: Local, count: int) -> Iterator[tuple[int, tuple[Field, ...]]]:
        step = size("struct<(i32, array<4 x i8>, array<64 x i8>)>")
        for n in range(count):
            here = Local(first.room, first.offset + n * step)
            number = self._constant_of(self.memory[here.room][here.offset][1], "an attribute")
            found = self._filled(Local(here.room, here.offset + 8), 64)
            yield number, tuple(Field(offset, count, value.row) for offset, count, value in found)

    def _filled(self, room: Local, count: int) -> Iterator[tuple[int, int, Value]]:
        """What was stored in ``count`` bytes: where, how many bytes, what."""
        for offset, (kind, value) in sorted(self.memory[room.room].items()):
            if room.offset <= offset < room.offset + count and value is not None:
                if not isinstance(value, Value):
                    raise Refused(f"a parameter that is {value}")
                yield offset - room.offset, _scalar_size(kind), value

    def _address(self, value: Value) -> int | None:
        """The tensor whose address a value is; None: it has nothing to do with one."""
        leaves = self.rows.leaves(value)
        tensors = {row.operands[0] for row in leaves if row.operation == "address"}
        if not tensors:
            return None
        samples = [1 << n for n in range(4, 57)] + [0x7F12_3456_7890, 0x1FF_FFFF_FFFF_FFF0]
        if len(leaves) > 1 or any(self._of_address(value.row, x) != x for x in samples):
            raise Refused("a parameter computed from an address and more")
        return tensors.pop()

    def _of_address(self, row: int, address: int) -> int:
        operation, bits, operands, width = self.rows.rows[row]
        if operation == "address":
            return address
        if operation == "constant":
            return operands[0]
        return recipes.apply(operation, bits, width, *[self._of_address(n, address) for n in operands])


def _bits(register: Any) -> int:
    kind = str(register.type).removeprefix("!llvm.")
    return 64 if kind.startswith("ptr") else int(kind[1:])


def _value(op: Any) -> Any:
    return op.attributes["value"].value


def _blank(kind: str) -> Any:
    inner = members(kind)
    return None if inner is None else [_blank(part) for part in inner]


def _with(whole: list, position: list[int], part: Any) -> list:
    first, *rest = position
    return [_with(x, rest, part) if n == first and rest else part if n == first else x for n, x in enumerate(whole)]


def _leaves(kind: str, value: Any) -> Iterator[Any]:
    inner = members(kind)
    if inner is None:
        yield value
    elif value is None:  # a constant array: a text
        yield from (None for _ in scalars(kind))
    else:
        for part, x in zip(inner, value, strict=True):
            yield from _leaves(part, x)


def _shaped(kind: str, found: Iterator[Any]) -> Any:
    inner = members(kind)
    return next(found) if inner is None else [_shaped(part, found) for part in inner]


# -- Arguments -----------------------------------------------------------------------------------------------------


def arguments_of(traced: Sequence[Any]) -> tuple[Argument, ...]:
    """Of what ``cute.compile`` was given: fake tensors, numbers, tuples of them; without streams and what is not staged."""
    symbols: dict[int, int] = {}

    def extent(e: Any) -> int | Extent:
        return e if isinstance(e, int) else Extent(symbols.setdefault(id(e), len(symbols)), e.divisibility)

    found: list[Argument] = []
    for x in recipes.flat(traced):
        if hasattr(x, "element_type"):
            sides = tuple(tuple(extent(e) for e in side) for side in (x.shape, x.stride))
            found.append(TensorArgument(_torch_name(x.element_type), *sides, x._assumed_align))
        elif type(x).__name__ in ("Int32", "Int64", "Float32"):
            found.append({"I": "i", "F": "f"}[type(x).__name__[0]] + type(x).__name__[-2:])
    return tuple(found)


def _torch_name(element: Any) -> str:
    return re.sub(r"([a-z])(\d)", r"\1\2", element.__name__.lower())


def _inputs(arguments: Sequence[Argument], types: Sequence[str], rows: Rows) -> list[Any]:
    """The function's arguments as values: of each tensor its address, then its sizes and strides that are not fixed."""
    found, types = [], list(types)
    for n, argument in enumerate(arguments):
        kind = types.pop(0)
        if isinstance(argument, str):
            found.append(rows.add("number", _scalar_size(kind) * 8, n))
            continue
        parts = [("size", d) for d, e in enumerate(argument.shape) if isinstance(e, Extent)]
        parts += [("stride", d) for d, e in enumerate(argument.stride) if isinstance(e, Extent)]
        _, *extents = scalars(kind)
        if len(extents) != len(parts):
            raise Refused(f"argument {n} has {len(extents)} numbers, not {len(parts)}")
        leaves = [rows.add("address", 64, n)]
        leaves += [rows.add(op, 8 * s.bytes, n, dim) for (op, dim), s in zip(parts, extents, strict=True)]
        found.append(_shaped(kind, iter(leaves)))
    if [kind.removeprefix("!llvm.") for kind in types] != ["ptr"]:
        raise Refused(f"a host function with {types} behind its arguments, not with one stream")
    return [*found, Stream()]


# -- The whole -----------------------------------------------------------------------------------------------------


def read(module: Any, name: str, traced: Sequence[Any], cubin: bytes) -> Recipe:
    """The recipe of the host function ``name`` in a compiled module; ``traced``: what it was compiled for.

    Raises:
        NotImplementedError: it does what no recipe can say, or the cubin's kernels take other parameters.
    """
    functions = [op.operation for op in module.body.operations if op.operation.name == "llvm.func"]
    function = next(f for f in functions if f.attributes["sym_name"].value == name)
    arguments, rows = arguments_of(traced), Rows()
    machine = Machine(rows)
    types = [str(x.type) for x in function.regions[0].blocks[0].arguments]
    machine.run(function, _inputs(arguments, types, rows))
    sizes = parameter_sizes(cubin)
    for launch in machine.launches:
        if sizes.get(launch.kernel) != launch.sizes:
            raise Refused(f"{launch.kernel} takes {sizes.get(launch.kernel)}, and is given {launch.sizes}")
    return _pruned(Recipe(arguments, tuple(rows.rows), tuple(machine.launches)))


def _pruned(recipe: Recipe) -> Recipe:
    """Without the rows that no launch needs."""
    lists = [fields for x in recipe.launches for fields in (x.fields, *(f for _, f in x.attributes))]
    needed = {f.value for fields in lists for f in fields}
    needed |= {n for x in recipe.launches for n in (*x.grid, *x.block)}
    for n in range(len(recipe.rows) - 1, -1, -1):
        if n in needed and recipe.rows[n].operation not in recipes.LEAVES:
            needed |= set(recipe.rows[n].operands)
    place = {n: at for at, n in enumerate(sorted(needed))}
    inside = lambda row: row.operation not in recipes.LEAVES  # noqa: E731
    rows = [recipe.rows[n] for n in sorted(needed)]
    rows = [r._replace(operands=tuple(place[n] for n in r.operands)) if inside(r) else r for r in rows]
    moved = lambda fields: tuple(f._replace(value=place[f.value]) for f in fields)  # noqa: E731
    launches = [
        Launch(
            x.kernel,
            tuple(place[n] for n in x.grid),
            tuple(place[n] for n in x.block),
            x.shared,
            x.sizes,
            moved(x.fields),
            x.patches,
            tuple((number, moved(fields)) for number, fields in x.attributes),
        )
        for x in recipe.launches
    ]
    return Recipe(recipe.arguments, tuple(rows), tuple(launches))


def parameter_sizes(cubin: bytes) -> dict[str, tuple[int, ...]]:
    """Bytes of each parameter of each kernel, as the cubin's ``.nv.info`` sections list them."""
    table, entry, count, names = (*struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58))
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + n * entry) for n in range(count)]
    found = {}
    for section in sections:
        start = sections[names][4] + section[0]
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".nv.info."):
            found[name.removeprefix(".nv.info.")] = _listed(cubin[section[4] : section[4] + section[5]])
    return found


def _listed(info: bytes) -> tuple[int, ...]:
    parameter, with_body, found, at = 0x17, 0x04, {}, 0
    while at < len(info):
        form, attribute, count = struct.unpack_from("<BBH", info, at)
        body = info[at + 4 : at + 4 + count] if form == with_body else b""
        if form == with_body and attribute == parameter:
            _, ordinal, _, packed = struct.unpack("<IHHI", body)
            found[ordinal] = packed >> 18
        at += 4 + len(body)
    return tuple(found[n] for n in sorted(found))
