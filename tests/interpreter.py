"""Triton's interpreter without work that changes no result and takes most of its time, and without two faults.

A launch replaces the functions of Triton's language by those of the interpreter. Each call of a function inside the kernel does so again,
by a search through every member of the language, which finds nothing left to replace. Each sum and product of integers is computed once
more in 64 bits, for an assertion that is made in debug mode alone.

The faults: a scalar comparison that is spread over a tile becomes int32 there, which the loads and stores of 3.9 do not take as a mask;
and ``fma`` rounds twice.
"""

from __future__ import annotations

from dataclasses import replace

from numpy import float32, float64


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

    made: dict[tuple, object] = {}  # the types of tiles and constants of a launch

    def launch_anew(self, *arguments, **keywords):
        patched.clear()
        made.clear()
        return launch(self, *arguments, **keywords)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
    builder = interpreter.interpreter_builder
    splat = type(builder).create_splat

    def splat_kept(self, tile, scalar):
        made = splat(self, tile, scalar)
        return replace(made, data=made.data.astype(bool)) if scalar.data.dtype == bool else made

    def fma(self, x, y, z):
        wide = float64 if x.data.dtype == float32 else x.data.dtype  # in which a product of two fp32 numbers is exact
        return replace(z, data=(x.data.astype(wide) * y.data + z.data).astype(z.data.dtype))

    type(builder).create_splat, type(builder).create_fma = splat_kept, fma
    spare_types(interpreter, made)
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def spare_types(interpreter, made: dict[tuple, object]) -> None:
    """Has equal types of tiles be one object, which knows what each tensor of it has; constants, too."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    of_types, np_dtypes = interpreter._get_np_dtype, {}
    new_block, new_tensor, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    constant, broadcast = semantic.scalar_constant, semantic.broadcast_impl_value
    checked = semantic.binary_op_type_checking_impl

    def np_dtype(of):
        if of.name not in np_dtypes:
            np_dtypes[of.name] = of_types(of)
        return np_dtypes[of.name]

    def block_of(cls, element_ty, shape):
        key = cls, id(element_ty), *shape
        if key not in made:
            made[key] = object.__new__(cls)
        return made[key]

    def init_block(self, element_ty, shape):
        if "numel" not in vars(self):
            new_block(self, element_ty, shape)

    def init_tensor(self, handle, type):
        if "of_tensors" in vars(type):
            vars(self).update(type.of_tensors, handle=handle)
        else:
            new_tensor(self, handle, type)
            type.of_tensors = {name: x for name, x in vars(self).items() if name != "handle"}

    def constant_of(self, value, dtype):
        key = type(value), repr(value), dtype  # 0.0 and -0.0 are equal
        if key not in made:
            made[key] = constant(self, value, dtype)
        return made[key]

    def broadcast_unlike(self, lhs, rhs):
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    def checked_unlike(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic=True, div_or_mod=False):
        same = getattr(lhs, "type", lhs) is getattr(rhs, "type", None)
        if same and not div_or_mod and not lhs.type.scalar.is_ptr():
            return lhs, rhs
        return checked(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, div_or_mod)

    interpreter._get_np_dtype = np_dtype
    core.block_type.__new__, core.block_type.__init__, core.tensor.__init__ = block_of, init_block, init_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.scalar_constant, semantic.broadcast_impl_value = constant_of, broadcast_unlike
    semantic.binary_op_type_checking_impl = checked_unlike
