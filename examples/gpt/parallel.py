"""Trains the GPT over ranks that share every sequence, and their weights: the losses are those of one process.

    python examples/gpt/parallel.py --context-parallel 2 --steps 20
    python examples/gpt/parallel.py --context-parallel 4 --context 8192 --device cuda --fsdp --checkpoint

Each rank embeds its own rows, turns q and k by their places in the whole sequence, and sees all keys in attention; every other layer
works on rows alone. DDP, or FSDP2 with --fsdp, takes the mean of the ranks' gradients. All ranks hold all logits at the end and
compute the same loss, so the ranks' gradients add up to `ranks` times the loss's, and their mean is that of one process. With
--checkpoint a layer keeps its input alone, and is computed again in the backward: every rank exchanges its keys once more there.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.parallel import ContextParallel

sys.path.insert(0, str(Path(__file__).parent))

from model import GPT, GPTConfig
from train import StepRecord, TrainConfig, load_text, train


class OverRanks(nn.Module):
    """A GPT of which every rank computes its own rows: whole tokens in, whole logits out, on every rank."""

    def __init__(self, config: GPTConfig, parallel: ContextParallel, seed: int = 0):
        super().__init__()
        self.parallel = parallel
        self.gpt = GPT(config, lambda q, k, v: tw.attention(q, k, v, causal=True, parallel=parallel), seed)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.parallel.positions(tokens.shape[1], tokens.device)
        return self.parallel.unshard(self.gpt(self.parallel.shard(tokens), positions))


class Recomputed(nn.Module):
    """A layer that keeps its input alone for the backward."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return checkpoint(self.layer, x, angles, use_reentrant=False)


def losses(
    config: GPTConfig, text: bytes, training: TrainConfig, device: str, fsdp: bool, recompute: bool = False
) -> list[StepRecord]:
    """Trains on this rank, of those of the default process group."""
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    model: nn.Module = OverRanks(config, tw.context_parallel(mesh["cp"]), training.seed).to(device)
    if recompute:
        model.gpt.blocks = nn.ModuleList(map(Recomputed, model.gpt.blocks))
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        for block in model.gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    return list(train(model, text, training))


def rank(number: int, options: argparse.Namespace, folder: str) -> None:
    """One process; the first one prints."""
    device = options.device if options.device == "cpu" else f"cuda:{number}"
    if device != "cpu":
        torch.cuda.set_device(number)
    store = dist.FileStore(f"{folder}/store", options.context_parallel)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=number, world_size=options.context_parallel)
    training = TrainConfig(steps=options.steps, context=options.context)
    records = losses(
        GPTConfig(context=options.context), load_text(options.text), training, device, options.fsdp, options.checkpoint
    )
    for record in records if number == 0 else ():
        print(f"step {record.step:<4} loss {record.loss:.4f}   {record.tokens_per_s:,.0f} tokens/s")
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context-parallel", type=int, default=2, help="how many ranks share a sequence")
    parser.add_argument("--context", type=int, default=256, help="bytes that the model sees at once")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--text", type=Path, help="a text file; by default the standard library's sources")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fsdp", action="store_true", help="shard the weights too (FSDP2)")
    parser.add_argument("--checkpoint", action="store_true", help="keep a layer's input alone for the backward")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank, (options, folder), nprocs=options.context_parallel, start_method="spawn")


if __name__ == "__main__":
    main()
