"""A cubin's own account of its kernels, read from the ELF file's sections of information."""

from __future__ import annotations

import struct


def parameter_sizes(cubin: bytes) -> dict[str, tuple[int, ...]]:
    """The bytes of each parameter of each kernel, as the cubin's ``.nv.info`` sections list them."""
    table, entry, count, names = (*struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58))
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + n * entry) for n in range(count)]
    found = {}
    for section in sections:
        start = sections[names][4] + section[0]
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".nv.info."):
            found[name.removeprefix(".nv.info.")] = _sizes(cubin[section[4] : section[4] + section[5]])
    return found


def _sizes(info: bytes) -> tuple[int, ...]:
    """The bytes of a kernel's parameters, in order, out of its section of information."""
    parameter, with_body, found, at = 0x17, 0x04, {}, 0
    while at < len(info):
        form, attribute, count = struct.unpack_from("<BBH", info, at)
        body = info[at + 4 : at + 4 + count] if form == with_body else b""
        if form == with_body and attribute == parameter:
            _, ordinal, _, packed = struct.unpack("<IHHI", body)
            found[ordinal] = packed >> 18
        at += 4 + len(body)
    return tuple(found[n] for n in sorted(found))
