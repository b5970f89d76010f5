"""FlashAttention-2's Table 1 on this machine: training steps of GPTs of 1.3 and 2.7 billion weights, by the attention they use.

    python -m tilewise_papers.gpt_speed --out FILE.jsonl [--only 1.3B]

The shapes are GPT-3's with heads of 128, as the paper's are: 24 layers of width 2048, 32 layers of width 2560. Products run in bf16 under
autocast, weights and AdamW in fp32. No layer is checkpointed; standard attention alone computes its scores again in the backward,
since its N × N matrices of all layers do not fit. All contestants of a row train one set of weights, each of a round's steps timed once
in an order of its own, beside a matrix product of 8192³ in bf16 that is timed in the same round.

TFLOP/s are those of the paper (section 4.2, after Megatron-LM): 6 · tokens · weights + 12 · layers · width · N · tokens for a step,
with or without a causal mask, and whatever is computed twice.
"""

import argparse
import gc
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from bench import records
from bench.measure import seconds_per_call, summarize
from examples.gpt.model import GPT, Attention, GPTConfig, standard_attention, tilewise_attention

SIZES = {
    "1.3B": GPTConfig(layers=24, d_model=2048, heads_q=16, heads_k=16, d_hidden=5504, context=8192),
    "2.7B": GPTConfig(layers=32, d_model=2560, heads_q=20, heads_k=20, d_hidden=6912, context=8192),
}
TOKENS = {"1.3B": 16384, "2.7B": 8192}
"""Of a step, so that everything but the scores fits 141 GB."""
CONTEXTS = (2048, 8192)
WARM, TIMED = 3, 10
PRODUCT, PRODUCTS = 8192, 64
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
    "fa2": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "tilewise": tilewise_attention,
}
PEERS = {
    "standard": "the formula in PyTorch; scores computed again in the backward",
    "fa2": "F.scaled_dot_product_attention by FlashAttention-2",
    "cudnn": "F.scaled_dot_product_attention by cuDNN",
    "tilewise": "tw.attention",
    "matmul": f"a product of {PRODUCT}³ in bf16",
}


def step_flops(sizes: GPTConfig, weights: int, context: int, tokens: int) -> float:
    """Operations of a training step by the paper's formula."""
    return 6.0 * tokens * weights + 12.0 * sizes.layers * sizes.d_model * context * tokens


class Trained:
    """A model, its optimizer and one batch; the attention is chosen step by step."""

    def __init__(self, sizes: GPTConfig, device: str):
        with torch.device(device):
            self.model = GPT(sizes, standard)
        self.weights = sum(weight.numel() for weight in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.device = device

    def step(self, attention: Attention, text: Tensor, bf16: bool = True, update: bool = True) -> None:
        """Forward and backward of text (batch, context + 1), and AdamW where the weights are to be updated."""
        for block in self.model.blocks:
            block.attention.attention = attention
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=bf16):
            logits = self.model(text[:, :-1]).float()
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        if update:
            self.optimizer.step()

    def gradient(self, attention: Attention, text: Tensor, bf16: bool = True) -> Tensor:
        """The gradient of the first layer's weights of q, k and v, below which every attention of the model lies."""
        self.step(attention, text, bf16, update=False)
        found = self.model.blocks[0].attention.to_qkv.weight.grad.clone()
        self.optimizer.zero_grad()
        return found


def shares(trained: Trained, names: Iterable[str], text: Tensor) -> dict[str, float]:
    """How much of what is allowed each contestant's gradient is away from that of standard attention in fp32.

    Allowed is twice the distance of standard attention in bf16 and half a unit of bf16's rounding, as everywhere in tilewise.
    """
    exact = trained.gradient(standard, text, bf16=False)
    away = {name: (trained.gradient(CONTESTANTS[name], text) - exact).norm().item() for name in names}
    eager = (trained.gradient(standard, text) - exact).norm().item()
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


def able(trained: Trained, text: Tensor) -> dict[str, str]:
    """Why each contestant cannot make a step; empty for one that made it."""
    why = {}
    for name, attention in CONTESTANTS.items():
        try:
            trained.step(attention, text)
            why[name] = ""
        except (RuntimeError, NotImplementedError) as error:  # out of memory is a RuntimeError
            why[name] = str(error).partition("\n")[0][:200] or type(error).__name__
        trained.optimizer.zero_grad()
    return why


def products(device: str) -> Callable[[], object]:
    """Matrix products in bf16, PRODUCTS of them, whose pace is the limit of a step."""
    a, b = (torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: [a @ b for _ in range(PRODUCTS)]


def times(trained: Trained, names: Iterable[str], text: Tensor) -> dict[str, list[float]]:
    """Milliseconds of each timed step, and of one product, by contestant."""
    calls: dict[str, Callable] = {name: partial(trained.step, CONTESTANTS[name], text) for name in names}
    calls["matmul"] = products(trained.device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    chance = random.Random(0)
    for n in range(WARM + TIMED):
        for name in chance.sample(list(calls), len(calls)):
            ms = milliseconds(calls[name], trained.device)
            if n >= WARM:
                samples[name].append(ms / PRODUCTS if name == "matmul" else ms)
    return samples


def table(only: list[str], device: str) -> Iterator[dict]:
    """Yields the run's record and the results of each model and context as they come."""
    statistic = f"Medians and quartiles of {TIMED} steps after {WARM}, in turns."
    head = records.run(COMMAND, device, PEERS, statistic=statistic)
    yield head
    for name in only:
        trained = Trained(SIZES[name], device)
        for context in CONTEXTS:
            generator = torch.Generator(device).manual_seed(0)
            text = torch.randint(256, (TOKENS[name] // context, context + 1), generator=generator, device=device)
            yield from row(head["run"], f"gpt-{name}-n{context}", trained, text)
        del trained
        gc.collect()


def row(run: str, case: str, trained: Trained, text: Tensor) -> Iterator[dict]:
    """The results of one model at one context: whether it is right, then times and TFLOP/s."""
    sizes, batch, context = trained.model.config, len(text), text.shape[1] - 1
    shape = {"layers": sizes.layers, "d_model": sizes.d_model, "heads": sizes.heads_q, "weights": trained.weights}
    shape |= {"context": context, "batch": batch, "backend": backend(trained, batch, context)}
    made = partial(records.result, run, case, direction="step", shape=shape)
    why = able(trained, text)
    found = shares(trained, [name for name in why if not why[name]], text[:1, : CONTEXTS[0] + 1])
    for name, share in found.items():
        yield made(name, metric="error", value=share, status="green" if share <= 1 else "red")
    for name, reason in why.items():
        if reason:
            yield made(name, metric="time", value=None, why=reason)
    flops = step_flops(sizes, trained.weights, context, batch * context)
    for name, samples in times(trained, [name for name in found if found[name] <= 1], text).items():
        timing, work = summarize(samples), 2.0 * PRODUCT**3 if name == "matmul" else flops
        yield made(name, metric="time", value=timing.median, low=timing.low, high=timing.high)
        yield made(name, metric="rate", value=work / timing.median / 1e9)
        print(f"{case} {name}: {timing.median:.1f} ms, {work / timing.median / 1e9:.0f} TFLOP/s", flush=True)


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
    parser.add_argument("--only", nargs="*", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    records.append(table(options.only, options.device), options.out)


if __name__ == "__main__":
    main()
