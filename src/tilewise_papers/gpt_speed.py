"""Training steps of GPTs by the attention they use: the tables of the FlashAttention papers on this machine.

    python -m tilewise_papers.gpt_speed --out FILE.jsonl [--only 1.3B]

*1.3B*, *2.7B*: FlashAttention-2's Table 1. The shapes are GPT-3's with heads of 128: 24 layers of width 2048, 32 layers of width 2560.
Tokens are bytes, and no layer is checkpointed; standard attention alone computes its scores again in the backward, since its N × N
matrices of all layers do not fit.

*1.3B-users*: the same table as users train, with a vocabulary of 50k, and every block checkpointed as a whole and compiled.

*small*, *small-compiled*: FlashAttention's Table 4, a model of GPT-2 small's size with a vocabulary of 50k. Its standard attention keeps
its matrices. The compiler fuses its scale, mask and softmax, as Megatron-LM does, which the paper compares with.

Products run in bf16 under autocast, weights and AdamW (fused) in fp32. All contestants of a row train one set of weights, each of a
round's steps timed once in an order of its own, beside a matrix product of 8192³ in bf16 that is timed in the same round.

TFLOP/s are those of the papers (FlashAttention-2, section 4.2, after Megatron-LM): 6 · tokens · weights + 12 · layers · width · N · tokens
for a step, with or without a causal mask, and whatever is computed twice. Weights are those of products: all but the embedding's.
*Needed* TFLOP/s count the half of the pairs that a causal mask keeps.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from bench import records
from bench.measure import PeakMemory, interleaved, seconds_per_call, summarize
from examples.gpt.model import GPT, VOCABULARY, Attention, GPTConfig, standard_attention, tilewise_attention

Batch = tuple[Tensor, Tensor]
"""Tokens and the targets of each, both (rows, context) int64."""


@dataclass(frozen=True)
class Recipe:
    """A model, and how it is trained.

    tokens: of a step at every context, so that everything fits 80 GB (2.7B and 1.3B: 141 GB).
    compiled: the parts that torch.compile compiles, of "blocks" (each alone) and "loss" (logits and cross entropy).
    checkpointed: whether the backward computes each block again.
    """

    sizes: GPTConfig
    tokens: int
    contexts: tuple[int, ...]
    contestants: tuple[str, ...] = ("standard", "fa2", "cudnn", "tilewise")
    vocabulary: int = VOCABULARY
    compiled: tuple[str, ...] = ()
    checkpointed: bool = False


BPE = 50304
"""GPT-2's vocabulary, rounded up to whole tiles."""
GPT_1_3B = GPTConfig(layers=24, d_model=2048, heads_q=16, heads_k=16, d_hidden=5504, context=8192)
GPT_2_7B = GPTConfig(layers=32, d_model=2560, heads_q=20, heads_k=20, d_hidden=6912, context=8192)
GPT_SMALL = GPTConfig(layers=12, d_model=768, heads_q=12, heads_k=12, d_hidden=2048, context=4096)
FUSED = ("fa2", "cudnn", "tilewise")
SMALL = Recipe(GPT_SMALL, 32768, (1024, 4096), ("kept", "tilewise"), BPE, ("loss",))
RECIPES = {
    "1.3B": Recipe(GPT_1_3B, 16384, (2048, 8192)),
    "2.7B": Recipe(GPT_2_7B, 8192, (2048, 8192)),
    "1.3B-users": Recipe(
        replace(GPT_1_3B, context=32768), 32768, (2048, 8192, 32768), FUSED, BPE, ("blocks", "loss"), checkpointed=True
    ),
    "small": SMALL,
    "small-compiled": replace(SMALL, compiled=("blocks", "loss")),
}
TABLE_1 = ("1.3B", "2.7B")
COMPILER = "inductor"
WARM, TIMED = 2, 8
PRODUCT, PRODUCTS = 8192, 64
IGNORED = -100
"""A target that F.cross_entropy leaves out."""
COMMAND = "python -m tilewise_papers.gpt_speed"


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eager attention that keeps q, k and v for its backward instead of its N × N matrices."""
    return checkpoint(standard_attention, q, k, v, use_reentrant=False)


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's operator on one of its backends."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


CONTESTANTS: dict[str, Attention] = {
    "standard": standard,
    "kept": standard_attention,
    "fa2": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "tilewise": tilewise_attention,
}
PEERS = {
    "standard": "the formula in PyTorch; scores computed again in the backward",
    "kept": "the formula in PyTorch; its matrices kept for the backward",
    "fa2": "F.scaled_dot_product_attention by FlashAttention-2",
    "cudnn": "F.scaled_dot_product_attention by cuDNN",
    "tilewise": "tw.attention",
    "matmul": f"a product of {PRODUCT}³ in bf16",
}


def step_flops(sizes: GPTConfig, weights: int, context: int, tokens: int, pairs: float = 1.0) -> float:
    """Operations of a training step by the papers' formula, with so large a share of attention's pairs."""
    return 6.0 * tokens * weights + 12.0 * sizes.layers * sizes.d_model * context * tokens * pairs


def loss_of(to_logits: nn.Linear, features: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy in fp32."""
    return F.cross_entropy(to_logits(features).float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Trained:
    """A model and its optimizer; the attention is chosen step by step.

    Attributes:
        weights: how many there are but for the embedding's, which are looked up and in no product.
    """

    def __init__(self, recipe: Recipe, device: str):
        with torch.device(device):
            self.model = model = GPT(recipe.sizes, standard, vocabulary=recipe.vocabulary)
        self.weights = sum(weight.numel() for weight in model.parameters()) - model.embedding.weight.numel()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.device, self.loss = device, loss_of
        compiling = {"fullgraph": True, "dynamic": False, "backend": COMPILER}
        if recipe.checkpointed:
            model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
        if "blocks" in recipe.compiled:
            for block in model.blocks:  # they share their code, so the first one's is that of all
                block.compile(**compiling)
        if "loss" in recipe.compiled:
            self.loss = torch.compile(loss_of, **compiling)

    def step(self, attention: Attention, batch: Batch, bf16: bool = True, update: bool = True) -> None:
        """Forward and backward of a batch, and AdamW where the weights are to be updated."""
        for block in self.model.blocks:
            block.attention.attention = attention
        self.optimizer.zero_grad()
        inputs, targets = batch
        with torch.autocast(self.device, torch.bfloat16, enabled=bf16):
            loss = self.loss(self.model.to_logits, self.model.features(inputs), targets)
        loss.backward()
        if update:
            self.optimizer.step()

    def gradient(self, attention: Attention, batch: Batch, bf16: bool = True) -> Tensor:
        """The gradient of the first layer's weights of q, k and v, below which every attention of the model lies."""
        self.step(attention, batch, bf16, update=False)
        found = self.model.blocks[0].attention.to_qkv.weight.grad.clone()
        self.optimizer.zero_grad()
        return found


def shares(trained: Trained, names: Iterable[str], batch: Batch, length: int) -> dict[str, float]:
    """How much of what is allowed each contestant's gradient is away from that of standard attention in fp32, not compiled.

    Allowed is twice the distance of standard attention in bf16 and half a unit of bf16's rounding, as everywhere in tilewise. Standard
    attention sees the first row's first ``length`` tokens. The contestants see the whole batch, as in the steps that are timed, but lose
    nothing at any other token; so the gradients of causal attention are the same.
    """
    inputs, targets = batch
    short, few = (inputs[:1, :length], targets[:1, :length]), torch.full_like(targets, IGNORED)
    few[:1, :length] = targets[:1, :length]
    with torch.compiler.set_stance("force_eager"):
        exact = trained.gradient(standard, short, bf16=False)
        eager = (trained.gradient(standard, short) - exact).norm().item()
    away = {name: (trained.gradient(CONTESTANTS[name], (inputs, few)) - exact).norm().item() for name in names}
    allowed = 2 * eager + 2.0**-9 * exact.norm().item()
    return {name: distance / allowed for name, distance in away.items()}


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The time of one call on a device that does nothing else, launches included."""
    if not device.startswith("cuda"):
        return 1e3 * seconds_per_call(call, 1, device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def able(trained: Trained, names: Iterable[str], batch: Batch) -> dict[str, str]:
    """Why each contestant cannot make a step, which compiles it; empty for one that made it."""
    why = {}
    for name in names:
        began, replaced = time.perf_counter(), counters["inductor"]["fuse_attention"]
        try:
            trained.step(CONTESTANTS[name], batch)
            why[name] = ""
            if counters["inductor"]["fuse_attention"] > replaced:
                why[name] = "the compiler replaced the formula by F.scaled_dot_product_attention"
        except (RuntimeError, NotImplementedError) as error:  # out of memory is a RuntimeError
            why[name] = " ".join(str(error).split())[:300] or type(error).__name__
        trained.optimizer.zero_grad()
        print(f"{name}: {why[name] or 'able'} after {time.perf_counter() - began:.0f} s", flush=True)
    return why


def products(device: str) -> Callable[[], object]:
    """Matrix products in bf16, PRODUCTS of them, whose pace is the limit of a step."""
    a, b = (torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: [a @ b for _ in range(PRODUCTS)]


def times(trained: Trained, names: Iterable[str], batch: Batch) -> dict[str, list[float]]:
    """Milliseconds of each timed step, and of one product, by contestant."""
    calls: dict[str, Callable] = {name: partial(trained.step, CONTESTANTS[name], batch) for name in names}
    calls["matmul"] = products(trained.device)
    samples = {name: partial(milliseconds, call, trained.device) for name, call in calls.items()}
    found = {name: taken[WARM:] for name, taken in interleaved(samples, WARM + TIMED).items()}
    return found | {"matmul": [ms / PRODUCTS for ms in found["matmul"]]}


def peak(trained: Trained, name: str, batch: Batch) -> float:
    """MiB in use at the worst moment of a step: the weights, AdamW's moments and all else."""
    with PeakMemory(trained.device) as memory:
        trained.step(CONTESTANTS[name], batch)
    return (memory.start + memory.bytes) / records.MIB


def table(only: list[str], device: str) -> Iterator[dict]:
    """Yields the run's record and the results of each model and context as they come."""
    statistic = f"Medians and quartiles of {TIMED} steps after {WARM}, in turns."
    head = records.run(f"{COMMAND} --only {' '.join(only)}", device, PEERS, statistic=statistic)
    yield head
    for name in only:
        recipe = RECIPES[name]
        trained = Trained(recipe, device)
        for context in recipe.contexts:
            generator = torch.Generator(device).manual_seed(0)
            size = (recipe.tokens // context, context + 1)
            text = torch.randint(recipe.vocabulary, size, generator=generator, device=device)
            batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            yield from row(head["run"], f"gpt-{name}-n{context}", trained, recipe, batch)
        del trained
        gc.collect()


def row(run: str, case: str, trained: Trained, recipe: Recipe, batch: Batch) -> Iterator[dict]:
    """The results of one model at one context: whether it is right, then times, TFLOP/s and memory."""
    sizes, (rows, context) = recipe.sizes, batch[0].shape
    shape = {"layers": sizes.layers, "d_model": sizes.d_model, "heads": sizes.heads_q, "weights": trained.weights}
    shape |= {"context": context, "batch": rows, "backend": backend(trained, rows, context)}
    made = partial(records.result, run, case, direction="step", shape=shape)
    torch.compiler.reset()  # a context's compiled code is for that context alone
    why = able(trained, recipe.contestants, batch)
    found = shares(trained, [name for name in why if not why[name]], batch, recipe.contexts[0])
    for name, share in found.items():
        yield made(name, metric="error", value=share, status="green" if share <= 1 else "red")
    for name, reason in why.items():
        if reason:
            yield made(name, metric="time", value=None, why=reason)
    right = [name for name in found if found[name] <= 1]
    flops, needed = (step_flops(sizes, trained.weights, context, batch[0].numel(), pairs) for pairs in (1, 0.5))
    for name, samples in times(trained, right, batch).items():
        timing = summarize(samples)
        ms, spread = timing.median, {"low": timing.low, "high": timing.high}
        if name == "matmul":
            yield made(name, metric="time", value=ms, **spread)
            yield made(name, metric="rate", value=2.0 * PRODUCT**3 / ms / 1e9)
            continue
        pace = batch[0].numel() / ms * 1e3
        yield made(name, metric="time", value=ms, tokens_per_s=round(pace), **spread)
        yield made(name, metric="rate", value=flops / ms / 1e9, needed=needed / ms / 1e9)
        memory = peak(trained, name, batch)
        yield made(name, metric="memory", value=memory)
        print(
            f"{case} {name}: {ms:.1f} ms, {pace:,.0f} tokens/s, {flops / ms / 1e9:.0f} TFLOP/s, {memory:,.0f} MiB",
            flush=True,
        )


def backend(trained: Trained, batch: int, context: int) -> str | None:
    """The backend that tilewise chooses for the model's attention."""
    sizes = trained.model.config
    shape = (batch, context, sizes.heads_q, sizes.head_dim)
    q = torch.empty(shape, dtype=torch.bfloat16, device=trained.device, requires_grad=True)
    return tw.explain(q, q, q, causal=True).chosen


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results are appended here")
    parser.add_argument("--only", nargs="*", choices=tuple(RECIPES), default=TABLE_1)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    records.append(table(options.only, options.device), options.out)


if __name__ == "__main__":
    main()
