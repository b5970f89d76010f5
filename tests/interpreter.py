"""Triton's interpreter without work that changes no result and takes most of its time, and without a fault.

A launch replaces the functions of Triton's language by those of the interpreter. Each call of a function inside the kernel does so again,
by a search through every member of the language, which finds nothing left to replace. Each sum and product of integers is computed once
more in 64 bits, for an assertion that is made in debug mode alone.

The fault: a scalar comparison that is spread over a tile becomes int32 there, which the loads and stores of 3.9 do not take as a mask.
"""

from __future__ import annotations

from dataclasses import replace


def quicken() -> None:
    """Leaves that work out, in this process and for each kernel that is launched from now on."""
    from triton.runtime import interpreter

    if getattr(interpreter, "quickened", False):
        return
    interpreter.quickened = True
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    # The globals of modules for whose functions the language is patched until the launch ends.
    patched: set[int] = set()

    def patch_once(fn):
        known = id(fn.__globals__) in patched
        patched.add(id(fn.__globals__))
        return None if known else patch(fn)

    def launch_anew(self, *arguments, **keywords):
        patched.clear()
        return launch(self, *arguments, **keywords)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
    builder = interpreter.interpreter_builder
    splat = type(builder).create_splat

    def splat_kept(self, tile, scalar):
        made = splat(self, tile, scalar)
        return replace(made, data=made.data.astype(bool)) if scalar.data.dtype == bool else made

    type(builder).create_splat = splat_kept
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
