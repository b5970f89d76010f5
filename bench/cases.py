"""The one table of attention cases. Tests, benchmarks, tuning and the demo draw from it by name or by tag.

A Case holds sizes and *names* of a mask and a score; MASKS and SCORES of bench/kinds.py say what a name means.

Tags: `contract` tiny shapes for tests · `cpu` / `cuda` where the case is meant to be timed · `demo` · `exact` · `h200` the 36 rows
and `masks` the masks and scores whose peers are in docs/performance.md · `paper` what repeats a figure of a paper
(docs/evidence.md) · `decode`, `window`, `packed`, `sparse`, `shares`, `score`, `triangles`, `windows`, `split`, `memory`,
`feature` what they probe.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.kinds import MASKS, SCORES, SHARES, document_lengths, leaf_dtype


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem, without its tensors.

    lengths: for a packed case the (seqlen_q, seqlen_k) of every sequence; else empty.
    backward: whether gradients are part of the case (decode has none).
    """

    name: str
    source: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "float32"
    mask: str | None = None
    score: str | None = None
    sink: bool = False
    dropout_p: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()
    backward: bool = True
    tags: frozenset[str] = frozenset()

    @property
    def off(self) -> int:
        return self.seqlen_k - self.seqlen_q

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def sequences(self) -> tuple["Case", ...]:
        """The case itself, or one unpacked case of batch 1 for each packed sequence."""
        if not self.lengths:
            return (self,)
        return tuple(replace(self, batch=1, seqlen_q=nq, seqlen_k=nk, lengths=()) for nq, nk in self.lengths)

    def draw(self, device: str = "cpu", seed: int = 0) -> "Inputs":
        """This case's tensors; see :func:`draw`."""
        return draw(self, device, seed)

    def kept_pairs(self, device: str = "cpu") -> int:
        """Pairs (i, j) of one query head that the mask keeps, summed over the batch: what the work is counted by."""
        if self.mask is None:
            return sum(c.batch * c.seqlen_q * c.seqlen_k for c in self.sequences)
        return sum(_kept_pairs(c, device) for c in self.sequences)

    def flops(self, direction: str, device: str = "cpu") -> float:
        """Operations of the products: 2 (D + Dv) a kept pair forward, and 2 (3 D + 2 Dv) backward (2.5 × when D = Dv)."""
        pairs = self.kept_pairs(device) * self.heads_q
        forward = 2.0 * pairs * (self.head_dim + self.head_dim_v)
        backward = 2.0 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)
        return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


@dataclass(frozen=True)
class Inputs:
    """A case's tensors. q (B, Nq, Hq, D), k (B, Nk, Hk, D), v (B, Nk, Hk, Dv), do as o (B, Nq, Hq, Dv); packed without B.

    leaves: the tensors that a mask or score reads, by name; the floating ones want a gradient.
    first_batch: the b of the first batch element, for one sequence cut out of a packed input.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    sink: Tensor | None = None
    leaves: dict[str, Tensor] = field(default_factory=dict)
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dropout_seed: Tensor | None = None
    first_batch: int = 0

    @property
    def off(self) -> int:
        return self.case.off

    def options(self) -> dict[str, Any]:
        """The keywords of ``tw.attention`` for this case; a packed one's also hold cu_seqlens_q and cu_seqlens_k."""
        found = {
            "mask": MASKS[self.case.mask].build(self) if self.case.mask else None,
            "score": SCORES[self.case.score].build(self) if self.case.score else None,
            "sink": self.sink,
            "dropout_p": self.case.dropout_p,
            "dropout_seed": self.dropout_seed,
        }
        if not self.case.lengths:
            return found
        return found | {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}

    @property
    def wanted(self) -> dict[str, Tensor]:
        """The tensors whose gradients the case asks for, by the gradient's name."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink, **self.leaves}
        return {f"d{name}": t for name, t in tensors.items() if t is not None and t.is_floating_point()}

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers, detached from these, in another dtype (float64 for the oracle)."""

        def cast(t: Tensor | None) -> Tensor | None:
            if t is None or not t.is_floating_point():
                return t
            return t.detach().to(dtype).requires_grad_(t.requires_grad)

        cast_leaves = {name: cast(t) for name, t in self.leaves.items()}
        fresh = {name: cast(getattr(self, name)) for name in ("q", "k", "v", "do", "sink")}
        return replace(self, leaves=cast_leaves, **fresh)


def draw(case: Case, device: str = "cpu", seed: int = 0) -> Inputs:
    """Normal q, k, v, do; small normal leaves. The same case, device and seed give the same numbers."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.torch_dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    if case.lengths:
        lead_q, lead_k = ((sum(n[side] for n in case.lengths),) for side in (0, 1))
        cu_seqlens = [_cumulative([n[side] for n in case.lengths], device) for side in (0, 1)]
    else:
        lead_q, lead_k = (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
        cu_seqlens = [None, None]
    leaves = {}
    for kind in (MASKS.get(case.mask), SCORES.get(case.score)):
        leaves.update(kind.leaves(case, normal) if kind else {})
    x = Inputs(
        case=case,
        q=normal(*lead_q, case.heads_q, case.head_dim),
        k=normal(*lead_k, case.heads_k, case.head_dim),
        v=normal(*lead_k, case.heads_k, case.head_dim_v),
        do=normal(*lead_q, case.heads_q, case.head_dim_v),
        sink=normal(case.heads_q, dtype=leaf_dtype(case)) if case.sink else None,
        leaves={name: t.to(device) for name, t in leaves.items()},
        cu_seqlens_q=cu_seqlens[0],
        cu_seqlens_k=cu_seqlens[1],
        dropout_seed=torch.tensor([1234 + seed], device=device) if case.dropout_p else None,
    )
    if case.backward:
        for t in x.wanted.values():
            t.requires_grad_()
    return x


def _cumulative(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


@cache
def _kept_pairs(case: Case, device: str) -> int:
    """Counts an unpacked case's pairs by its predicate, in chunks of rows; causal ones row by row."""
    if case.mask == "causal":
        return case.batch * sum(min(max(i + case.off + 1, 0), case.seqlen_k) for i in range(case.seqlen_q))
    b_size, normal = case.batch, lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype)
    leaves = {name: t.to(device) for name, t in MASKS[case.mask].leaves(case, normal).items()}
    nothing = torch.empty(0)
    keep = MASKS[case.mask].keep(Inputs(case, nothing, nothing, nothing, nothing, leaves=leaves))
    j = torch.arange(case.seqlen_k, device=device, dtype=torch.int32)
    total, chunk = 0, max(1, (1 << 24) // max(1, case.seqlen_k))
    for b in range(b_size if leaves else 1):
        for start in range(0, case.seqlen_q, chunk):
            i = torch.arange(start, min(start + chunk, case.seqlen_q), device=device, dtype=torch.int32)[:, None]
            total += int(keep(torch.tensor(b, device=device), torch.tensor(0, device=device), i, j).sum())
    return total if leaves else total * b_size


# ---- the table ----------------------------------------------------------------------------------------------------

SIZES = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v")
DIMS, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
BF16, CAUSAL = {"dtype": "bfloat16"}, {"mask": "causal"}


def _square(batch: int, n: int, heads_q: int, heads_k: int, head_dim: int) -> tuple[int, ...]:
    """The sizes of as many queries as keys."""
    return batch, n, n, heads_q, heads_k, head_dim, head_dim


def _case(name: str, source: str, shape: tuple[int, ...], tags: str, **options: Any) -> Case:
    return Case(
        name=name, source=source, tags=frozenset(tags.split()), **dict(zip(SIZES, shape, strict=True)), **options
    )


def _both(name: str, *row: Any, **options: Any) -> Iterator[Case]:
    """A case without a mask, and the same with a causal one."""
    yield _case(f"{name}-full", *row, **options)
    yield _case(f"{name}-causal", *row, **options, **CAUSAL)


def _packed(name: str, source: str, shape: tuple[int, int, int, int], tags: str, **options: Any) -> Case:
    """shape: heads_q, heads_k, head_dim, head_dim_v; batch and the longest seqlens follow from options["lengths"]."""
    lengths = options["lengths"]
    longest = [max(n[side] for n in lengths) for side in (0, 1)]
    return _case(name, source, (len(lengths), *longest, *shape), f"{tags} packed", **options)


def _equal(*lengths: int) -> tuple[tuple[int, int], ...]:
    """The lengths of packed sequences that have as many queries as keys."""
    return tuple((n, n) for n in lengths)


def _h200() -> Iterator[Case]:
    """16,384 tokens of hidden size 2048 in bf16: H = 2048 / D, B = 16384 / N."""
    source = "FlashAttention-2 and -3 papers' grid"
    for d, n in product(DIMS, LENGTHS):
        tags = "h200 cuda" + " paper" * (d != 256)  # FlashAttention-2's Figures 4 to 7 have 64 and 128
        yield from _both(f"h200-d{d}-n{n}", source, _square(16384 // n, n, 2048 // d, 2048 // d, d), tags, **BF16)
    for n in LENGTHS[3:]:
        yield from _both(
            f"h200-gqa4-d128-n{n}", "grouped queries", _square(16384 // n, n, 16, 4, 128), "grouped", **BF16
        )
    for d, n in product(DIMS, LENGTHS[2:5]):  # one GPU's heads of a tensor-parallel group
        options = ("one key head", _square(1, n, 8, 1, d), "grouped")
        yield _case(f"h200-mqa8-d{d}-n{n}-causal", *options, **BF16, **CAUSAL)


def _cpu() -> Iterator[Case]:
    """PyTorch's CPU attention is the peer: batch 1, 8 heads."""
    for short, dtype, batch in (("fp32", "float32", 4), ("bf16", "bfloat16", 8)):
        for d, n in product((64, 128), LENGTHS[1:5]):
            tags = "cpu" + " paper" * ((short, d) == ("fp32", 64))
            yield from _both(f"cpu-{short}-d{d}-n{n}", "CPU grid", _square(1, n, 8, 8, d), tags, dtype=dtype)
        for n in (128, 256):
            yield _case(f"cpu-{short}-d64-n{n}-b16", "CPU, short", _square(16, n, 8, 8, 64), "cpu", dtype=dtype)
        options, several = {"dtype": dtype, "backward": False}, f"cpu-{short}-decode-32k-b{batch}"
        yield _case(
            f"cpu-{short}-decode-32k", "CPU, decode", (1, 1, 32768, 8, 1, 64, 64), "cpu decode paper", **options
        )
        # 64 MiB of K and V: from memory, where those of one may stay in the L3
        yield _case(several, "CPU, decode", (batch, 1, 32768, 8, 1, 64, 64), "cpu decode", **options)
    long = _square(1, 16384, 8, 8, 64)
    yield _case("cpu-fp32-d64-n16384-full", "CPU, the sparse cases' whole", long, "cpu sparse paper")
    yield _case("cpu-fp32-d64-n16384-window512", "CPU, window", long, "cpu window", mask="window-512")
    yield _case("cpu-fp32-d64-n16384-sparse90", "CPU, 90 % block-sparse", long, "cpu sparse paper", mask="sparse-90")
    yield _case("cpu-fp32-d64-n32768-full", "memory at 32k", _square(1, 32768, 8, 8, 64), "cpu memory")
    yield _case("cpu-bf16-d64-n16384-h2", "memory at 16k", _square(1, 16384, 2, 2, 64), "cpu memory", **BF16)
    for score in ("softcap-30", "alibi", "bias"):
        row = ("CPU, scores", _square(1, 2048, 8, 8, 64), "cpu score")
        yield _case(f"cpu-fp32-d64-n2048-{score}", *row, score=score, **CAUSAL)
    lengths = _equal(700, 1, 1500, 300, 64, 900, 631)
    yield _packed("cpu-fp32-packed-4k", "CPU, packed", (8, 8, 64, 64), "cpu", lengths=lengths, **CAUSAL)


def _cuda() -> Iterator[Case]:
    """Cases that the grid of full and causal squares leaves out, in bf16."""

    def row(name: str, shape: tuple[int, ...], tags: str, make: Callable = _case, **options: Any) -> Any:
        return make(f"cuda-{name}", "H200, structure", shape, f"cuda {tags}", **BF16, **options)

    long = _square(1, 32768, 16, 16, 128)
    yield row("window1024-n32768", long, "window", mask="window-1024")
    yield row("full-n32768", long, "window")
    yield row("sparse90-n16384", _square(1, 16384, 16, 16, 128), "sparse paper", mask="sparse-90")
    yield row("documents-n32768", long, "packed", mask="documents")
    for score in ("softcap-30", "alibi", "bias", "bias-16"):
        yield row(f"{score}-n4096", _square(4, 4096, 16, 16, 128), "score", score=score, **CAUSAL)
    yield row("one-head-n4096", _square(1, 4096, 1, 1, 128), "split paper")
    yield row("four-heads-n4096", _square(1, 4096, 4, 4, 128), "split")
    for d in (96, 192):
        yield from row(f"d{d}-n4096", _square(4, 4096, 2048 // d, 2048 // d, d), "dims", _both)
    for n in LENGTHS:
        yield from row(f"d512-n{n}", _square(max(1, 4096 // n), n, 16, 16, 512), "dims", _both)
    for short, dtype, dims in (("fp16", "float16", DIMS), ("fp32", "float32", DIMS[:2])):
        for d in dims:
            shape = _square(4, 4096, 2048 // d, 2048 // d, d)
            yield from _both(f"cuda-{short}-d{d}-n4096", "H200, other dtypes", shape, f"cuda {short}", dtype=dtype)
    yield row("gqa8-n4096-causal", _square(4, 4096, 16, 2, 128), "gqa", **CAUSAL)
    yield row("decode-32k", (8, 1, 32768, 32, 4, 128, 128), "decode paper", backward=False)
    lengths = _equal(4096, 512, 1024, 2560, 3072, 128, 1920, 3072)
    yield row("packed-16k", (16, 16, 128, 128), "", _packed, lengths=lengths, **CAUSAL)


def _features() -> Iterator[Case]:
    """A mask, score or dropout each, in bf16, at a size at which its cost shows."""
    dropout = {"dropout_p": 0.2}
    features = {
        "lengths": {"mask": "key-lengths"},
        "documents": {"mask": "documents"},
        "prefix": {"mask": "prefix"},
        "range": {"mask": "key-range"},
        "dropout": dropout,
        "dropout-causal": CAUSAL | dropout,
        "dropout-lengths": {"mask": "key-lengths", **dropout},
        "alibi": CAUSAL | {"score": "alibi"},
        "softcap-alibi": {"score": "softcap-alibi"},
        "bias": {"score": "bias-16"},
        "relative": {"score": "relative"},
        "dense": {"mask": "dense"},
        "sparse": {"mask": "sparse-90"},
        "sparse-bias-dropout": {"mask": "sparse-90", "score": "bias-16", **dropout},
    }
    for name, options in features.items():
        row = ("H200, features", _square(2, 4096, 8, 8, 128), "cuda feature")
        yield _case(f"cuda-feature-{name}", *row, **BF16, **options)


def _masks() -> Iterator[Case]:
    """Masks and scores in bf16 where their tiles take the time, and documents as a packed call beside the same as a mask."""
    source, tags = "H200, masks and scores", "masks cuda"

    def row(what: str, d: int = 128, heads_k: int = 16, n: int = 16384, batch: int = 1, **options: Any) -> Case:
        name, shape = f"h200-{what}-d{d}-h16-{heads_k}-n{n}", _square(batch, n, 16, heads_k, d)
        return _case(name, source, shape, tags, **BF16, **options)

    sizes = ((128, 16), (64, 16), (128, 4))
    yield from (row("causal", *size, **CAUSAL) for size in sizes)
    yield from (row("window-1023-causal", *size, mask="window-1024") for size in sizes)
    packed = {"lengths": _equal(*document_lengths(32768))} | BF16 | CAUSAL
    for d, heads_k in sizes:
        yield row("documents-causal", d, heads_k, 32768, mask="texts")
        yield _packed(f"h200-packed-causal-d{d}-h16-{heads_k}-n32768", source, (16, heads_k, d, d), tags, **packed)
    yield row("block-causal-1024", mask="block-causal-1024")
    yield row("prefix-4096", mask="prefix-4096")
    yield row("key-lengths", n=8192, batch=4, mask="key-lengths")
    yield row("documents-window-511", n=32768, mask="texts-window-512")
    yield row("block-sparse-90", mask="sparse-90")
    for what, score in (("softcap-30", "softcap-30"), ("alibi", "alibi"), ("learned-table", "relative")):
        yield row(f"causal-{what}", score=score, **CAUSAL)


def _blocks() -> Iterator[Case]:
    """Shares of time beside shares of blocks: patterns of 128 × 128, their whole, and no mask."""
    for d, (n, heads) in product((64, 128), ((8192, 16), (16384, 16), (32768, 8), (65536, 4))):
        row = ("FlashAttention, figure 2, right", _square(1, n, heads, heads, d), "cuda shares")
        yield _case(f"shares-d{d}-n{n}-whole", *row, **BF16)
        for share in SHARES:
            yield _case(f"shares-d{d}-n{n}-{share:g}", *row, mask=f"blocks-{share:g}", **BF16)


def _trained_biases() -> Iterator[Case]:
    """A bias that the whole batch shares and that is trained: triangle attention of N rows (Jumper et al. 2021, algorithms 13 and
    14), and shifted windows of 32, 8 and 4 images (Liu et al. 2021)."""
    sizes = [(n, d, "bfloat16") for n in (384, 768) for d in (16, 32, 64)] + [(768, d, "float32") for d in (32, 64)]
    for n, d, dtype in sizes:
        row = ("AlphaFold", _square(n, n, 4, 4, d), "cuda triangles")
        yield _case(f"triangle-n{n}-d{d}-{dtype}", *row, dtype=dtype, score="bias-16")
    for count, n, heads in ((2048, 49, 3), (512, 144, 6), (256, 256, 8)):
        row = ("Swin", _square(count, n, heads, heads, 32), "cuda windows")
        yield _case(f"windows-n{n}", *row, **BF16, mask="shifted-windows", score="bias-16")


LARGE = ("window-512", "window-1024", "sparse-90", "shifted-windows", *(f"blocks-{share:g}" for share in SHARES))
"""Masks that the contract leaves out: of large calls, and of kinds that it has in small."""


def _demo() -> Iterator[Case]:
    """`tilewise demo`: causal self-attention at growing N, small enough that a laptop's CPU reaches 16,384."""
    for n in LENGTHS:
        yield _case(f"demo-cpu-n{n}", "tilewise demo", _square(1, n, 4, 4, 64), "demo cpu", **CAUSAL)
        yield _case(f"demo-cuda-n{n}", "tilewise demo", _square(1, n, 16, 16, 128), "demo cuda", **BF16, **CAUSAL)


def _exact() -> Iterator[Case]:
    """The demo's table of errors, whose labels are the sources: a feature each, where the largest of many errors is no accident."""
    square, cross, tall = (1, 384, 384, 8, 2, 64, 64), (1, 300, 412, 8, 2, 64, 64), (1, 412, 300, 8, 2, 64, 64)
    row = lambda name, label, shape, **options: _case(f"exact-{name}", label, shape, "exact", **options)  # noqa: E731
    yield row("causal", "causal, grouped heads", square, **CAUSAL)
    yield row("more-keys", "more keys than queries", cross, **CAUSAL)
    yield row("more-queries", "queries without keys", tall, **CAUSAL)
    yield row("window", "sliding window", square, mask="window-8")
    yield row("prefix", "prefix", square, mask="prefix")
    yield row("documents", "documents", square, mask="documents")
    yield row("sparse", "block-sparse", square, mask="sparse-16")
    yield row("softcap-alibi", "softcap, then ALiBi", square, score="softcap-alibi", **CAUSAL)
    yield row("bias", "learned pair bias", square, score="bias")
    yield row("sink", "attention sink", square, sink=True, **CAUSAL)
    yield row("dropout", "dropout", square, dropout_p=0.2, **CAUSAL)
    lengths = _equal(100, 37, 1, 180, 66)
    yield _packed("exact-packed", "packed sequences", (8, 2, 64, 64), "exact", lengths=lengths, **CAUSAL)
    yield row("bf16", "causal", square, dtype="bfloat16", **CAUSAL)


def _contract() -> Iterator[Case]:
    """Tiny shapes that every backend must compute or refuse: odd sizes, empty rows, groups, every mask and score."""
    sizes = {
        "one": (1, 1, 1, 1, 1, 32, 32),
        "n63": (2, 63, 63, 2, 2, 16, 16),
        "n129": (1, 129, 129, 2, 2, 32, 32),
        "n1000": (1, 1000, 1000, 1, 1, 64, 64),
        "decode": (2, 1, 129, 4, 2, 32, 32),
        "more-keys": (1, 40, 100, 2, 2, 16, 16),
        "more-queries": (1, 100, 40, 2, 2, 16, 16),
        "gqa": (2, 65, 65, 6, 2, 16, 16),
        "mqa": (1, 70, 70, 4, 1, 32, 32),
        "dv-above-d": (1, 63, 63, 2, 2, 16, 48),
        "dv-below-d": (1, 63, 63, 2, 1, 48, 16),
        "d1": (1, 33, 33, 2, 2, 1, 1),
        "d128": (1, 130, 130, 1, 1, 128, 128),
        "d513": (1, 20, 20, 1, 1, 513, 513),
        "empty-batch": (0, 16, 16, 2, 2, 16, 16),
        "no-queries": (1, 0, 16, 2, 2, 16, 16),
        "no-keys": (1, 16, 0, 2, 2, 16, 16),
    }

    def row(name: str, shape: tuple[int, ...], **options: Any) -> Case:
        return _case(f"contract-{name}", "contract", shape, "contract", **options)

    for size, shape in sizes.items():
        yield from _both(f"contract-{size}", "contract", shape, "contract")
    for size in ("no-queries", "no-keys"):  # lists of tiles and the tensors of masks and scores have no memory then
        yield row(f"{size}-keep-odd-bias-sink", sizes[size], mask="keep-odd", score="bias", sink=True)
        yield row(f"{size}-documents", sizes[size], mask="documents")
        yield row(f"{size}-selected-sink", sizes[size], mask="selected", sink=True)
    plain, masked, cross = (2, 67, 67, 4, 2, 16, 16), (2, 67, 67, 2, 2, 16, 16), (1, 50, 83, 4, 2, 16, 16)
    for mask in MASKS:
        if mask not in ("causal", *LARGE):
            yield row(mask, masked, mask=mask)
    crossed = ("window-8", "window-both", "window-right", "prefix", "key-range", "keep-odd", "window-or-first")
    for mask in (*crossed, "selected-causal", "selected-16"):
        yield row(f"{mask}-cross", cross, mask=mask)
    yield row("key-lengths-decode", sizes["decode"], mask="key-lengths")
    yield row("selected-more-queries-sink", sizes["more-queries"], mask="selected-causal", sink=True)
    yield row("selected-mqa-softcap", sizes["mqa"], mask="selected-causal", score="softcap-2")
    yield row("selected-mqa-bfloat16-sink", sizes["mqa"], mask="selected-causal", sink=True, dtype="bfloat16")
    yield row("selected-16-gqa-alibi", sizes["gqa"], mask="selected-16", score="alibi")
    yield row("selected-dropout-alibi-sink", cross, mask="selected", score="alibi", sink=True, dropout_p=0.3)
    yield row("selected-decode", sizes["decode"], mask="selected")
    yield row("selected-float64", cross, mask="selected-causal", dtype="float64")
    for score in SCORES:
        if score == "bias-16":  # of fp32 inputs it is "bias"
            continue
        yield row(score, plain, score=score)
        yield row(f"{score}-causal-cross", cross, score=score, mask="causal")
    for mask in ("regions", "prefix-of-each", "key-lengths", "keep-odd", "dense"):  # the batch shares the bias
        yield row(f"{mask}-bias", plain, mask=mask, score="bias")
    yield row("sink", plain, sink=True)
    yield row("sink-causal-more-queries", sizes["more-queries"], sink=True, mask="causal")
    yield row("sink-window-softcap", cross, sink=True, mask="window-8", score="softcap-2")
    yield row("dropout", plain, dropout_p=0.2)
    yield row("dropout-causal-alibi-sink", cross, dropout_p=0.5, mask="causal", score="alibi", sink=True)
    for dtype in ("bfloat16", "float16", "float64"):
        yield row(f"{dtype}-full", plain, dtype=dtype)
        yield row(f"{dtype}-causal", cross, dtype=dtype, mask="causal")
        yield row(f"{dtype}-window-alibi-sink", plain, dtype=dtype, mask="window-8", score="alibi", sink=True)
    for score in ("bias", "bias-16"):
        yield row(f"bfloat16-{score}", plain, dtype="bfloat16", score=score)
        yield row(f"bfloat16-{score}-causal-square", sizes["d128"], dtype="bfloat16", score=score, mask="causal")
    yield from _contract_packed()


def _contract_packed() -> Iterator[Case]:
    same = _equal(5, 0, 64, 1, 33)
    cross = ((5, 9), (7, 0), (0, 4), (30, 12), (1, 40))

    def row(name: str, lengths: tuple[tuple[int, int], ...], **options: Any) -> Case:
        return _packed(f"contract-packed-{name}", "contract", (4, 2, 16, 16), "contract", lengths=lengths, **options)

    yield row("full", same)
    yield row("causal", same, mask="causal")
    yield row("causal-cross", cross, mask="causal")
    yield row("window-softcap", same, mask="window-8", score="softcap-2")
    yield row("alibi-sink", cross, score="alibi", sink=True)
    yield row("dropout", same, dropout_p=0.3)
    yield row("selected", same, mask="selected")
    yield row("selected-causal-cross", cross, mask="selected-causal", sink=True)
    yield row("bfloat16-causal", same, mask="causal", dtype="bfloat16")
    for size, lengths in (("no-queries", ((0, 5), (0, 9))), ("no-keys", ((5, 0), (9, 0)))):
        yield row(f"{size}-causal-sink", lengths, mask="causal", sink=True, dtype="bfloat16")


CASES: dict[str, Case] = {}
for _row in (
    *_h200(),
    *_cpu(),
    *_cuda(),
    *_features(),
    *_masks(),
    *_blocks(),
    *_trained_biases(),
    *_demo(),
    *_exact(),
    *_contract(),
):
    if _row.name in CASES:
        raise ValueError(f"bench/cases.py: two cases are called {_row.name}")
    CASES[_row.name] = _row


def named(name: str) -> Case:
    """The case of that name. Raises ValueError naming the nearest."""
    if name in CASES:
        return CASES[name]
    from difflib import get_close_matches

    near = get_close_matches(name, CASES, 3) or [known for known in CASES if name in known][:3]
    hint = f"near it: {', '.join(near)}" if near else "`tilewise bench --list` names them"
    raise ValueError(f"no case is called {name!r}; {hint}")


def tagged(*tags: str) -> list[Case]:
    """The cases that carry every one of these tags, in the table's order. Raises ValueError for a tag nobody carries."""
    known = sorted(set().union(*(c.tags for c in CASES.values())))
    for tag in tags:
        if tag not in known:
            raise ValueError(f"no case carries the tag {tag!r}; the tags are {', '.join(known)}")
    return [c for c in CASES.values() if set(tags) <= c.tags]
