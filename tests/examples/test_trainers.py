"""The recipes of docs/trainers.md: two steps of training with each released trainer, whose gradients are judged as any attention's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.compat.eager import Arithmetic, agree, attend, normal
from tests.compat.test_transformers import Exactly, Reordered
from tilewise.accuracy import judge
from tilewise.compat import flex_attention as flex
from tilewise.compat.sdpa import patch

ORDERS = 4
HEADS, HEADS_K, DIM, VOCABULARY = 4, 2, 16, 64


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[dict[str, Tensor]]:
    """The gradients of the last backward, by parameter."""
    found: dict[str, Tensor] = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, name=name: found.__setitem__(name, p.grad.clone()))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    yield found
    for hook in hooks:
        hook.remove()


def hold(ours: Callable[[torch.dtype], dict[str, Tensor]], theirs: Callable[[torch.dtype], dict[str, Tensor]]) -> None:
    """Judge the gradients of a training with tilewise by one in float64, and by the trainer's own in fp32."""
    found, eager = ours(torch.float32), [theirs(torch.float32)]
    for seed in range(ORDERS):
        with Reordered(seed):
            eager.append(theirs(torch.float32))
    with Exactly():
        exact = theirs(torch.float64)
    assert found.keys() == exact.keys() != set()
    wrong = [str(e) for n, x in found.items() if not (e := judge(n, x, exact[n], [e[n] for e in eager])).ok]
    assert not wrong, wrong


# -- TRL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True}, {"padding_free": True, "max_length": None}],
    ids=["padded", "packed", "padding-free"],
)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_trl(options, lora, tmp_path):
    trl = pytest.importorskip("trl", reason="the package trl is not installed")
    datasets = pytest.importorskip("datasets")
    peft = pytest.importorskip("peft") if lora else None
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    import tilewise.compat.transformers

    tilewise.compat.transformers.register()
    words = models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="0", pad_token="1", eos_token="2")
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in (5, 40, 17, 30, 9, 22, 33, 12)]
    data = datasets.Dataset.from_list([{"input_ids": text} for text in texts])

    def trained(implementation: str, dtype: torch.dtype) -> dict[str, Tensor]:
        sizes = {"hidden_size": HEADS * DIM, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
        config = LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=HEADS_K)
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation=implementation).to(dtype)
        arguments = trl.SFTConfig(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, optim="sgd", learning_rate=0.1, bf16=False,
            gradient_checkpointing=False, report_to=[], use_cpu=True, disable_tqdm=True, **({"max_length": 48} | options),
        )  # fmt: skip
        adapter = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False) if lora else None
        trainer = trl.SFTTrainer(
            model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=adapter
        )
        trainer.model.to(dtype)
        with recorded(trainer.model) as found:
            trainer.train()
        return found

    hold(lambda dtype: trained("tilewise", dtype), lambda dtype: trained("eager", dtype))


# -- torchtitan --------------------------------------------------------------------------------------------------------


def _dense_flex(q, k, v, *, block_mask, scale, enable_gqa, return_aux, score_mod=None, kernel_options=None):
    """FlexAttention by the whole matrix; PyTorch's has no backward on a CPU."""
    from torch.nn.attention.flex_attention import create_mask

    kept = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    return attend(q, k, v, Arithmetic(q.dtype), scale=scale, kept=kept)[0], None


def test_torchtitan_with_flex_attention(monkeypatch):
    attention = pytest.importorskip(
        "torchtitan.models.common.attention", reason="the package torchtitan is not installed"
    )
    from torchtitan.models import llama3

    layers = {
        "n_layers": 2,
        "dim": HEADS * DIM,
        "n_heads": HEADS,
        "n_kv_heads": HEADS_K,
        "hidden_dim": 64,
        "attn_backend": "flex",
    }
    configuration = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    rope = configuration.layers[0].attention.rope
    rope.dim = DIM
    configuration.layers = llama3._build_llama3_layers(**layers, rope=rope)
    configuration.dim = configuration.tok_embeddings.embedding_dim = configuration.norm.normalized_shape = HEADS * DIM
    configuration.lm_head.in_features = HEADS * DIM
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (2, 2, 97), generator=draw)
    positions = torch.arange(96).repeat(2, 1)
    positions[0, 40:] -= 40  # two documents in a row
    positions[1, 70:] -= 70

    def trained(function: Callable, dtype: torch.dtype) -> dict[str, Tensor]:
        monkeypatch.setattr(attention.FlexAttention, "_compiled_flex_attn", staticmethod(function))
        torch.manual_seed(0)
        model = configuration.build()
        model.init_states()
        model.to(dtype)
        masks = model.get_attention_masks(positions=positions)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recorded(model) as found:
            for batch in tokens:
                logits = model(batch[:, :-1], positions=positions, attention_masks=masks)
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return found

    hold(lambda dtype: trained(flex.flex_attention, dtype), lambda dtype: trained(_dense_flex, dtype))


@pytest.mark.parametrize("window", [(-1, 0), (20, 0), (-1, -1)], ids=["causal", "window", "full"])
def test_torchtitan_with_varlen_attention(window, monkeypatch):
    attention = pytest.importorskip(
        "torchtitan.models.common.attention", reason="the package torchtitan is not installed"
    )
    from torch.nn.attention import restore_flash_attention_impl
    from torchtitan.tools import utils

    import tilewise.compat.torch_provider  # noqa: F401

    positions = torch.arange(96).repeat(2, 1)
    positions[0, 40:] -= 40
    document = (positions == 0).flatten().cumsum(0)
    i, j = torch.arange(192)[:, None], torch.arange(192)[None]
    left, right = (1000 if n < 0 else n for n in window)
    kept = (document[:, None] == document) & (j >= i - left) & (j <= i + right)
    monkeypatch.setattr(utils, "get_cuda_flash_attention_impl", lambda: "tilewise")
    try:
        layer = attention.VarlenAttention(attention.VarlenAttention.Config(window_size=window))
        masks = attention.create_varlen_metadata_for_document(positions)

        def formula(arithmetic: Arithmetic, *qkv: Tensor) -> tuple[Tensor]:
            q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in qkv)
            return (attend(q, k, v, arithmetic, kept=kept)[0].transpose(0, 1).unflatten(0, (2, 96)),)

        sizes = ((2, 96, HEADS, DIM), (2, 96, HEADS_K, DIM), (2, 96, HEADS_K, DIM))
        qkv = [normal(*size, dtype=torch.bfloat16, seed=n) for n, size in enumerate(sizes)]
        agree(lambda *x: layer(*x, attention_masks=masks, enable_gqa=True), formula, qkv, names=("o",))
    finally:
        restore_flash_attention_impl()


# -- Lightning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["patched", "called"])
def test_lightning(way, tmp_path):
    lightning = pytest.importorskip("lightning", reason="the package lightning is not installed")
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (4, 2, 65), generator=draw)

    class Model(lightning.LightningModule):
        def __init__(self, attention: Callable):
            super().__init__()
            self.attention = attention
            self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(64, VOCABULARY)
            self.into, self.out = torch.nn.Linear(64, 3 * 64), torch.nn.Linear(64, 64)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            x = self.embedding(batch[:, :-1])
            q, k, v = self.into(x).view(*x.shape[:2], 3, HEADS, DIM).unbind(2)
            x = x + self.out(self.attention(q, k, v).flatten(2))
            return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def by_sdpa(*qkv: Tensor) -> Tensor:
        heads_first = [x.transpose(1, 2) for x in qkv]
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    def trained(attention: Callable, dtype: torch.dtype, around=nullcontext) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Model(attention)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, precision="64-true" if dtype == torch.float64 else "32-true", default_root_dir=tmp_path,
        )  # fmt: skip
        with recorded(model) as found, around():
            trainer.fit(model, torch.utils.data.DataLoader(tokens, batch_size=None))
        return found

    ours = {"called": lambda *qkv: tw.attention(*qkv, causal=True), "patched": by_sdpa}[way]
    around = patch if way == "patched" else nullcontext
    hold(lambda dtype: trained(ours, dtype, around), lambda dtype: trained(by_sdpa, dtype))


# -- nanochat ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nanochats():
    """nanochat's own functions, of which its model asks, with ours in their place; what they do before is PyTorch's attention."""
    module = pytest.importorskip("nanochat.flash_attention", reason="the sources of nanochat are not on the path")
    from tilewise.compat.flash_attn import interface_3

    own = dict(vars(module.flash_attn))
    vars(module.flash_attn).update({name: getattr(interface_3, name) for name in own})
    yield module.flash_attn, own
    vars(module.flash_attn).update(own)


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_nanochat_trains(window, dtype, nanochats):
    ours, _ = nanochats
    i, j = torch.arange(70)[:, None], torch.arange(70)[None]
    kept = (j <= i) & (j >= i - (1000 if window[0] < 0 else window[0]))

    def formula(arithmetic: Arithmetic, *qkv: Tensor) -> tuple[Tensor]:
        return (attend(*(x.transpose(1, 2) for x in qkv), arithmetic, kept=kept)[0].transpose(1, 2),)

    qkv = [normal(2, 70, heads, DIM, dtype=dtype, seed=n) for n, heads in enumerate((HEADS, HEADS_K, HEADS_K))]
    agree(lambda *x: ours.flash_attn_func(*x, causal=True, window_size=window), formula, qkv, names=("o",))


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)], ids=["causal", "window"])
def test_nanochat_generates(window, nanochats):
    ours, own = nanochats
    caches = [torch.zeros(2, 80, HEADS_K, DIM) for _ in range(4)]
    length = 0
    for new in (30, 1, 1, 7):
        q, k, v = (normal(2, new, heads, DIM, seed=length + n) for n, heads in enumerate((HEADS, HEADS_K, HEADS_K)))
        lengths = torch.full((2,), length, dtype=torch.int32)
        call = {"k": k, "v": v, "cache_seqlens": lengths, "causal": True, "window_size": window}
        found, right = (
            f(q, *x, **call)
            for f, x in ((ours.flash_attn_with_kvcache, caches[:2]), (own["flash_attn_with_kvcache"], caches[2:]))
        )
        torch.testing.assert_close(found, right)
        assert torch.equal(caches[0], caches[2])
        length += new
