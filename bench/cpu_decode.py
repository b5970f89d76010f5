"""Decoding on a CPU from memory: how near the pace comes to that of a plain sum over K and V.

    python -m bench.cpu_decode --out FILE.jsonl [--mib 448] [--keys 32768] [--rounds 9]

One query of 8 heads on one key head, head dim 64, for each of several sequences, which together are larger than any cache: over dense keys,
and over pages of 16 that lie in order or at random. All contestants of a dtype run in each round beside the sum; a ratio is the median
over the rounds. What is wrong is not timed.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import tilewise as tw
from bench import records
from bench.measure import seconds_per_call
from tilewise.accuracy import Expected
from tilewise.testing import call

HEADS, HEAD_DIM, PAGE = 8, 64, 16
PEERS = {
    "dense": "tw.attention over dense keys, the cpu backend",
    "pages-in-order": "tw.attention_paged over pages of 16 keys that lie one behind the other",
    "pages-at-random": "the same over pages in random order",
    "read": "K and V summed once",
}


def contestants(dtype: torch.dtype, mib: int, keys: int) -> tuple[dict, int, dict[str, Callable[[], Tensor]]]:
    """The shape, the bytes of K and V, and the calls by name. Raises SystemExit where a result is beyond the error rule."""
    batch = max(1, (mib << 20) // (2 * keys * HEAD_DIM * dtype.itemsize))
    q = torch.randn(batch, 1, HEADS, HEAD_DIM).to(dtype)
    k, v = (torch.randn(batch, keys, 1, HEAD_DIM).to(dtype) for _ in range(2))
    attend = {"dense": lambda: tw.attention(q, k, v, backend="cpu")}
    count, lengths = batch * keys // PAGE, torch.full((batch,), keys, dtype=torch.int32)
    for name, order in (("pages-in-order", torch.arange(count)), ("pages-at-random", torch.randperm(count))):
        pools = [torch.empty_like(x).view(count, PAGE, 1, HEAD_DIM) for x in (k, v)]
        for pool, x in zip(pools, (k, v), strict=True):
            pool[order] = x.view(count, PAGE, 1, HEAD_DIM)  # the n-th page of a sequence lies at order[n]
        cache = tw.paged(*pools, order.view(batch, -1).int(), lengths)
        attend[name] = lambda cache=cache: tw.attention_paged(q, cache, backend="cpu")
    c = call(q[:1], k[:1], v[:1]).forward_only()
    expected = Expected.of(c.p, c.t)  # of the first sequence
    for name, run in attend.items():
        (error,) = expected.judge({"o": run()[:1]})
        if not error.ok:
            raise SystemExit(f"{name} in {dtype}: {error}")
    whole = [x.view(-1).view(torch.float32) for x in (k, v)]
    attend["read"] = lambda: whole[0].sum() + whole[1].sum()
    name = str(dtype).removeprefix("torch.")
    shape = {"batch": batch, "seqlen_k": keys, "heads_q": HEADS, "heads_k": 1, "head_dim": HEAD_DIM, "dtype": name}
    return shape, k.nbytes + v.nbytes, attend


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mib", type=int, default=448, help="of K and V of all sequences")
    parser.add_argument("--keys", type=int, default=32768, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    run = records.run("python -m bench.cpu_decode", "cpu", PEERS, statistic=f"median of {options.rounds} rounds")
    records.append([run], options.out)
    for dtype in (torch.float32, torch.bfloat16):
        shape, size, attend = contestants(dtype, options.mib, options.keys)
        rounds = [
            {name: seconds_per_call(once, 1, "cpu") for name, once in attend.items()} for _ in range(options.rounds)
        ]
        case = f"cpu-decode-{shape['dtype']}-{options.keys}"
        for who in attend:
            pace = round(size / statistics.median(x[who] for x in rounds) / 1e9, 2)
            share = round(statistics.median(x["read"] / x[who] for x in rounds), 3)
            row = records.result(run["run"], case, who, "forward", "bandwidth", pace, of_read=share, shape=shape)
            records.append([row], options.out)
            print(f"{case} {who}: {pace} GB/s, {share} of a sum's pace", flush=True)


if __name__ == "__main__":
    main()
