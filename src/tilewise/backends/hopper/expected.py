"""The properties that a compiled kernel must have: a config states them, the compilation ahead of time holds the kernel to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """The properties that one kernel of a config must have once it is compiled.

    Attributes:
        kernel: how its name in the cubin begins.
        registers: what setmaxnreg gives a thread in each role, the computing one first.
        shared: bytes of shared memory.
        exponentials: how many of a thread's exponentials of one block must run under a product; None: none need to.
        loads, stores: the copy engine loads tiles, and stores them.
        beside: groups of products that are under way beside those exponentials.
        idle_loops: some loops have products in flight and no exponentials at all.
        gathers: a tile's end adds up what other CTAs have left; it may spill what loops of products may not.
    """

    kernel: str
    registers: tuple[int, ...]
    shared: int
    exponentials: int | None
    loads: bool = True
    stores: bool = True
    beside: int = 1
    idle_loops: bool = False
    gathers: bool = False
