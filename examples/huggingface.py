"""A Hugging Face model on tilewise: `python examples/huggingface.py`. Random weights, half a minute on a laptop's CPU.

1. A padded batch gives eager's logits, and generation continues it with eager's tokens.
2. Sequences packed into one row are trained on: each sees itself alone, none is padded.
"""

import argparse
import itertools

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import tilewise.compat.transformers

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 32}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}


def padded_batch(model: torch.nn.Module, lengths: tuple[int, ...] = (300, 120)) -> float:
    """Two prompts, padded on the left. Returns the largest difference of a logit between eager and tilewise."""
    ids = torch.randint(2, 512, (len(lengths), max(lengths)))
    kept = torch.stack([torch.arange(max(lengths)) >= max(lengths) - n for n in lengths]).long()
    logits, said = {}, {}
    for name in ("eager", "tilewise"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(ids, attention_mask=kept, position_ids=(kept.cumsum(-1) - 1).clamp(min=0)).logits
        said[name] = model.generate(ids, attention_mask=kept, max_new_tokens=8, do_sample=False)
    if not torch.equal(said["eager"], said["tilewise"]):
        raise RuntimeError("the two say different tokens")
    return (logits["eager"] - logits["tilewise"])[kept.bool()].abs().max().item()


def packed_training(model: torch.nn.Module, lengths: tuple[int, ...] = (200, 60, 140), steps: int = 3) -> list[float]:
    """The loss of each step on sequences in one row; ``cu_seq_lens`` tell them apart, for every model alike."""
    model.set_attn_implementation("tilewise")
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    ids = torch.randint(2, 512, (1, sum(lengths)))
    labels = ids.clone()
    labels[0, starts[:-1].long()] = -100  # the first token of a sequence is not the one after the last of another
    packed = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "use_cache": False}
    packed |= {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        loss = model(ids, labels=labels, **packed).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition(":")[0]).parse_args()
    tilewise.compat.transformers.register()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(Qwen3Config(**SMALL, **HEADS), attn_implementation="tilewise")
    print(f"padded batch: largest difference of a logit {padded_batch(model):.1e}, the same tokens")
    print("packed training: losses " + ", ".join(f"{loss:.3f}" for loss in packed_training(model)))


if __name__ == "__main__":
    main()
