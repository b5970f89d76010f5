"""The page's recipe for context parallelism in torchtitan: two processes, joined by gloo, have the loss and the gradients of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FSDPModule

pytest.importorskip("torchtitan.models.llama3.parallelize", reason="the package torchtitan is not installed")

from torchtitan import config, trainer
from torchtitan.distributed import parallel_dims
from torchtitan.models import llama3
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import parallelize

from tilewise.compat import flex_attention as flex

HEADS, HEADS_K, DIM, SEQLEN = 4, 2, 16, 256
PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def _model() -> torch.nn.Module:
    made = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    rope = made.layers[0].attention.rope
    rope.dim = DIM
    sizes = {"n_layers": 2, "dim": HEADS * DIM, "n_heads": HEADS, "n_kv_heads": HEADS_K, "hidden_dim": 64}
    made.layers = llama3._build_llama3_layers(**sizes, attn_backend="flex", rope=rope)
    made.dim = made.tok_embeddings.embedding_dim = made.norm.normalized_shape = made.lm_head.in_features = HEADS * DIM
    torch.manual_seed(0)
    model = made.build()
    model.init_states()
    return model


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 2000, (2, SEQLEN + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(SEQLEN).repeat(2, 1)
    positions[0, 100:] -= 100  # two documents in a row
    return tokens, positions


def _step(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor, extra: dict) -> torch.Tensor:
    logits = model(inputs, **extra)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    recipe = next(x for x in re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.S) if "apply_cp_to_forward" in x)
    exec(recipe.replace("main()\n", ""), {})
    parallel_dims.device_type = "cpu"  # torchtitan knows GPUs alone
    dims = parallel_dims.ParallelDims(1, 1, 2, 1, 1, 1, world_size=2, spmd_backend="partial_dtensor")
    options = config.ParallelismConfig(context_parallel_degree=2, spmd_backend="partial_dtensor")
    training = config.TrainingConfig(mixed_precision_param="float32")
    compiled = config.CompileConfig(enable=False)
    model = parallelize.parallelize_llama(
        _model(), parallel_dims=dims, training=training, parallelism=options, compile_config=compiled, ac_config=None,
        dump_folder=folder,
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    tokens, positions = _batch()
    extra = {"positions": positions, "attention_masks": model.get_attention_masks(positions=positions)}
    given = trainer.prepare_context_parallel_input(
        tokens[:, :-1], tokens[:, 1:], extra, dims.get_mesh("cp"), torch.device("cpu")
    )
    assert given[0].shape == (2, SEQLEN // 2)
    loss = _step(model, *given)
    dist.all_reduce(loss)
    whole = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x  # noqa: E731
    grads = {name: whole(x.grad) for name, x in model.named_parameters()}
    torch.save((loss, grads), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_torchtitans_context_parallelism_by_ours_has_the_gradients_of_one_process(tmp_path, monkeypatch):
    mp.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="spawn")
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex.flex_attention))
    model, (tokens, positions) = _model(), _batch()
    masks = model.get_attention_masks(positions=positions)
    loss = _step(model, tokens[:, :-1], tokens[:, 1:], {"positions": positions, "attention_masks": masks})
    for rank in range(2):
        found, grads = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, loss)
        for name, x in model.named_parameters():
            torch.testing.assert_close(grads[name], x.grad, msg=lambda text, name=name: f"{name}: {text}")
