"""``tilewise.jax``: the contract's cases through it, judged against float64, and JAX's transformations of them."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("jax", reason="the package jax is not installed")
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import tilewise
import tilewise.jax as tw
from bench import cases, testing
from tilewise.backends.hopper.host import driver, xla

calls = sys.modules["tilewise.jax.handler"]  # whose name in the package is the handler's

jax.config.update("jax_enable_x64", True)  # the contract has float64
jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture(autouse=True)
def on_the_cpu():
    """tests/gpu/test_jax.py has some of these tests on a GPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def array(t: Tensor) -> jax.Array:
    t = t.detach()
    return jnp.asarray(t.float().numpy(), jnp.bfloat16) if t.dtype == torch.bfloat16 else jnp.asarray(t.numpy())


def tensor(x: jax.Array) -> Tensor:
    return (
        torch.tensor(np.asarray(x, np.float32)).bfloat16() if x.dtype == jnp.bfloat16 else torch.tensor(np.asarray(x))
    )


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return array(testing.normal(*shape, seed=seed, dtype=torch.float64))


def qkv(**sizes: object) -> list[jax.Array]:
    return [array(x) for x in testing.qkv(**sizes, dtype=torch.float64)]


def loss(o: jax.Array, lse: jax.Array) -> jax.Array:
    """A number that depends on o and lse."""
    return jnp.sin(o).sum() + jnp.cos(lse).sum()


def equal(found: object, wanted: object) -> None:
    """Two trees of arrays have the same numbers, up to the rounding of sums in another order."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        torch.testing.assert_close(tensor(x), tensor(y))


# -- The contract ------------------------------------------------------------------------------------------------------


def through_the_door(x: cases.Inputs, c: testing.Call) -> dict[str, Tensor]:
    """A case's results by the names of :func:`tilewise.accuracy.tensors`."""
    differentiable = {name.removeprefix("d"): array(t) for name, t in x.wanted.items()}

    def run(given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        leaves = {name: tw.leaf(given.get(name, array(t))) for name, t in x.leaves.items()}
        options = replace(x, leaves=leaves, sink=given.get("sink")).options()
        if options["dropout_seed"] is not None:
            options["dropout_seed"] = array(options["dropout_seed"])
        q, k, v = (given[name] for name in "qkv")
        if not x.case.lengths:
            return tw.attention_with_lse(q, k, v, **options)
        cu = [array(options.pop(f"cu_seqlens_{side}")) for side in "qk"]
        return tw.attention_varlen_with_lse(q, k, v, *cu, **options)

    (o, lse), pull = jax.vjp(run, differentiable)
    (grads,) = pull((array(c.do), array(c.dlse)))
    slots = {t.data_ptr(): slot for slot, t in enumerate(c.t.leaves) if t is not None and slot in c.p.spec.grad_slots}
    named = {name: f"dleaf{slots[t.data_ptr()]}" for name, t in x.leaves.items() if t.data_ptr() in slots}
    found = {"o": o, "lse": lse, **{named.get(name, f"d{name}"): g for name, g in grads.items()}}
    return {name: tensor(y) for name, y in found.items()}


@pytest.mark.parametrize("case", cases.tagged("contract"), ids=lambda case: case.name.removeprefix("contract-"))
def test_agrees_with_the_oracle(case):
    x = case.draw()
    c = testing.call(x.q, x.k, x.v, x.do, "cpu", **x.options())
    found, expected = through_the_door(x, c), c.expected()
    assert set(found) == set(expected.oracle)
    assert not [str(e) for e in expected.judge(found) if not e.ok]


def test_masks_of_the_catalogue_that_read_arrays_are_those_of_tensors():
    table, lengths, start = testing.normal(4, 9), torch.tensor([40, 65]), torch.tensor([[1, 0, 3, 2], [4, 9, 0, 1]])
    ids = torch.randint(0, 2, (2, 70), generator=torch.Generator().manual_seed(0)).cumsum(-1)
    made = {
        "prefix": lambda t, of: t.prefix(of(lengths)),
        "key-range": lambda t, of: t.key_range(start=of(start), end=of(lengths)) | t.window(3, 3),
        "documents": lambda t, of: t.documents(of(ids)) & t.causal(),
        "strided": lambda t, of: t.block_sparse(t.strided(9, 9, 2), 8, 8),
        "function": lambda t, of: t.keep(lambda b, h, i, j: t.lookup(of(table), h, j // 8) > 0),
        "bool": lambda t, of: of(table[:, :1, None] > 0) if t is tw else t.dense(table[:, :1, None] > 0),
    }
    q, k, v = testing.qkv()
    for name, mask in made.items():
        found = tensor(tw.attention(*map(array, (q, k, v)), mask=mask(tw, array)))
        assert torch.equal(found, tilewise.attention(q, k, v, mask=mask(tilewise, lambda t: t))), name


@pytest.mark.parametrize("columns", [65, 70])
def test_a_bias_of_any_number_of_columns_has_the_results_and_gradient_of_tensors(columns):
    q, k, v = (x.astype(jnp.float32) for x in qkv(nk=columns))
    t = normal(70, columns).astype(jnp.float32)
    found, pull = jax.vjp(lambda t: tw.attention(q, k, v, score=t), t)
    bias = tensor(t).requires_grad_()
    wanted = tilewise.attention(*map(tensor, (q, k, v)), score=bias)
    wanted.backward(torch.ones_like(wanted))
    torch.testing.assert_close(tensor(found), wanted.detach())
    torch.testing.assert_close(tensor(pull(jnp.ones_like(found))[0]), bias.grad)


def test_torch_tensors_of_scores_are_constants():
    q, k, v = qkv()
    t = testing.normal(70, 70, dtype=torch.bfloat16).t()
    equal(tw.attention(q, k, v, score=tilewise.bias(t)), tw.attention(q, k, v, score=array(t.contiguous())))


def test_masks_that_are_made_of_arrays_work_in_inference_mode():
    q, k, v = qkv()
    ids = jnp.arange(70) // 9
    with torch.inference_mode():
        found = tw.attention(q, k, v, mask=tw.documents(ids))
    equal(found, tw.attention(q, k, v, mask=tw.documents(ids)))


# -- JAX's transformations ---------------------------------------------------------------------------------------------


def scored(q, k, v, slopes, sink):
    return tw.attention_with_lse(q, k, v, causal=True, score=tw.alibi(slopes) >> tw.softcap(5.0), sink=sink)


SLOPES, SINK = normal(4, seed=7), normal(4, seed=8)


def test_jit_traces_a_call_once_and_gives_the_same_bits():
    traced = []

    def run(*given):
        traced.append(1)
        return scored(*given)

    q, k, v = qkv()
    compiled = jax.jit(run)
    for x in (q, 2 * q):
        for found, wanted in zip(compiled(x, k, v, SLOPES, SINK), scored(x, k, v, SLOPES, SINK), strict=True):
            assert jnp.array_equal(found, wanted)
    assert len(traced) == 1


def test_threads_are_those_of_pytorch_whichever_thread_of_xla_calls(monkeypatch):
    from tilewise.backends.cpu import call

    seen = []
    told = call.Bound.run
    monkeypatch.setattr(call.Bound, "run", lambda self, *x: (seen.append(self.call.threads), told(self, *x)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        jax.block_until_ready(jax.jit(tw.attention)(*qkv()))
    finally:
        torch.set_num_threads(before)
    assert seen == [3]


def test_arrays_of_masks_may_be_arguments_of_a_compiled_function():
    q, k, v = qkv()
    ids = jnp.asarray([[0] * 30 + [1] * 40, [0] * 5 + [3] * 65])
    entries = jnp.asarray([[[[0, 3], [1, -1], [2, 8], [-1, -1], [0, 1], [2, 2], [3, 3], [4, 4], [8, 1]]]])

    @jax.jit
    def run(ids, entries):
        return tw.attention(q, k, v, mask=tw.documents(ids) | tw.selected(entries, 8, 8))

    for given in ((ids, entries), (ids[::-1], jnp.flip(entries, 2))):
        equal(run(*given), tw.attention(q, k, v, mask=tw.documents(given[0]) | tw.selected(given[1], 8, 8)))


def test_layers_in_a_scan_with_checkpoints_have_the_gradients_of_a_loop():
    q, k, v = qkv(hk=4)
    slopes = normal(3, 4)

    def layer(x, slope):
        return tw.attention(x, k, v, score=tw.alibi(slope)), None

    def scanned(x, slopes):
        return jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, slopes)[0]).sum()

    def looped(x, slopes):
        for slope in slopes:
            x, _ = layer(x, slope)
        return jnp.sin(x).sum()

    equal(*[jax.jit(jax.grad(f, (0, 1)))(q, slopes) for f in (scanned, looped)])


def test_a_gradient_that_nobody_wants_is_not_computed():
    q, k, v = qkv()
    t = normal(70, 70)

    def run(q, t):
        return tw.attention(q, k, v, score=tw.bias(t)).sum()

    for wrt, gradients in ((0, 3), (1, 4)):
        (backward,) = [e for e in jax.make_jaxpr(jax.grad(run, wrt))(q, t).eqns if e.primitive.name == "ffi_call"]
        assert len(backward.outvars) == gradients


def test_the_gradient_of_lse_alone():
    q, k, v = qkv()
    found = jax.grad(lambda q: tw.attention_with_lse(q, k, v)[1].sum())(q)
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    s = scale * jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, group, 2))
    equal(found, scale * jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), jnp.repeat(k, group, 2)))


MAPPED = {
    "own-everything": (0, 0, 0, 0, 0),
    "own-queries": (0, None, None, None, None),
    "own-sinks": (0, 0, None, None, 0),
    "own-slopes-behind": (1, 2, 3, 1, None),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_a_loop(name):
    axes = MAPPED[name]
    given = [jnp.stack([x, x[::-1], 0.5 * x]) for x in (*qkv(nq=20, nk=30), SLOPES, SINK)]
    given = [x[0] if axis is None else x for x, axis in zip(given, axes, strict=True)]
    placed = [x if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(given, axes, strict=True)]
    run = jax.value_and_grad(lambda *x: loss(*scored(*x)), range(5))
    loop = [run(*[x if axis is None else x[n] for x, axis in zip(given, axes, strict=True)]) for n in range(3)]
    equal(jax.jit(jax.vmap(run, axes))(*placed), jax.tree.map(lambda *x: jnp.stack(x), *loop))


def test_vmap_over_batch_and_heads_is_the_whole_call():
    q, k, v = qkv(hk=4)
    run = jax.vmap(
        jax.vmap(lambda q, k, v: tw.attention(q[None, :, None], k[None, :, None], v[None, :, None])[0, :, 0], 1, 1)
    )
    equal(run(q, k, v), tw.attention(q, k, v))


def test_vmap_of_masks_with_documents_of_their_own():
    q, k, v = (x[:, None] for x in qkv())
    ids = jnp.asarray([[0] * 30 + [1] * 40, [0] * 5 + [3] * 65])
    found = jax.vmap(lambda q, k, v, ids: tw.attention(q, k, v, mask=tw.documents(ids)))(q, k, v, ids)
    equal(found[:, 0], tw.attention(q[:, 0], k[:, 0], v[:, 0], mask=tw.documents(ids)))


@pytest.mark.filterwarnings("ignore:torch.vmap calls this attention once")
def test_vmap_of_packed_sequences_and_of_dropout():
    q, k, v = qkv()
    cu = jnp.asarray([[0, 30, 70], [0, 1, 60]], jnp.int32)
    found = jax.vmap(lambda *x: tw.attention_varlen(*x, causal=True))(q, k, v, cu)
    equal(found, jnp.stack([tw.attention_varlen(*x, causal=True) for x in zip(q, k, v, cu, strict=True)]))
    seeds = jnp.asarray([3, 4])
    run = lambda q, seed: tw.attention(q, k, v, dropout_p=0.3, dropout_seed=seed)  # noqa: E731
    equal(jax.vmap(run, (None, 0))(q, seeds), jnp.stack([run(q, seed) for seed in seeds]))


BATCH, HEADS = PartitionSpec("x"), PartitionSpec(None, None, "x")


@pytest.mark.parametrize("by", ["batch", "heads"])
def test_shard_map_has_the_results_and_gradients_of_one_device(by):
    whole, of_head = PartitionSpec(), PartitionSpec("x")
    rows, own, lse = (BATCH, whole, BATCH) if by == "batch" else (HEADS, of_head, PartitionSpec(None, "x"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(scored, mesh=mesh, in_specs=(rows, rows, rows, own, own), out_specs=(rows, lse))
    given = (*qkv(), SLOPES, SINK)
    for f in (loss, lambda o, lse: jnp.sin(o).sum(), lambda o, lse: lse.sum()):
        run = [jax.value_and_grad(lambda *x, g=g, f=f: f(*g(*x)), range(5)) for g in (sharded, scored)]
        equal(jax.jit(run[0])(*given), run[1](*given))


def test_sharded_arguments_of_jit_alone_are_gathered_and_right():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    given = qkv()
    placed = [jax.device_put(x, jax.NamedSharding(mesh, BATCH)) for x in given]
    equal(jax.jit(tw.attention)(*placed), tw.attention(*given))


def test_an_exported_program_has_the_results_of_the_call():
    given = (*qkv(), SLOPES, SINK)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("tilewise")]
    equal(jax.export.export(jax.jit(scored), disabled_checks=allowed)(*given).call(*given), scored(*given))


def test_without_64_bits_whole_numbers_and_seeds_are_of_32():
    with jax.enable_x64(False):
        q, k, v = qkv()
        seed = jax.random.bits(jax.random.key(0))
        found = tw.attention(q, k, v, mask=tw.key_lengths(jnp.asarray([40, 65])), dropout_p=0.3, dropout_seed=seed)
        assert found.dtype == jnp.float32
    wanted = tw.attention(q, k, v, mask=tw.key_lengths(jnp.asarray([40, 65])), dropout_p=0.3, dropout_seed=int(seed))
    assert jnp.array_equal(found, wanted)


@pytest.mark.parametrize("seed", [-1, 2**31, 2**40 + 3, 2**63 + 5, np.int64(2**40 + 3)])
def test_seeds_of_64_bits_are_those_of_tensors_without_jaxs_64_bits_too(seed):
    q, k, v = (x.astype(jnp.float32) for x in qkv())
    wanted = tilewise.attention(*map(tensor, (q, k, v)), dropout_p=0.5, dropout_seed=int(seed))
    for bits in (False, True):
        with jax.enable_x64(bits):
            found = tw.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
        assert torch.equal(tensor(found), wanted), bits


# -- Refusals ----------------------------------------------------------------------------------------------------------


def test_wrong_calls_raise_while_tracing_with_every_reason():
    q, k, v = qkv()
    wrong = {
        "seqlen of k .70. and v .9. differ": lambda: tw.attention(q, k, v[:, :9]),
        "different dtypes.*\n.*seqlen of k": lambda: tw.attention(q, k.astype(jnp.float16), v[:, :9]),
        "sink must be a floating tensor .4,.": lambda: tw.attention(q, k, v, sink=normal(3)),
        "alibi.slopes. takes a floating tensor": lambda: tw.alibi(jnp.arange(4)),
        "dropout_seed must be an integer.*got None": lambda: tw.attention(q, k, v, dropout_p=0.1),
        "dropout_seed must be an integer.*got 0.5": lambda: tw.attention(q, k, v, dropout_p=0.1, dropout_seed=0.5),
        "int32 is not float16": lambda: tw.attention(*[x.astype(jnp.int32) for x in (q, k, v)]),
        "arrays of numbers or truth values, got key": lambda: tw.leaf(jax.random.key(0)),
        "q: attention takes arrays of JAX or NumPy, got NoneType.*\n.*v: .* got str": lambda: tw.attention(
            None, k, "v"
        ),
        "float8_e5m2; convert it: x.astype.jnp.float32": lambda: tw.attention(
            q, k, v, sink=jnp.zeros(4, jnp.float8_e5m2)
        ),
        "int4; convert it: x.astype.jnp.int32": lambda: tw.key_lengths(jnp.zeros(2, jnp.int4)),
        "pass t.detach": lambda: tw.bias(torch.zeros(70, 70, requires_grad=True)),
        "take the leaf of that": lambda: tw.attention(q, k, v, score=tw.bias(2 * tw.leaf(normal(70, 70)))),
        "prepare.q, k.: q must be a tensor": lambda: tw.causal().prepare(q, k),
        "one sequence is q.None.": lambda: tw.attention(q[0], k[0], v[0]),
        "make it one: jnp.asarray.sink, jnp.float32.": lambda: tw.attention(q, k, v, sink=[0.0] * 4),
        "convert it: ids.astype.int.": lambda: tw.documents(normal(70)),
        "at most 64 bits.*got 18446744073709551616": lambda: tw.attention(q, k, v, dropout_p=0.1, dropout_seed=2**64),
        "does not exist; there are cpu": lambda: tw.attention(q, k, v, backend="gpu"),
    }
    for reason, run in wrong.items():
        with pytest.raises(ValueError, match=f"(?s){reason}"):
            jax.eval_shape(run)


@pytest.mark.parametrize("word", ["causal", "softmax_scale", "dropout_p"])
def test_options_that_are_traced_are_refused_with_what_to_write(word):
    instead = "multiply q by it" if word == "softmax_scale" else "static_argnames"
    with pytest.raises(ValueError, match=f"{word} must be known while JAX traces.*{instead}"):
        jax.jit(lambda x: tw.attention(*qkv(), **{word: x}))(0.5)


@pytest.mark.parametrize("name", ["softcap", "window", "butterfly", "block_sparse"])
def test_numbers_of_masks_and_scores_that_are_traced_are_refused(name):
    given = {"butterfly": (8,), "block_sparse": (8, 8)}.get(name, ())
    pattern = [jnp.ones((9, 9), bool)] if name == "block_sparse" else []
    with pytest.raises(ValueError, match=f"{name} takes numbers that are known while JAX traces"):
        jax.jit(lambda x: getattr(tw, name)(*pattern, x, *given[len(pattern) :]) and x)(8)


def test_sizes_that_are_symbols_are_refused():
    (batch,) = jax.export.symbolic_shape("b")
    given = [jax.ShapeDtypeStruct((batch, 70, 4, 16), jnp.float32)] * 3
    with pytest.raises(NotImplementedError, match="export a program for each shape"):
        jax.export.export(jax.jit(tw.attention))(*given)


def test_an_array_too_many_by_position_is_told_its_keyword():
    with pytest.raises(TypeError, match="write mask= for a bool tensor"):
        tw.attention(*qkv(), jnp.ones((70, 70), bool))


def test_what_cannot_run_is_refused_while_tracing():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="runs on cuda, q is on cpu"):
        jax.eval_shape(lambda: tw.attention(q, k, v, backend="hopper"))


@pytest.mark.parametrize("word", ["is_causal", "parallel", "bias"])
def test_words_of_other_libraries_are_refused_with_ours(word):
    with pytest.raises(TypeError, match=f"attention.. got an unexpected keyword argument '{word}'"):
        tw.attention(*qkv(), **{word: True})


@pytest.mark.parametrize("name", ["index", "value", "function"])
def test_a_function_that_reads_an_array_itself_is_told_how(name):
    read = {
        "index": lambda s, b, h, i, j: s + SLOPES[h],
        "value": lambda s, b, h, i, j: s * SLOPES[0],
        "function": lambda s, b, h, i, j: jnp.where(i < j, s, 0.0),
    }
    with pytest.raises((IndexError, NotImplementedError, TypeError), match=r"tilewise\.jax\.leaf"):
        tw.attention(*qkv(), score=read[name])


def test_wrong_values_are_an_error_of_jax_when_the_call_runs():
    q, k, v = (x[0] for x in qkv())
    run = jax.jit(tw.attention_varlen)
    with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens_q decreases at position 2: 40 -> 10"):
        run(q, k, v, jnp.asarray([0, 40, 10]))
    assert jnp.isfinite(run(q, k, v, jnp.asarray([0, 40, 70]))).all()


def test_other_derivatives_than_the_first_in_reverse_are_refused():
    q, k, v = qkv()

    def run(q):
        return tw.attention(q, k, v).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(run, (q,), (q,))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: jax.grad(run)(q).sum())(q)


# -- The handler of calls on a GPU -------------------------------------------------------------------------------------


def test_the_native_handler_reads_what_xla_hands_over_and_leaves_other_calls_to_python(monkeypatch):
    """It is registered for the CPU: XLA has an ordinal of it, and no stream, so that a bound call ends there."""
    if isinstance(driver.load(), str):
        pytest.skip(driver.load())
    came, launches = [], xla.BoundStruct((xla.MemoryStruct * 1)((0, 0)), (xla.BoundLaunchStruct * 1)(), 0, 0, 1, 1)

    @calls.Handler
    def other(frame):
        if not frame.contents.extension:  # the question for metadata
            came.append(frame.contents.operands.size)
        if len(came) > 2:
            xla.bind(ctypes.addressof(frame.contents), launches)
        return calls.handler(frame)

    jax.ffi.register_ffi_target("tilewise_native", jax.ffi.pycapsule(xla.target(other)), platform="cpu")
    given = qkv()
    run = jax.value_and_grad(lambda *x: tw.attention(*x, causal=True).sum(), (0, 1, 2))
    wanted = run(*given)
    monkeypatch.setattr(tw, "_TARGET", "tilewise_native")
    equal(jax.jit(run)(*given), wanted)
    assert came == [3, 7]
    half = [x.astype(jnp.float16) for x in given]
    jax.block_until_ready(tw.attention(*half))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="GPU context"):
        jax.block_until_ready(tw.attention(*half))
    assert came[2:] == [3]
