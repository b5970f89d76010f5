"""Hugging Face models over ranks: each holds its rows of a sequence, and the logits and gradients are those of one device."""

from __future__ import annotations

import importlib

import pytest
import torch

import tilewise as tw
from tilewise.parallel import simulate, zigzag

hf = pytest.importorskip("transformers")
compat = importlib.import_module("tilewise.compat.transformers")
compat.register()

N, RANKS = 32, 2
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "initializer_range": 0.4,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 2.0}
PLAIN = torch.arange(N)[None]
PACKED = torch.cat([torch.arange(11), torch.arange(N - 11)])[None]
PADDING = torch.ones(2, N, dtype=torch.int64)
PADDING[1, 25:] = 0
IDS = torch.randint(3, 64, (2, N), generator=torch.Generator().manual_seed(1))
CALLS = {"plain": (PLAIN, None), "padding": (PLAIN, PADDING), "packed": (PACKED, None)}


def model_of(name: str = "Llama", **more):
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**SIZES, **more)
    return getattr(hf, f"{name}ForCausalLM")._from_config(config, attn_implementation="tilewise")


def over_ranks(model, positions: torch.Tensor, padding: torch.Tensor | None = None, **more):
    """Logits of the whole sequence and the gradients of all parameters, of a weighted sum over tokens that are no padding."""

    def one(exchange):
        parallel = tw.context_parallel(exchange)
        mask = None if padding is None else parallel.shard(padding)
        with compat.sharded(parallel):
            positions_here = None if positions is None else parallel.shard(positions)
            logits = model(
                parallel.shard(IDS), attention_mask=mask, position_ids=positions_here, use_cache=False, **more
            ).logits
        return logits.detach(), torch.autograd.grad(weighed(logits, mask), list(model.parameters()))

    logits, gradients = zip(*simulate(RANKS, one), strict=True)
    return zigzag(N, RANKS).unshard(logits, 1), [sum(parts) for parts in zip(*gradients, strict=True)]


def weighed(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    weights = torch.ones(()) if mask is None else mask[..., None]
    return (logits * weights).square().sum()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_logits_and_gradients_are_those_of_one_device(kind, name):
    positions, padding = CALLS[name]
    model = model_of(kind, **(WINDOWS if kind == "Gemma2" else {}))
    alone = model(IDS, attention_mask=padding, position_ids=positions, use_cache=False).logits
    expected = torch.autograd.grad(weighed(alone, padding), list(model.parameters()))
    logits, gradients = over_ranks(model, positions, padding)
    real = torch.ones(2, N, dtype=torch.bool) if padding is None else padding.bool()
    torch.testing.assert_close(logits[real], alone[real].detach())
    for found, e in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, e, rtol=1e-3, atol=1e-4 * float(e.abs().max()))


def test_layers_that_are_computed_again_after_the_with_see_all_ranks():
    model = model_of()
    _, expected = over_ranks(model, PLAIN)
    checkpointing = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    checkpointing({"use_reentrant": False})
    _, gradients = over_ranks(model.train(), PLAIN)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            (None, None),
            "every rank's position_ids are 0, 1, 2",
        ),  # as transformers numbers rows where it is told nothing
        ((PLAIN + 3, None), "jump to another number than 0"),
        ((PLAIN, torch.ones(2, 2 * N, dtype=torch.int64)), "32 keys for 16 rows: pass use_cache=False"),
    ],
)
def test_positions_and_masks_of_the_wrong_rows_are_refused_on_all_ranks(given, reason):
    with pytest.raises(ValueError, match=reason):
        over_ranks(model_of(), *given)


def test_what_is_of_a_ranks_rows_alone_is_refused():
    with pytest.raises(NotImplementedError, match="not built for a sharded sequence: output_attentions"):
        over_ranks(model_of(), PLAIN, output_attentions=True)
    with pytest.raises(NotImplementedError, match="handed no mask, or one of its own"):
        over_ranks(model_of(), PLAIN, torch.ones(1, 1, N, N, dtype=torch.bool))
