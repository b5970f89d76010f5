"""Masks that went on with what their tensors held before: tiles, lists and tables of a tensor that was written after.

The kinds are those of reports on FlexAttention's `BlockMask` under `torch.compile`, on tensors of inference mode, on CUDA graphs and on
memory that Inductor gives to another tensor.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from tilewise.backends.base import PerTensors
from tilewise.backends.portable import Portable
from tilewise.compat import flex_attention as door
from tilewise.masks import derived
from tilewise.spec import Options, assemble, parse_spec

LENGTH = 140
Q = torch.randn(1, LENGTH, 2, 8, generator=torch.Generator().manual_seed(1))


def few(n: int) -> torch.Tensor:
    return torch.full((1,), n)


# A mask of one tensor, what the tensor holds first, and later.
MASKS = {
    "function": (lambda n: tw.keep(lambda b, h, i, j: j < n[b]), few(30), few(110)),
    "lengths": (tw.key_lengths, few(30), few(110)),
    "dense": (tw.dense, torch.ones(LENGTH, LENGTH).tril().bool(), torch.ones(LENGTH, LENGTH).triu().bool()),
    "documents": (tw.documents, torch.arange(LENGTH) // 40, torch.arange(LENGTH) // 90),
    "with causal": (lambda n: tw.causal() & tw.keep(lambda b, h, i, j: j < n[b]), few(30), few(110)),
}
every_mask = pytest.mark.parametrize(("make", "before", "later"), MASKS.values(), ids=MASKS)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


def compiled(mask, backend="aot_eager"):
    return torch.compile(lambda q: tw.attention(q, q, q, mask=mask), fullgraph=True, backend=backend)


def right(q, mask):
    return tw.reference.attention(q, q, q, mask=mask).o.to(q.dtype)


# -- Prepared masks ------------------------------------------------------------------------------------------------------


@every_mask
def test_compile_a_prepared_mask_has_the_tiles_of_what_its_tensor_holds(make, before, later):
    held = before.clone()
    run = compiled(make(held).prepare(Q, Q))
    torch.testing.assert_close(run(Q), tw.attention(Q, Q, Q, mask=make(before)))
    held.copy_(later)
    torch.testing.assert_close(run(Q), tw.attention(Q, Q, Q, mask=make(later)))


def test_compile_a_mask_prepared_inside_has_the_tiles_of_what_its_tensor_holds():
    held, (make, before, later) = few(30), MASKS["function"]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q):
        mask = make(held).prepare(q, q)
        first = tw.attention(q, q, q, mask=mask)
        held.copy_(later)
        return first, tw.attention(q, q, q, mask=mask)

    for got, n in zip(run(Q), (before, later), strict=True):
        torch.testing.assert_close(got, tw.attention(Q, Q, Q, mask=make(n)))


def test_compile_a_mask_without_tensors_keeps_its_lists():
    mask = tw.keep(lambda b, h, i, j: (i + j) % 90 < 40).prepare(Q, Q)
    torch.testing.assert_close(compiled(mask)(Q), tw.attention(Q, Q, Q, mask=mask))
    assert mask.current() is mask


def test_make_fx_a_prepared_mask_has_the_tiles_of_what_its_tensor_holds():
    make, before, later = MASKS["function"]
    held = before.clone()
    mask = make(held).prepare(Q, Q)
    traced = make_fx(lambda q: tw.attention(q, q, q, mask=mask))(Q)
    held.copy_(later)
    torch.testing.assert_close(traced(Q), tw.attention(Q, Q, Q, mask=make(later)))


@every_mask
def test_inference_mode_a_mask_of_its_tensors_is_not_prepared_and_sees_writes(make, before, later):
    with torch.inference_mode():
        held = before.clone()
        mask = make(held)
        with pytest.raises(
            ValueError,
            match=r"torch.inference_mode or torch.func, whose writes PyTorch does not count.*without prepare",
        ):
            mask.prepare(Q, Q)
        first = tw.attention(Q, Q, Q, mask=mask)
        held.copy_(later)
        second = tw.attention(Q, Q, Q, mask=mask)
    assert torch.equal(first, tw.attention(Q, Q, Q, mask=make(before)))
    assert torch.equal(second, tw.attention(Q, Q, Q, mask=make(later)))


def test_inference_mode_a_prepared_mask_of_other_tensors_is_refused_after_a_write_there():
    held = few(30)
    with torch.inference_mode():
        mask = tw.keep(lambda b, h, i, j: j < held[b]).prepare(Q, Q)
        tw.attention(Q, Q, Q, mask=mask)
        held.fill_(110)
        with pytest.raises(ValueError, match="was written after"):
            tw.attention(Q, Q, Q, mask=mask)


@pytest.mark.parametrize("causal", [False, True])
def test_cuda_graph_a_capture_reads_a_prepared_mask_as_if_it_was_not(causal, monkeypatch):
    held = few(30)
    masks = {
        "reads": tw.keep(lambda b, h, i, j: j < held[b]).prepare(Q, Q),
        "of positions": tw.keep(lambda b, h, i, j: i != j).prepare(Q, Q),
    }

    def prepared(mask):
        _, _, text = assemble(Q, Q, Q, Options(mask=mask, causal=causal))
        return parse_spec(text).region.prepared is not None

    assert [prepared(mask) for mask in masks.values()] == [not causal] * 2
    monkeypatch.setattr(derived, "is_captured", lambda: True)
    assert [prepared(mask) for mask in masks.values()] == [False, not causal]


# -- Tensors that change in other ways -----------------------------------------------------------------------------------

CHANGES = {
    "set_": lambda t, later: t.set_(later),
    "set_ of a view": lambda t, later: t.set_(later.untyped_storage(), 0, later.shape, later.stride()),
    "resize_": lambda t, later: t.resize_(0).resize_(later.shape).copy_(later),
    "data": lambda t, later: setattr(t, "data", later),
    "a view's write": lambda t, later: t[:].copy_(later),
    "foreach": lambda t, later: torch._foreach_copy_([t], [later]),
    "out=": lambda t, later: torch.add(later, 0, out=t),
    "inference": lambda t, later: torch.inference_mode()(t.copy_)(later),
    "functionalize": lambda t, later: torch.func.functionalize(lambda x: x.copy_(later))(t),
    "compiled": lambda t, later: torch.compile(lambda x, y: x.copy_(y), backend="inductor")(t, later),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["function", "documents"])
def test_changed_tensor_a_mask_is_what_it_holds_now(name, change):
    make, before, later = MASKS[name]
    held = before.clone()
    mask = make(held)
    prepared = mask.prepare(Q, Q)
    tw.attention(Q, Q, Q, mask=mask)
    change(held, later.clone())
    assert torch.equal(tw.attention(Q, Q, Q, mask=mask), tw.attention(Q, Q, Q, mask=make(later)))
    with pytest.raises(ValueError, match="was written after"):
        tw.attention(Q, Q, Q, mask=prepared)


def table() -> torch.Tensor:
    return torch.randn(1, LENGTH)


# What is made of a tensor, the tensor, and what it becomes: each was read on as the old one, and other numbers with it.
OTHER_FORMS = {
    "lengths of more": (lambda t: {"mask": tw.key_lengths(t)}, few(30), torch.tensor([30, 110])),
    "lengths with causal": (lambda t: {"mask": tw.key_lengths(t) & tw.causal()}, few(30), torch.tensor([30, 110])),
    "one row of pairs": (lambda t: {"mask": tw.dense(t)}, table() > 0, torch.ones(LENGTH, LENGTH).tril() > 0),
    "selected": (lambda t: {"mask": tw.selected(t)}, torch.zeros(1, 1, 1, 2).long(), torch.ones(1, 2, 1, 2).long()),
    "floats for whole numbers": (lambda t: {"mask": tw.keep(lambda b, h, i, j: t[i] >= j)}, torch.arange(LENGTH), torch.rand(LENGTH)),
    "an element from the end": (lambda t: {"mask": tw.keep(lambda b, h, i, j: tw.lookup(t, -1) > j)}, torch.arange(9), torch.arange(99)),
    "bias": (lambda t: {"score": tw.bias(t)}, table(), torch.randn(LENGTH, LENGTH)),
    "alibi": (lambda t: {"score": tw.softcap(9.0) >> tw.alibi(t)}, torch.ones(1), torch.ones(2) / 2),
}  # fmt: skip
two_sequences = torch.cat([Q, Q.flip(1)])


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("make", "before", "later"), OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_changed_tensor_one_of_another_shape_or_kind_is_refused(make, before, later, compiles):
    held = before.clone()
    options = make(held)

    def attend(q):
        return tw.attention(q, q, q, **options)

    run = torch.compile(attend, backend="eager") if compiles else attend
    q = two_sequences[:, : before.shape[2]] if before.ndim == 4 else two_sequences
    expected = run(q)
    held.data = later
    with pytest.raises(ValueError, match="now; make the mask or score anew"):
        run(q)
    held.data = before
    torch.testing.assert_close(run(q), expected)


def test_changed_tensor_combined_masks_know_what_their_parts_were_made_of():
    held = few(30)
    part = tw.key_lengths(held)
    held.resize_(2).fill_(110)
    for mask in (part & tw.causal(), part | tw.causal()):
        with pytest.raises(ValueError, match=r"was made of a tensor \(1,\) torch.int64, which is \(2,\)"):
            tw.attention(two_sequences, two_sequences, two_sequences, mask=mask)


def test_changed_tensor_a_module_made_half_keeps_the_score_of_its_parameter():
    module = torch.nn.ParameterDict({"slopes": torch.tensor([0.5, 0.25])})
    score = tw.alibi(module["slopes"])
    q = Q.half()
    module.half()
    assert module["slopes"].dtype == torch.float16
    assert torch.equal(tw.attention(q, q, q, score=score), tw.attention(q, q, q, score=tw.alibi(module["slopes"])))


def test_changed_tensor_a_parameter_that_was_given_other_memory_is_another_one():
    bound = torch.nn.Parameter(torch.full((1,), 30.0), requires_grad=False)
    prepared = tw.keep(lambda b, h, i, j: j < bound[b]).prepare(Q, Q)
    bound.data = torch.full((1,), 110.0)
    with pytest.raises(ValueError, match="was written after"):
        tw.attention(Q, Q, Q, mask=prepared)


def test_vmap_a_mask_made_inside_sees_what_is_written_inside():
    ids, later = torch.arange(LENGTH).expand(2, -1) // 40, torch.arange(LENGTH).expand(2, -1) // 90

    def attend(ids, later):
        mask = tw.documents(ids)
        ids.copy_(later)
        return tw.attention(Q, Q, Q, mask=mask)

    got = torch.vmap(attend)(ids.clone(), later)
    expected = tw.attention(Q, Q, Q, mask=tw.documents(later[0]))
    for x in got:
        torch.testing.assert_close(x, expected)


# -- Memory that a compiler gives to another tensor ------------------------------------------------------------------------


@pytest.fixture
def remembers(monkeypatch):
    """Has the portable backend keep copies of a mask's tensors, as GPU backends keep tiles of them, and compares what it kept."""
    made, plain, wrong = PerTensors(), Portable.forward, []

    def forward(self, p, t):
        leaves = [t.leaves[n] for n in p.spec.mask_slots]
        kept = made.of(p.spec.text(), leaves, lambda: [x.clone() for x in leaves])
        wrong.extend(1 for x, y in zip(kept, leaves, strict=True) if not torch.equal(x, y))
        made_of.append(id(kept))
        return plain(self, p, t)

    made_of: list[int] = []
    monkeypatch.setattr(Portable, "forward", forward)
    yield made_of
    assert not wrong


def attend(q, mask):
    return tw.attention(q, q, q, mask=mask, backend="portable")


@torch.no_grad()
def test_inductor_masks_of_activations_are_told_apart_from_layer_to_layer(remembers):
    def layers(q):
        for n in range(3):
            least = (q[0, :, 0, 0] * 10).int() + n
            q = attend(q, tw.keep(lambda b, h, i, j, t=least: (t[i] >= t[j]) | (i == j)))
        return q

    torch.testing.assert_close(torch.compile(layers, fullgraph=True)(Q), layers(Q))


@torch.no_grad()
def test_inductor_writes_between_calls_to_the_tensor_of_a_mask_made_before_are_seen(remembers):
    start = torch.full((1,), 30)
    held = start.clone()
    mask = tw.keep(lambda b, h, i, j: j < held[b])

    def steps(q):
        outputs = []
        for n in range(3):
            outputs.append(attend(q, mask))
            held.add_(20 + n)
        return outputs

    got = torch.compile(steps, fullgraph=True)(Q)
    held.copy_(start)
    for x, y in zip(got, steps(Q), strict=True):
        torch.testing.assert_close(x, y)


@torch.no_grad()
@pytest.mark.parametrize("name", ["function", "documents"])
def test_inductor_layers_of_one_mask_share_what_is_made_of_its_tensors(name, remembers):
    make, before, _ = MASKS[name]
    mask = make(before)
    two = torch.compile(lambda q: attend(attend(q, mask), mask), fullgraph=True)
    two(Q), two(Q)
    assert len(set(remembers)) == (1 if name == "function" else 4)  # documents are found anew in each call of a graph


def test_inductor_training_shares_what_is_made_of_a_mask_made_inside(remembers):
    ids = torch.arange(LENGTH) // 40
    two = torch.compile(lambda q, ids: attend(attend(q, tw.documents(ids)), tw.documents(ids)), fullgraph=True)
    two(Q.clone().requires_grad_(), ids)
    assert len(set(remembers)) == 1


# -- FlexAttention's BlockMask ---------------------------------------------------------------------------------------------


def test_cuda_graph_a_block_mask_in_a_capture_is_read_anew_and_nothing_of_it_is_kept(monkeypatch):
    q = Q.transpose(1, 2)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
    monkeypatch.setattr(door, "is_recorded", lambda: True)
    first = door.flex_attention(q, q, q, block_mask=block_mask)
    assert block_mask not in door._held
    monkeypatch.undo()
    assert torch.equal(first, door.flex_attention(q, q, q, block_mask=block_mask))
    kept = door._held[block_mask][1]
    monkeypatch.setattr(door, "is_recorded", lambda: True)
    assert door._mask(block_mask, q, q) is not kept


def test_inference_mode_what_it_makes_of_a_block_mask_serves_training_afterwards():
    q = Q.transpose(1, 2)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
    with torch.inference_mode():
        expected = door.flex_attention(q, q, q, block_mask=block_mask)
    x = q.clone().requires_grad_()
    o = door.flex_attention(x, q, q, block_mask=block_mask)
    o.sum().backward()
    assert torch.equal(o, expected)
