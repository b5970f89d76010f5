"""Which scores are a bias by pair, as Hopper's copy engine takes it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tests.backends.contract import Call, call, normal
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.pair_bias import PairBias, pair_bias_of

B, H, NQ, NK, D = 2, 4, 130, 200, 64
BF16 = torch.bfloat16


def of_score(score, dtype: torch.dtype = BF16, needs_grad: bool = False, d: int = D, **options) -> Call:
    q, k, v = normal(B, NQ, H, d, dtype=dtype), *(normal(B, NK, 2, d, dtype=dtype) for _ in range(2))
    c = call(q, k, v, score=score, **options)
    return replace(c, p=replace(c.p, spec=replace(c.p.spec, needs_grad=needs_grad)))


def made(*shape: int) -> torch.Tensor:
    return normal(*shape, dtype=BF16, seed=3)


EACH, WIDER, LAYERS = made(B, H, NQ, NK), made(B + 1, H, NQ + 5, NK + 8), made(3, H, NQ, NK)
ONE, BY_BATCH, BY_KEY = made(NQ, NK), made(B, 1, NQ, NK), made(B, 1, 1, NK)
# Scores; what is found; the shape that the copy engine sees, which is without what was expanded; the biases of sequence 1, head 3.
TAKEN = {
    "each pair": (tw.bias(EACH), ("b", "h"), (B, H, NQ, NK), EACH[1, 3]),
    "one for all": (tw.bias(ONE), (), (1, 1, NQ, NK), ONE),
    "broadcast": (tw.bias(BY_BATCH), ("b", 0), (B, 1, NQ, NK), BY_BATCH[1, 0]),
    "a layer's": (lambda s, b, h, i, j: LAYERS[2, h, i, j] + s, (2, "h"), (1, H, NQ, NK), LAYERS[2, 3]),
    "larger": (
        lambda s, b, h, i, j: s + WIDER[b, h, i, j],
        ("b", "h"),
        (B + 1, H, NQ + 5, NK + 8),
        WIDER[1, 3],
    ),
    "expanded": (tw.bias(ONE.expand(B, H, NQ, NK)), ("b", "h"), (1, 1, NQ, NK), ONE),
    "heads expanded": (tw.bias(BY_BATCH.expand(B, H, NQ, NK)), ("b", "h"), (B, 1, NQ, NK), BY_BATCH[1, 0]),
    "queries expanded": (
        tw.bias(BY_KEY.expand(B, 1, NQ, NK)),
        ("b", 0),
        (B, 1, NQ, NK),
        BY_KEY[1, 0].expand(NQ, NK),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_tensor_that_is_added_pair_by_pair_is_a_bias(name):
    score, index, shape, biases = TAKEN[name]
    c = of_score(score)
    found = pair_bias_of(c.p)
    assert found == PairBias(0, index)
    tensor = found.of(c.t.leaves[0])
    assert tensor.shape == shape
    assert torch.equal(tensor[min(1, shape[0] - 1), min(3, shape[1] - 1)], biases)


def test_memory_between_two_multiples_of_16_bytes_is_copied_with_its_strides():
    bias = made(B, H, NQ, NK + 8)[..., 1 : NK + 1]
    c = of_score(tw.bias(bias))
    found = pair_bias_of(c.p).of(bias)
    assert found.data_ptr() % 16 == 0
    assert found.stride() == bias.stride()
    assert torch.equal(found, bias)
    assert pair_bias_of(c.p).of(EACH).data_ptr() == EACH.data_ptr()


ROWS_APART = made(B, H, NQ, NK + 1)[..., :NK]
FP32, PER_KEY, TURNED = EACH.float(), made(B, H, 1, NK), made(B, H, NK, NQ)
ELSE = {
    "another dtype": tw.bias(FP32),
    "rows of 402 bytes": tw.bias(ROWS_APART),
    "a key's": tw.bias(PER_KEY),
    "turned": lambda s, b, h, i, j: s + TURNED[b, h, j, i],
    "a tensor that ends early": lambda s, b, h, i, j: s + EACH[b, h, i, j.clamp(0, NK - 1)],
    "two of them": lambda s, b, h, i, j: s + EACH[b, h, i, j] + EACH[b, h, i, j],
    "scaled": lambda s, b, h, i, j: s + 2 * EACH[b, h, i, j],
    "taken off": lambda s, b, h, i, j: s - EACH[b, h, i, j],
    "a softcap too": tw.bias(EACH) >> tw.softcap(2.0),
}


@pytest.mark.parametrize("name", ELSE)
def test_other_scores_are_none(name):
    assert pair_bias_of(of_score(ELSE[name]).p) is None


CALLS = {
    "dropout": {"dropout_p": 0.5, "dropout_seed": 1},
    "a negative scale": {"softmax_scale": -1.0},
    "queries in fp16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_go_elsewhere(name):
    assert pair_bias_of(of_score(tw.bias(EACH), **CALLS[name]).p) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learned_bias_in_another_dtype_is_refused_by_name(dtype):
    p = of_score(tw.bias(EACH.to(dtype).requires_grad_()), dtype, needs_grad=True).p
    assert f"{dtype}: its kernels take float16 and bfloat16" in Hopper().refused(p)


def test_hopper_comes_first_where_it_has_kernels_and_tiles_for_half_of_the_machine(monkeypatch):
    monkeypatch.setattr(config.devices, "of", lambda device: SimpleNamespace(cores=20))
    assert not Hopper().slow(of_score(tw.bias(EACH)).p)
    assert not Hopper().slow(of_score(tw.bias(EACH), needs_grad=True).p)
    assert "number by number" in Hopper().slow(of_score(tw.bias(EACH), needs_grad=True, deterministic=True).p)
    assert not Hopper().slow(of_score(None).p)
    monkeypatch.setattr(config.devices, "of", lambda device: SimpleNamespace(cores=132))
    assert Hopper().slow(of_score(tw.bias(EACH)).p)  # 16 tiles of 128 queries


LENGTHS, PATTERN = tw.key_lengths(torch.tensor([100, 200])), tw.keep(lambda b, h, i, j: (i + j) % 3 > 0)
FORMS = {  # head_dim, options, and the form of the kernel without gradients; "" where tiles of 64 keys are another backend's
    "whole": (64, {}, "full"),
    "causal": (128, {"causal": True}, "upper"),
    "few columns": (32, {}, ""),
    "more columns": (40, {}, "full"),
    "a pattern": (64, {"mask": PATTERN}, "bits"),
    "ends, of which a tile of 64 keys sees more": (64, {"mask": LENGTHS}, ""),
    "ends at 128 columns": (128, {"mask": LENGTHS}, "bits"),
    "a window at 128 columns": (128, {"mask": tw.window(50)}, "bits"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_mask_has_its_kernel(name, monkeypatch):
    monkeypatch.setattr(config.devices, "of", lambda device: SimpleNamespace(cores=20))
    d, options, form = FORMS[name]
    p = of_score(tw.bias(EACH), d=d, **options).p
    found = config.with_bias(p)
    assert (found.form if found else "") == form
    assert found is None or config.choose(p) == found
    assert found is None or found in config.shipped()


def test_ends_of_rows_are_trained_where_the_backward_takes_less(monkeypatch):
    monkeypatch.setattr(config.devices, "of", lambda device: SimpleNamespace(cores=20))
    calls = [of_score(tw.bias(EACH), needs_grad=wanted, mask=LENGTHS).p for wanted in (False, True)]
    assert [bool(Hopper().slow(p)) for p in calls] == [True, False]
    assert config.choose(calls[1]).form == backward_config.choose(calls[1]).form == "bits"


WANTED = {  # tensors that want a gradient, head_dim, options, and the form of the kernel that has it; "" where none has
    "each pair": (EACH, 64, {}, "full"),
    "causal": (EACH, 128, {"causal": True}, "upper"),
    "a pattern": (EACH, 80, {"mask": PATTERN}, "bits"),
    "ends": (EACH, 64, {"mask": LENGTHS}, "bits"),
    "expanded": (ONE.expand(B, H, NQ, NK), 64, {}, "full"),
    "shared by heads": (BY_BATCH, 64, {}, ""),
    "shared by sequences": (made(1, H, NQ, NK), 64, {}, ""),
    "in one order": (EACH, 64, {"deterministic": True}, ""),
    "wide": (EACH, 256, {}, ""),
}


@pytest.mark.parametrize("name", WANTED)
def test_a_gradient_has_its_kernel_where_no_two_pairs_share_an_element(name):
    bias, d, options, form = WANTED[name]
    p = of_score(tw.bias(bias.detach().requires_grad_()), d=d, needs_grad=True, **options).p
    found = backward_config.with_bias(p)
    assert (found.form if found else "") == form
    assert bool(backward_config.reasons(p)) == (found is None)
    if found:
        assert found.stores_bias
        assert found == backward_config.choose(p)
        assert found in backward_config.shipped()


@pytest.mark.parametrize("name", ["shared by heads", "in one order"])
def test_a_bias_without_a_gradient_has_a_kernel_that_adds_up_dq_in_any_order(name):
    bias, d, options, _ = WANTED[name]
    p = of_score(tw.bias(bias), d=d, needs_grad=True, **options).p
    found = backward_config.with_bias(p)
    assert not found.stores_bias
    assert found.orders or not options
    assert found in backward_config.shipped()
    assert not backward_config.reasons(p)


@pytest.mark.parametrize("name", TAKEN)
def test_the_gradient_of_a_room_lies_as_the_tensor_does(name):
    score, index, _, _ = TAKEN[name]
    c = of_score(score)
    found, tensor = pair_bias_of(c.p), c.t.leaves[0]
    room = torch.empty(found.room(c.p), dtype=c.p.dtype)[..., : c.p.seqlen_k]
    assert room.shape == (B if "b" in index else 1, H if "h" in index else 1, NQ, NK)
    assert room.stride(2) % 8 == 0
    room.copy_(torch.arange(room.numel()).view(room.shape) % 251)
    grad = found.gradient(room, tensor)
    assert (grad.shape, grad.dtype, grad.is_contiguous()) == (tensor.shape, tensor.dtype, True)
    assert torch.equal(found.of(grad)[tuple(slice(n) for n in room.shape)], room)
    assert grad.double().sum() == room.double().sum()  # of what no pair reads there is none


def test_a_gradient_is_contiguous_where_its_rows_had_to_lie_apart():
    q, k, v = (normal(1, n, 2, D, dtype=BF16) for n in (9, 203, 203))
    bias = made(1, 2, 9, 208)[..., :203]
    c = call(q, k, v, score=tw.bias(bias))
    found = pair_bias_of(c.p)
    room = torch.empty(found.room(c.p), dtype=c.p.dtype)[..., : c.p.seqlen_k].copy_(bias)
    assert not room.is_contiguous()
    grad = found.gradient(room, c.t.leaves[0])
    assert grad.is_contiguous()
    assert torch.equal(grad, bias)
