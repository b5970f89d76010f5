"""Training steps of a GPT of 1.3 billion weights on several GPUs, beside one GPU with as many tokens.

    python -m tilewise_papers.gpt_ranks --ranks 2 --out FILE

Every GPU has 8,192 tokens of a step, in sequences of 8,192. *alone*: each GPU trains a model of its own. *fsdp*: weights, gradients and
AdamW's moments are sharded over all GPUs (FSDP2), a sequence a GPU. *fsdp-cp*: the same, and every sequence is shared by all GPUs.
Products run in bf16 under autocast, weights and sums of gradients in fp32; nothing is computed twice. The first losses of all three
are compared, then their steps are timed in turns. `--device cpu` rehearses with gloo on a small model.
"""

import argparse
import statistics
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilewise as tw
from bench.measure import interleaved
from bench.ranks import milliseconds, parser_of, start
from bench.records import Log
from examples.gpt.model import GPT, GPTConfig, tilewise_attention
from tilewise_papers.gpt_speed import RECIPES, step_flops

CASE, CONTEXT, WARM, TIMED = "gpt-1.3B-ranks", 8192, 2, 6
SMALL = GPTConfig(layers=2, d_model=64, heads_q=4, heads_k=4, d_hidden=96, context=64)
PEERS = {
    "alone": "a model of its own on each GPU",
    "fsdp": "FSDP2, a sequence a GPU",
    "fsdp-cp": "FSDP2, and every sequence over all GPUs",
}


def sharded(model: nn.Module, size: int, device: str) -> nn.Module:
    """The model with each layer's weights over all ranks."""
    mesh = init_device_mesh(device, (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Training:
    """A model, its optimizer, and this rank's part of a batch.

    Args:
        tokens: int64 ``(sequences, context + 1)``, those of all ranks.
    """

    def __init__(self, way: str, sizes: GPTConfig, tokens: Tensor):
        device, size, rank = tokens.device.type, dist.get_world_size(), dist.get_rank()
        self.positions, attention = None, tilewise_attention
        inputs, targets = tokens[rank : rank + 1, :-1], tokens[rank : rank + 1, 1:]
        if way == "fsdp-cp":
            parallel = tw.context_parallel()
            attention = partial(tw.attention, causal=True, parallel=parallel)
            inputs, targets = (parallel.shard(x) for x in (tokens[:, :-1], tokens[:, 1:]))
            self.positions = parallel.positions(inputs.shape[1] * size, tokens.device)
        self.inputs, self.targets, self.device = inputs, targets, device
        with torch.device(tokens.device):
            model = GPT(sizes, attention)
        self.weights = sum(weight.numel() for weight in model.parameters())
        self.model = model if way == "alone" else sharded(model, size, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self) -> Tensor:
        """One step; the mean loss of this rank's tokens."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(self.inputs, self.positions).float()
        loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        loss.backward()  # FSDP takes the mean of the ranks' gradients
        self.optimizer.step()
        return loss.detach()


def losses(training: Training, alone: bool) -> list[float]:
    """The mean losses over all ranks of two steps; a model alone is judged at its first, where all have the same weights."""
    found = []
    for _ in range(1 if alone else 2):
        loss = training.step()
        dist.all_reduce(loss)
        found.append(loss.item() / dist.get_world_size())
    return found


def measured(sizes: GPTConfig, device: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float], int]:
    """The first losses and median milliseconds of each way to train, and the model's weights."""
    size = dist.get_world_size()
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(256, (size, sizes.context + 1), generator=generator, device=device)
    runs, first = {}, {}
    for way in PEERS:
        training = Training(way, sizes, tokens)
        first[way] = losses(training, way == "alone")
        runs[way] = training
    samples = {way: partial(milliseconds, training.step, device, 1) for way, training in runs.items()}
    found = interleaved(samples, WARM + rounds)
    return first, {way: statistics.median(taken[WARM:]) for way, taken in found.items()}, runs["alone"].weights


def process(options: argparse.Namespace, device: str) -> None:
    """One rank; the first one writes."""
    size = dist.get_world_size()
    sizes, name = (SMALL, "cpu") if device == "cpu" else (RECIPES["1.3B"].sizes, "cuda")
    first, ms, weights = measured(sizes, name, options.rounds)
    if dist.get_rank() == 0:
        log = Log.begin(f"python -m tilewise_papers.gpt_ranks --ranks {size}", options, PEERS, gpus=size)
        flops = step_flops(sizes, weights, sizes.context, sizes.context)
        shape = {"gpus": size, "weights": weights, "context": sizes.context, "tokens": sizes.context}
        for way, t in ms.items():
            more = {"losses": first[way], "tokens_per_s": round(sizes.context / t * 1e3)}
            log.add(CASE, way, "step", "time", t, shape=shape, **more)
            log.add(CASE, way, "step", "rate", flops / t / 1e9, shape=shape)


def main() -> None:
    """Starts the ranks."""
    start(process, parser_of(__doc__, TIMED).parse_args())


if __name__ == "__main__":
    main()
