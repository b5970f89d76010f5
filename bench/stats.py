"""The cost of the largest scores on a GPU: `python -m bench.stats --out OUT/stats.jsonl`, under a minute.

Each case is first judged on a shorter sequence by the error rule, the largest scores too, and at its own length o and lse have to be
those of a call without them, bit for bit. Then the forwards without them, with those of the rows, and with those of the heads are
timed in turns. Bounded scores (a softcap in bf16) are summed up without maxima where nobody asks for these, so there they cost more.
`--device cpu` rehearses it with the portable backend on small calls. The results are records of the one form (bench/records.py).
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import tilewise as tw
from bench import measure, records
from tilewise import dispatch, testing

GOAL = 1.01
BOUNDED = "softcap-bounded"
# batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, dtype, options
CASES = {
    "d128-n4096-causal": (4, 4096, 4096, 16, 16, 128, torch.bfloat16, {"causal": True}),
    "d128-n16384-full": (1, 16384, 16384, 8, 8, 128, torch.bfloat16, {}),
    "d64-n4096-causal-gqa": (4, 4096, 4096, 32, 8, 64, torch.float16, {"causal": True}),
    "fp32-d64-n4096": (2, 4096, 4096, 8, 8, 64, torch.float32, {}),
    "alibi": (4, 4096, 4096, 16, 16, 128, torch.bfloat16, {"causal": True, "score": "alibi"}),
    BOUNDED: (4, 4096, 4096, 16, 16, 128, torch.bfloat16, {"causal": True, "score": "softcap"}),
    "decode-n32768": (8, 1, 32768, 32, 8, 128, torch.bfloat16, {}),
}


def drawn(name: str, device: str, most: int) -> tuple[tuple[torch.Tensor, ...], dict]:
    """q, k, v and the keywords of a case, cut to lengths of ``most`` and a batch of one where that is less."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, dtype, options = CASES[name]
    batch = batch if most >= seqlen_k else 1
    sizes = {"batch": batch, "nq": min(seqlen_q, most), "nk": min(seqlen_k, most), "hq": heads_q, "hk": heads_k}
    q, k, v = (x.to(device) for x in testing.qkv(**sizes, d=head_dim, dv=head_dim, dtype=dtype))
    slopes = torch.linspace(0.5, 0.01, heads_q, device=device)
    scores = {"alibi": tw.alibi(slopes), "softcap": tw.softcap(30.0), None: None}
    return (q, k, v), options | {"score": scores[options.get("score")]}


def faults(name: str, device: str, backend: str, most: int) -> list[str]:
    """The faults of a case; empty: none."""
    tensors, options = drawn(name, device, most=300)
    with torch.no_grad():
        c = testing.call(*tensors, device=device, max_logit=True, **options).forward_only()
        found = testing.wrong(dispatch.backend(backend), c)
        tensors, options = drawn(name, device, most)
        plain = tw.attention_with_lse(*tensors, backend=backend, **options)
        stats = tw.attention_with_stats(*tensors, backend=backend, **options)
    same = name == BOUNDED or all(torch.equal(x, y) for x, y in zip(plain, stats[:2], strict=True))
    return found + ([] if same else ["o or lse has other bits than without the largest scores"])


def timed(name: str, device: str, backend: str, most: int) -> dict[str, float]:
    """Milliseconds of a forward, by what it returns."""
    tensors, options = drawn(name, device, most)
    calls: dict[str, Callable[[], object]] = {
        "lse": partial(tw.attention_with_lse, *tensors, backend=backend, **options),
        "row": partial(tw.attention_with_stats, *tensors, backend=backend, **options),
        "head": partial(tw.attention_with_stats, *tensors, per="head", backend=backend, **options),
    }
    with torch.no_grad():
        return measure.in_turns(calls, device, rounds=15 if device == "cuda" else 3, budget_ms=30)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    device, cuda = options.device, options.device == "cuda"
    where = (device, "triton" if cuda else "portable", 1 << 30 if cuda else 300)
    peers = {
        "lse": f"tw.attention_with_lse by the {where[1]} backend",
        "row": "tw.attention_with_stats, per row",
        "head": "the same, per head",
    }
    head = records.run(f"python -m bench.stats --device {device}", device, peers)
    records.append([head], options.out)
    ok = True
    for name in CASES:
        found = list(results(head["run"], name, *where))
        records.append(found, options.out)
        ok = ok and all(r["value"] for r in found)
        print(
            *[f"{r['case']:36} {r['contestant']:6} {r['value']:9.4f} {r['unit']}" for r in found], sep="\n", flush=True
        )
    return 0 if ok else 1


def results(run: str, name: str, device: str, backend: str, most: int) -> Iterator[dict]:
    """Whether a case is right and, if so, its times, as records."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, dtype, options = CASES[name]
    shape = {
        "what": f"largest scores, {name}",
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "most": most,
    }
    shape |= {"heads_q": heads_q, "heads_k": heads_k, "head_dim": head_dim, "dtype": str(dtype).removeprefix("torch.")}
    made = partial(records.result, run, f"stats-{name}", shape=shape | options)
    wrong = faults(name, device, backend, most)
    yield made("row", "forward", "right", int(not wrong), of=1, **({"why": "; ".join(wrong)} if wrong else {}))
    if wrong:
        return
    ms = timed(name, device, backend, most)
    for who, value in ms.items():
        meets = {} if who == "lse" else {"of_lse": round(value / ms["lse"], 4)}
        meets |= {"meets": name == BOUNDED or value / ms["lse"] <= GOAL} if who == "row" else {}
        yield made(who, "forward", "time", round(value, 5), **meets)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
