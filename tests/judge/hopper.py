"""The Hopper backend's kernels: each one compiled ahead of time, checked by calls of its kind, remembered by its program."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import tilewise as tw
from bench.testing import HIDING, Call, call, of_case, paged_call, qkv
from tests.judge.subject import Kernel, Named, Scale, Subject, in_16_bits
from tilewise import pages
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import PLAIN
from tilewise.backends.hopper.decoding import config as decoding_config
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.host import kernel_files, proven
from tilewise.backends.hopper.kernels import AnyConfig
from tilewise.backends.hopper.latent import config as latent_config
from tilewise.backends.hopper.latent import gradients_config
from tilewise.backends.hopper.latent.config import LatentConfig
from tilewise.backends.hopper.latent.gradients_config import GradientsConfig
from tilewise.backends.hopper.latent.selected import own_gradients

PROBES = (
    "forward_bf16_d128_upper_128", "forward_bf16_d64_full_192", "forward_bf16_d256_band_128",
    "forward_bf16_d128_upper_split", "decoding_bf16_d128", "forward_bf16_d128_upper_packed",
    "backward_bf16_d128_full", "backward_bf16_d64_upper", "backward_bf16_d256_band", "backward_bf16_d128_upper_packed",
)  # fmt: skip
"""How the names of those begin that are checked first, and that compute-sanitizer looks at."""

# ---- the calls that kernels are checked by --------------------------------------------------------------------------

FORM_OPTIONS = {
    "full": [{}, {"mask": tw.key_range(37, 170)}],
    "upper": [{"causal": True}, {"mask": tw.window(None, 5)}, {"mask": tw.causal() & tw.key_lengths(150)}],
    "band": [{"mask": tw.window(100, 0)}, {"mask": tw.window(70, 33)}, {"mask": tw.window(20)}],
    "rows": [{"mask": "documents"}, {"mask": "lengths"}, {"mask": "prefix"}],
    "bits": [{"mask": "pairs"}, {"mask": "blocks"}, {"mask": "sinks"}, {"mask": "heads"}],
}
PLACED_OPTIONS = {  # the same, where a kernel has to know a key's place among all: what a band leaves out comes as ends of rows
    "full": [{}],
    "upper": [{"causal": True}, {"mask": tw.window(None, 5)}],
    "rows": [*FORM_OPTIONS["rows"], {"mask": tw.window(100, 0)}, {"mask": tw.key_range(37, 170)}],
}
SHAPES = [  # batch, seqlen_q, seqlen_k, heads_q, heads_k: odd lengths, empty rows, more CTAs than tiles and fewer
    (1, 1, 1, 1, 1),
    (2, 63, 129, 2, 1),
    (1, 1000, 1000, 2, 2),
    (2, 300, 700, 4, 2),
    (1, 515, 200, 3, 1),
    (3, 129, 1, 2, 2),
    (1, 1, 3000, 8, 2),
    (4, 192, 640, 40, 8),
    (2, 1, 3000, 16, 2),  # few queries of many heads
    (1, 5, 700, 6, 2),
    (1, 37, 130, 12, 1),
    (1, 1, 20000, 40, 1),
    (1, 1, 20000, 8, 1),  # many keys, for chunks
    (1, 300, 6000, 2, 2),
    (1, 2000, 4096, 1, 1),
]
PACKED = [  # lengths of q and k; rows past the last sequence
    ([(70, 300), (1, 5), (0, 9), (130, 0), (64, 64)], 37),
    ([(1000, 1000), (33, 2000), (515, 200)], 0),
    ([(3, 11)] * 9, 3),
]


PAGED_OPTIONS = {
    "upper": [{"causal": True}, {"mask": tw.window(None, 5)}, {}],
    "band": [{"mask": tw.window(100, 0)}, {"mask": tw.window(70, 33)}, {"mask": tw.window(700)}],
}
PAGED = [  # page size in parts of a block, lengths of q and k, rows past the last sequence: none and even q come unpacked
    (1, [(70, 300), (1, 5), (0, 9), (130, 0), (64, 64), (65, 63), (33, 4000)], 37),
    (2, [(1000, 1000), (33, 2000), (515, 200)], 5),
    (1, [(300, 1), (300, 17), (300, 65), (300, 127), (300, 128), (300, 129), (300, 3000)], 0),
    (4, [(512, 9000)], 0),
]


class Sizes(NamedTuple):
    """The sizes of the calls that kernels are checked by, and where these are made."""

    shapes: Sequence[tuple[int, ...]] = SHAPES
    packed: Sequence[tuple] = PACKED
    paged: Sequence[tuple] = PAGED
    device: str = "cuda"


class Kind(NamedTuple):
    """The properties that kernels which take the same calls have in common."""

    dims: tuple[int, int]
    dtype: str
    form: str
    score: str
    packed: bool
    paged: int = 0
    dropout: bool = False
    latent: bool = False
    e4m3: bool = False  # whether a latent cache is in 8 bits
    decoding: int = 0  # the rows of a decoding kernel
    trained: bool = False
    biased_backward: bool = False  # whether a backward with a bias by pair takes the calls
    selected: bool = False  # whether each query has a list of keys

    @classmethod
    def of(cls, x: Config | Backward) -> "Kind":
        t = x.keys if isinstance(x, Backward) else x.tiles
        latent = isinstance(x, (LatentConfig, GradientsConfig))
        return cls(
            t.dims if isinstance(x, Backward) else (t.width, t.width_v),
            x.dtype,
            x.form,
            x.score,
            x.packed,
            latent_config.KEYS if latent else getattr(x, "paged", 0),
            x.dropout,
            latent,
            isinstance(x, LatentConfig) and x.e4m3,
            t.rows if isinstance(x, DecodingConfig) else 0,
            x.trained,
            isinstance(x, Backward) and x.score == "bias",
            getattr(x, "selected", False),
        )

    @property
    def options(self) -> list[dict]:
        """The options of the calls of this kind, masks of tensors by their names."""
        if self.score == "alibi":  # the bias of other masks is not linear, or comes as ends of rows
            return [{"causal": True}]
        if self.score == "table":  # other masks' ends of rows come as tensors, or cut keys off
            return [{"causal": True} if self.form == "upper" else {}]
        if self.packed and self.dropout:  # one kernel serves both
            return [*PLACED_OPTIONS["upper"], *PLACED_OPTIONS["full"]]
        if self.score == "bias" and self.form in PLACED_OPTIONS:
            return PLACED_OPTIONS[self.form]
        return (PLACED_OPTIONS if self.dropout else FORM_OPTIONS)[self.form]

    def score_options(self, q: Tensor, keys: int) -> dict:
        """The score and dropout of a call of this kind with these queries and so many keys."""
        found = {"score": tw.softcap(3.0)} if self.score == "softcap" else {}
        if self.score == "alibi":
            slopes = 0.5 ** torch.linspace(0, 8, q.shape[-2], device=q.device)
            found = {"score": tw.alibi(slopes.requires_grad_(self.trained))}
        if self.score == "table":  # of which a row of 500 keys reads both ends
            table = (
                torch.linspace(-4, 4, 70 * q.shape[-2], device=q.device).cos().view(q.shape[-2], 70).requires_grad_()
            )
            found = {"score": lambda s, b, h, i, j: s + table[h, (i - j).clamp(-30, 39) + 30]}
        if self.score == "bias":
            found = {"score": tw.bias(pair_bias(q, keys, self.trained, least=not self.biased_backward))}
        return found | ({"dropout_p": 0.2, "dropout_seed": 2**62 + 12345} if self.dropout else {})


def pair_bias(q: Tensor, keys: int, wanted: bool = False, least: bool = True) -> Tensor:
    """Biases of all pairs, or of those of one head, in q's dtype: some -inf, and a row of nothing else.

    ``least``: in bf16 a row of the least number too, whose P no lse in fp32 tells. ``wanted``: with a gradient.
    """
    batch, rows, heads = q.shape[:3] if wanted or q.shape[2] < 3 else (1, q.shape[1], 1)
    apart = -(-keys // 8) * 8  # elements: rows begin at multiples of 16 bytes
    bias = torch.linspace(-4, 4, batch * heads * rows * apart, device=q.device).mul(1e5).cos().mul(3).to(q.dtype)
    bias = bias.view(batch, heads, rows, apart)[..., :keys]
    bias[:, :, ::3, 5:90], bias[:, :, 7:8] = -torch.inf, -torch.inf
    bias[:, :, 9:10] = torch.finfo(q.dtype).min if least and q.dtype == torch.bfloat16 else 1.0
    return bias.requires_grad_(wanted)


def options_of(kind: Kind, shape: tuple[int, ...], device: str) -> list[dict]:
    """The options of a kind; masks of tensors are made for the shape."""
    batch, nq, nk = shape[:3]
    spread = torch.linspace(0, nk, batch, device=device).int()
    rows = {
        "documents": lambda: tw.documents(torch.arange(nk, device=device).expand(batch, -1) // 77),
        "lengths": lambda: tw.key_lengths(spread),
        "prefix": lambda: tw.prefix(spread),
        "pairs": lambda: tw.keep(lambda b, h, i, j: (i * 79 + j * 104729) % 13 > 4),
        "blocks": lambda: tw.block_sparse(
            torch.rand(batch, 1, -(-nq // 128), -(-nk // 128), device=device) < 0.4, 128, 128
        ),
        "sinks": lambda: tw.causal() & (tw.window(left=70) | tw.key_range(0, spread)),
        "heads": lambda: tw.keep(lambda b, h, i, j: (i // 50 + j // 70 + h) % 3 == 0),
    }
    return [{k: rows[v]() if isinstance(v, str) else v for k, v in options.items()} for options in kind.options]


def check_calls(x: Config | Backward, sizes: Sizes | None = None) -> Named:
    """Named calls of a kernel's kind: its widths, then smaller ones, strides that need a copy, sinks, large scores.

    Every second one of a backward comes again, deterministic, where all kernels of its kind can be.
    """
    sizes, kind = sizes or Sizes(), Kind.of(x)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind.dtype]
    generator = torch.Generator(sizes.device).manual_seed(1)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=sizes.device).to(dtype)

    if kind.selected:
        each = selected_calls(kind, new)
        own = isinstance(x, GradientsConfig)
        yield from ((label, c if own else c.forward_only()) for label, c in each if not own or own_gradients(c.p))
        return
    calls = paged_calls if kind.paged else packed_calls if kind.packed else unpacked_calls
    ordered = isinstance(x, Backward) and x.form in ("upper", "band", "rows") and not x.trained
    for n, (label, c) in enumerate((decoding_calls if kind.decoding else calls)(kind, new, sizes)):
        yield label, c
        if ordered and n % 2:
            spec = replace(c.p.spec, deterministic=True)
            yield f"{label}-deterministic", replace(c, p=replace(c.p, spec=spec))


def unpacked_calls(kind: Kind, new: Callable[..., Tensor], sizes: Sizes) -> Named:
    (width, width_v), device = kind.dims, sizes.device

    def made(shape: tuple[int, ...], d: int, dv: int, **options: object) -> Call:
        b, nq, nk, hq, hk = shape
        # Beside one key dS is 0 but for O's rounding, and eager attention does not read O: a factor of 2 leaves nothing to round.
        options |= {"dropout_p": 0.5} if kind.dropout and nk == 1 else {}
        q = new(b, nq, hq, d)
        return call(q, new(b, nk, hk, d), new(b, nk, hk, dv), **{**kind.score_options(q, nk), **options})

    def first(*shape: int) -> dict:
        return options_of(kind, shape, device)[0]

    # One query sees all keys, one head's slope is read as a number, as are biases of one key: such calls have other kernels.
    least = 2 if kind.score in ("alibi", "table", "bias") else 1
    fitting = (s for s in sizes.shapes if min(s[1], s[3], s[2] + (kind.score != "bias")) >= least)
    for n, shape in enumerate(fitting):
        for m, options in enumerate(options_of(kind, shape, device)):
            if m == n % len(kind.options) or n in (2, 3):
                yield f"{shape}-{m}", made(shape, width, width_v, **options)
    yield "narrow", made((1, 200, 333, 2, 1), width - 24, max(8, width_v - 40), **first(1, 200, 333))
    sink = torch.randn(4, device=device)
    yield "sink", made((2, 200, 333, 4, 2), width, width_v, sink=sink, **first(2, 200, 333))
    yield "large", made((1, 200, 900, 2, 2), width, width_v, softmax_scale=4.0, **first(1, 200, 900))
    lengths = ((200, width), (333, width), (333, width_v))
    q, k, v = (new(1, 2, n, d).transpose(1, 2) for n, d in lengths)
    yield "strided", call(q, k, v, **kind.score_options(q, 333), **first(1, 200, 333))
    odd = [torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]] for x in (q, k, v)]
    yield "unaligned", call(*odd, **kind.score_options(q, 333), **first(1, 200, 333))


# Batch, queries, keys, query heads, entries of a list, and keys of an entry.
SELECTED = (
    (2, 150, 400, 16, 40, 1),
    (1, 70, 300, 64, 9, 8),
    (1, 200, 200, 3, 20, 1),
    (2, 33, 500, 80, 130, 1),
    (1, 1, 900, 128, 200, 4),
)


def selected_calls(kind: Kind, new: Callable[..., Tensor]) -> Named:
    """Lists in which some entries stand twice and others name no key, beside keys of NaN that no list names."""
    width, width_v = kind.dims
    for n, (batch, rows, keys, heads, entries, block) in enumerate(SELECTED):
        q, k = new(batch, rows, heads, width), new(batch, keys, 1, width)
        v = k[..., :width_v] if kind.latent else new(batch, keys, 1, width_v)
        named = keys // block - 1
        k[:, named * block :], v[:, named * block :] = torch.nan, torch.nan
        places = torch.arange(batch * rows * entries, device=q.device).mul(7919).remainder(named).int()
        places = places.view(batch, 1, rows, entries)
        places[..., 1], places[..., 2::7] = places[..., 0], -1
        mask = tw.selected(places, block) if n % 2 else tw.causal() & tw.selected(places, block)
        sink = torch.randn(heads, device=q.device) if n == 1 else None
        yield f"selected-{n}", call(q, k, v, mask=mask, sink=sink)


def packed_calls(kind: Kind, new: Callable[..., Tensor], sizes: Sizes) -> Named:
    """Sequences beside others of NaN, and rows of NaN past the last."""
    (width, width_v), device = kind.dims, sizes.device
    for n, (lengths, rest) in enumerate(sizes.packed):
        cu_q, cu_k = (torch.tensor([0, *x], device=device).cumsum(0).int() for x in zip(*lengths, strict=True))
        last_q, last_k = int(cu_q[-1]), int(cu_k[-1])
        q, k, v = (new(last_q + rest, 4, width), *(new(last_k + rest, 2, d) for d in (width, width_v)))
        q[last_q:], k[last_k:], v[last_k:] = (torch.nan,) * 3
        for m, options in enumerate(kind.options):
            sink = torch.randn(4, device=device) if (n + m) % 2 else None
            c = call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sink=sink, **kind.score_options(q, 0), **options)
            c.do[last_q:] = torch.nan
            yield f"packed-{n}-{m}", c


def paged_calls(kind: Kind, new: Callable[..., Tensor], sizes: Sizes) -> Named:
    """Sequences in shuffled pages, with NaN wherever no key lies, and numbers of no page behind a sequence's last one."""
    (width, width_v), device = kind.dims, sizes.device
    for n, (parts, lengths, rest) in enumerate(sizes.paged):
        q_lengths, k_lengths = zip(*lengths, strict=True)
        even = len(set(q_lengths)) == 1 and not rest
        rows = (len(lengths), q_lengths[0]) if even else (sum(q_lengths) + rest,)
        cu_q = None if even else torch.tensor([0, *q_lengths], device=device).cumsum(0).int()
        forms = PAGED_OPTIONS if kind.latent else (kind.form,)
        for m, options in enumerate(options for form in forms for options in PAGED_OPTIONS[form]):
            # The second call of a kind is narrower, with heads before rows.
            d, dv = (width, width_v) if m != 1 or kind.latent else (width - 24, width_v - 40)
            q, cache = new(*rows, 4, d), cache_of(new, parts * kind.paged, k_lengths, (2, d, dv), m == 1)
            if kind.latent:
                cache = latent_cache(cache, dv, kind.e4m3)
            if not even:
                q[sum(q_lengths) :] = torch.nan
            sink = torch.randn(4, device=device) if m % 2 else None
            yield (
                f"paged-{n}-{m}",
                paged_call(q, cache, cu_seqlens_q=cu_q, sink=sink, **kind.score_options(q, 0), **options),
            )


# By the rows of the kernel: heads, key heads and queries of a sequence, and the mask.
DECODING = {
    8: [((4, 2, 1), {"causal": True}), ((8, 1, 1), {"mask": tw.window(70, 0)}), ((3, 3, 8), {}), ((14, 2, 1), {})],
    16: [((16, 1, 1), {}), ((10, 2, 3), {"mask": tw.window(70, 1)}), ((8, 2, 4), {"causal": True}), ((9, 1, 1), {})],
    64: [((33, 1, 1), {}), ((10, 2, 12), {"mask": tw.window(70, 1)}), ((8, 2, 16), {"causal": True}), ((20, 1, 2), {})],
}


def decoding_calls(kind: Kind, new: Callable[..., Tensor], sizes: Sizes) -> Named:
    """A few queries for each of the sequences of :func:`paged_calls`, over pages; and over dense keys, in which heads may come first.

    Every second call is deterministic, by segments of keys instead of even shares, and some have a head dim below the kernel's width.
    """
    width = kind.dims[0]
    for n, (parts, lengths, _) in enumerate(sizes.paged):
        keys = [length for _, length in lengths]
        for m, ((heads, heads_k, rows), options) in enumerate(DECODING[kind.decoding]):
            d = width - 24 if m == 2 else width
            q, cache = new(len(keys), rows, heads, d), cache_of(new, parts * kind.paged, keys, (heads_k, d, d), m == 1)
            sink = torch.randn(heads, device=sizes.device) if (n + m) % 2 else None
            options = {**kind.score_options(q, 0), "deterministic": n % 2 == 1, **options}
            yield f"decoding-{n}-{m}", paged_call(q, cache, sink=sink, **options)
    if kind.paged != decoding_config.BOX_ROWS[0]:  # dense keys come in the largest boxes
        return
    for n, (batch, keys) in enumerate(((3, 1), (1, 300), (5, 1000), (40, 65))):
        d = width - 24 if n == 2 else width
        q, k, v = new(batch, kind.decoding // 4, 8, d), *(new(batch, 2, keys, d).transpose(1, 2) for _ in range(2))
        options = {**kind.score_options(q, 0), "deterministic": n % 2 == 1}
        yield f"dense-{n}", call(q, k, v, mask=tw.window(70, 0), **options).forward_only()
        yield f"dense-{n}-rows", call(q, k.contiguous(), v.contiguous(), causal=True, **options).forward_only()
        # Keys whose ends are tensors, of one query a sequence; what nobody sees is NaN.
        first = torch.arange(batch, device=sizes.device) * 7 % keys
        position = torch.arange(keys, device=sizes.device)
        unseen = ((position < first[:, None]) | (position >= keys - 1)).view(batch, keys, 1, 1)
        k, v = (x.masked_fill(unseen, torch.nan) for x in (k, v))
        yield f"dense-{n}-ends", call(q[:, :1], k, v, mask=tw.key_range(first, keys - 1), **options).forward_only()


def latent_cache(cache: tw.PagedCache, columns: int, e4m3: bool) -> tw.PagedCache:
    """The cache with v as the first columns of k; with ``e4m3`` in 8 bits, with a scale for each head."""
    k = cache.k_pages
    if not e4m3:
        return cache._replace(v_pages=k[..., :columns])
    scale = torch.linspace(1 / 128, 1 / 32, k.shape[2], device=k.device)
    k = pages.quantised(k, torch.tensor(1 / 64, device=k.device))
    return tw.paged(k, k[..., :columns], cache.block_table, cache.seqlens_k, k_scale=scale, v_scale=scale)


def cache_of(
    new: Callable[..., Tensor],
    page_size: int,
    lengths: Sequence[int],
    sizes: tuple[int, int, int],
    heads_first: bool = False,
) -> tw.PagedCache:
    """Sequences of these lengths in shuffled pages; ``sizes`` are heads and the head dims of k and v.

    Where no key lies there is NaN; entries of the table behind a sequence's last page are no pages of the pool.
    """
    heads, *dims = sizes
    most = max(-(-length // page_size) for length in lengths) + 1
    count = len(lengths) * most + 3
    shape = (count, heads, page_size) if heads_first else (count, page_size, heads)
    pools = [new(*shape, d) for d in dims]
    device = pools[0].device
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).to(device)
    table = order[: len(lengths) * most].view(-1, most).int()
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    position = torch.arange(most * page_size, device=device).view(most, page_size)
    empty = torch.ones(count, page_size, dtype=torch.bool, device=device)
    empty[table.long()] = position >= ends.view(-1, 1, 1)
    pools = [x.transpose(1, 2) if heads_first else x for x in pools]
    for x in pools:
        x.masked_fill_(empty.view(count, page_size, 1, 1), torch.nan)
    unused = position[:, 0] >= ends.unsqueeze(-1)
    return tw.paged(*pools, table.where(~unused, 2**30), ends)


# ---- the kernels ----------------------------------------------------------------------------------------------------


def every() -> list[AnyConfig]:
    """All configurations that are shipped or candidates."""
    forwards = [*config.shipped(), *config.candidates(), *latent_config.shipped(), *decoding_config.shipped()]
    return [*forwards, *backward_config.shipped(), *backward_config.candidates(), *gradients_config.shipped()]


def kernel_of(x: AnyConfig, program: str = "", cubin: str = "") -> Kernel:
    """A configuration as a kernel to be checked."""
    back, own = isinstance(x, Backward), isinstance(x, GradientsConfig)
    loose = {"dk", "dv"} if own else {"dq"} if back and x.keys.sums_dq else ()
    return Kernel(
        name=x.name,
        direction="backward" if back or own else "forward",
        kind=Kind.of(x),
        backend=partial(Hopper, forward_of(x), backward=x) if back else Hopper if own else partial(Hopper, x),
        calls=partial(check_calls, x),
        program=program,
        cubin=cubin,
        loose=frozenset(loose),
    )


def forward_of(x: Backward) -> Config | None:
    """The forward that a backward is checked beside: a table's own, or a bias', which calls of few queries do not take; None: the
    chosen one."""
    kind = Kind.of(x)._replace(trained=False, biased_backward=False)
    return next(c for c in config.shipped() if Kind.of(c) == kind) if x.score in ("table", "bias") else None


class HopperSubject(Subject):
    """Kernels compiled ahead of time; `make kernels-hopper CANDIDATES=1` builds them where there is the DSL."""

    probes = PROBES

    def __init__(self, scale: Scale):
        super().__init__("hopper", scale)

    def kernels(self) -> list[Kernel]:
        index = kernel_files.index()
        built = {x.name: x for x in every() if x.name in index}
        ranked = sorted(
            built.values(), key=lambda x: (not x.name.startswith(PROBES), isinstance(x, Backward), Kind.of(x))
        )
        files = {x.name: kernel_files.folder() / kernel_files.file_name(x.name) for x in ranked}
        return [kernel_of(x, index[x.name]["program"], proven.cubin_hash(files[x.name])) for x in ranked]

    def waiting(self) -> list[Kernel]:
        kernels = {kernel.name: kernel for kernel in self.kernels()}
        return [kernels[name] for name in proven.waiting({name: x.program for name, x in kernels.items()})]

    def prove(self, right: list[dict]) -> str:
        found = {r["contestant"]: proven.Proof(r["program"], r["cubin"], r["of"]) for r in right}
        return f"{proven.PROVEN.name}: {proven.add(found)} kernels"

    def contract(self) -> Named:
        """The contract in 16 bits; the backend has no other."""
        for case in map(in_16_bits, self.scale.contract):
            if case.dtype != "float64":
                c = of_case(case, self.device)
                yield case.name, next((x for x in _wishes(c) if not Hopper().refused(x.p)), c)

    def build(self) -> int:
        """Compiles what neither the package nor its folder of kernels has; forwards that split keys too: a GPU has more cores."""
        from tilewise.backends.hopper.host import aot

        needed, scale = {}, self.scale
        here = [of_case(case) for case in self.featured()]
        here += [of_case(in_16_bits(name)) for name in (*scale.contract, *scale.features)]
        here += [call(*(x.bfloat16() for x in qkv()), mask=mask()) for mask in HIDING.values()]
        wished = (next((x for x in _wishes(c) if not Hopper().refused(x.p)), None) for c in here)
        for c in filter(None, wished):
            for problem in (c.p, replace(c.p, spec=replace(c.p.spec, deterministic=True))):
                needed |= {x.name: x for x in _wanted(problem) if not kernel_files.built(x)}
        rows = aot.build_all(list(needed.values()), kernel_files.folder(), 1)
        return sum(bool(rows[name]["faults"]) for name in needed)


def _wishes(c: Call) -> Iterator[Call]:
    """The call with fewer and fewer gradients."""
    yield from (c, c.with_constant_scores(), c.forward_only())


def _wanted(problem) -> list[Config | Backward]:
    """The kernels of a problem, and its forward with split keys where that is not shipped."""
    forward, *rest = Hopper().configs(problem)
    split = (
        [replace(forward, split=True)] if forward.traced != PLAIN and forward.of_numbers and not forward.packed else []
    )
    return [forward, *split, *rest]
