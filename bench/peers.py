"""Who is timed: tilewise's backends, eager attention, PyTorch's SDPA (by backend on CUDA), compiled FlexAttention;
FlashAttention-3 and -4 and cuDNN's own flex_attention where they are installed; and limits.

A Contestant says which cases it cannot run and why, and turns inputs into a call without arguments. Making masks,
compiling and moving data happen in `prepare`, outside what is timed, as a model does them once for all layers.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from bench import measure
from bench.cases import MASKS, SCORES, Case, Inputs
from tilewise import dispatch

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Contestant:
    """unsupported(case, device): every reason, empty when it runs. prepare(x): a call that returns o.

    context: entered around a sample of calls, so that choosing a kernel costs nothing inside the sample.
    ours: whether it is tilewise, which the error rule binds strictly (bench/check.py).
    limit: whether it computes no attention but shows a limit of the machine; nothing of it is checked.
    asked: whether it runs only where it is named.
    """

    name: str
    unsupported: Callable[[Case, str], list[str]]
    prepare: Callable[[Inputs], Call]
    version: str
    context: Callable[[], AbstractContextManager] = nullcontext
    ours: bool = False
    limit: bool = False
    asked: bool = False


# ---- eager: the formula, with its N × N matrix ----------------------------------------------------------------------


def eager_call(x: Inputs, rows: Tensor | None = None, order: int = 0) -> Call:
    """softmax(score(scale · q kᵀ)) v in x's dtype, every matrix stored; in float64 this is the oracle of the checks. What does not
    depend on q, k, v (its matrix of kept pairs) is made beforehand.

    rows: compute only these queries (not for packed inputs). The call returns o, (B, rows, Hq, Dv) or packed (total, Hq, Dv).
    order: 0 is the textbook's, differentiated by torch. Any other number shuffles queries, keys and channels, and with them
    every sum, and differentiates as every memory-saving backward must: from the o and lse that its forward kept.
    """
    if x.case.lengths:
        calls = [eager_call(part, order=order) for part in split_packed(x)]
        return lambda: torch.cat([call().squeeze(0) for call in calls])
    cut = _textbook(x, rows) if order == 0 else _shuffled(x, rows, order)
    index = _indices(x, cut.i, cut.j)
    keep = MASKS[x.case.mask].keep(x)(*index) if x.case.mask else None
    empty_rows = keep is not None and not bool(keep.any(-1).all())
    apply = SCORES[x.case.score].apply(x) if x.case.score else None
    dropped = _dropout_factor(x, cut.i, cut.j)
    group = x.case.heads_q // x.case.heads_k
    scale = 1.0 / math.sqrt(x.case.head_dim)

    def call() -> Tensor:
        q, k, v = cut.take(x.q, x.k, x.v)
        q, k, v = q.transpose(1, 2), *(t.repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
        s = (q * scale) @ k.mT
        if apply is not None:
            s = apply(s, *index)
        if keep is not None:
            s = s.masked_fill(~keep, -math.inf)
        if order:
            return cut.put_back(FromLse.apply(s, v, x.sink, dropped).transpose(1, 2))
        p = _softmax(s, x.sink, empty_rows)
        p = p if dropped is None else p * dropped
        return (p.to(v.dtype) @ v).transpose(1, 2)

    return call


@dataclass(frozen=True)
class _Cut:
    """The queries i and keys j that are computed, in their order; take: their q, k, v; put_back: o as the caller wants it."""

    i: Tensor
    j: Tensor
    take: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    put_back: Callable[[Tensor], Tensor]


def _textbook(x: Inputs, rows: Tensor | None) -> _Cut:
    i = torch.arange(x.case.seqlen_q, device=x.q.device) if rows is None else rows
    take = lambda q, k, v: (q if rows is None else q[:, rows], k, v)  # noqa: E731
    return _Cut(i, torch.arange(x.case.seqlen_k, device=x.q.device), take, lambda o: o)


def _shuffled(x: Inputs, rows: Tensor | None, order: int) -> _Cut:
    generator, whole = torch.Generator().manual_seed(order), _textbook(x, rows)
    sizes = (len(whole.i), x.case.seqlen_k, x.case.head_dim, x.case.head_dim_v)
    i, j, d, d_v = (torch.randperm(n, generator=generator).to(x.q.device) for n in sizes)
    take = lambda q, k, v: (q[:, whole.i[i]][..., d], k[:, j][..., d], v[:, j][..., d_v])  # noqa: E731
    return _Cut(whole.i[i], j, take, lambda o: o[:, i.argsort()][..., d_v.argsort()])


def _indices(x: Inputs, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, i, j shaped to broadcast over (B, H, len(i), len(j))."""
    b = torch.arange(x.first_batch, x.first_batch + x.case.batch, device=i.device)
    h = torch.arange(x.case.heads_q, device=i.device)
    return b[:, None, None, None], h[None, :, None, None], i[None, None, :, None], j[None, None, None, :]


def _softmax(s: Tensor, sink: Tensor | None, empty_rows: bool) -> Tensor:
    """Rows sum to 1, or to less beside a sink; a row without a key is 0."""
    if sink is not None:
        column = sink.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
        return torch.softmax(torch.cat([s, column], -1), -1)[..., :-1]
    if empty_rows or s.shape[-1] == 0:
        seen = (s > -math.inf).any(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:3], 1, dtype=torch.bool)
        return torch.where(seen, torch.softmax(s.masked_fill(~seen, 0.0), -1), 0.0)
    return torch.softmax(s, -1)


class FromLse(torch.autograd.Function):
    """softmax(s) v whose backward recomputes P = exp(s − lse) and O, and takes delta = rowsum(dO ∘ O), all rounded.

    The backward keeps s, v and the sink alone, so that it can be differentiated again.
    """

    @staticmethod
    def forward(ctx, s: Tensor, v: Tensor, sink: Tensor | None, dropped: Tensor | None) -> Tensor:
        ctx.save_for_backward(s, v, sink, dropped)
        return _by_lse(s, v, sink, dropped)[0]

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        s, v, sink, dropped = ctx.saved_tensors
        o, p, lse = _by_lse(s, v, sink, dropped)
        z = 1.0 if dropped is None else dropped
        delta = (do * o).sum(-1, keepdim=True)
        ds = p * ((do @ v.mT) * z - delta)
        dv = (p * z).to(v.dtype).mT @ do
        dsink = None
        if sink is not None:
            dsink = -(torch.exp(sink[None, :, None, None] - lse) * delta).sum((0, 2, 3)).to(sink.dtype)
        return ds, dv, dsink, None


def _by_lse(s: Tensor, v: Tensor, sink: Tensor | None, dropped: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """o, P before dropout, and lse."""
    wide = s.double() if s.dtype == torch.float64 else s.float()
    column = [] if sink is None else [sink.to(wide.dtype)[None, :, None, None].expand(*s.shape[:3], 1)]
    lse = torch.logsumexp(torch.cat([wide, *column], -1), -1, keepdim=True)
    p = torch.exp(wide - lse.masked_fill(lse == -math.inf, math.inf))
    kept = p if dropped is None else p * dropped
    return kept.to(v.dtype) @ v, p, lse


def _dropout_factor(x: Inputs, i: Tensor, j: Tensor) -> Tensor | None:
    """0 where a pair is dropped and 65536 / T where it is kept: the bits of docs/algorithm.md."""
    if not x.case.dropout_p or not len(i) or not len(j):
        return None
    last_batch = x.first_batch + x.case.batch
    sizes = (last_batch, x.case.heads_q, x.case.seqlen_q, x.case.seqlen_k)
    kept = tw.dropout_mask(x.dropout_seed, x.case.dropout_p, *sizes)[x.first_batch :]
    threshold = round((1.0 - x.case.dropout_p) * 65536)
    return kept[:, :, i][..., j].to(x.q.dtype) * (65536 / threshold)


def split_packed(x: Inputs) -> list[Inputs]:
    """The sequences of a packed input as unpacked inputs of batch 1 that share their memory."""
    parts, start_q, start_k = [], 0, 0
    for b, case in enumerate(x.case.sequences):
        end_q, end_k = start_q + case.seqlen_q, start_k + case.seqlen_k
        cut = {"q": x.q[None, start_q:end_q], "do": x.do[None, start_q:end_q]}
        cut |= {"k": x.k[None, start_k:end_k], "v": x.v[None, start_k:end_k]}
        parts.append(replace(x, case=case, cu_seqlens_q=None, cu_seqlens_k=None, first_batch=b, **cut))
        start_q, start_k = end_q, end_k
    return parts


EAGER_MATRICES = 3
"""N × N matrices that `eager_call` holds at once in forward and backward: p, dp and ds (measured on a CPU: 3.1)."""


def eager_bytes(case: Case) -> int:
    """Predicted bytes of eager attention's N × N matrices at their peak, forward and backward."""
    itemsize = torch.empty(0, dtype=case.torch_dtype).element_size()
    pairs = sum(c.batch * c.heads_q * c.seqlen_q * c.seqlen_k for c in case.sequences)
    return pairs * itemsize * EAGER_MATRICES


def _eager_unsupported(case: Case, device: str) -> list[str]:
    need, free = eager_bytes(case), measure.free_memory(device)
    if need <= free // 2:
        return []
    return [f"its N × N matrices would take {need / 2**30:.1f} GiB, more than half of the free {free / 2**30:.1f} GiB"]


# ---- tilewise -------------------------------------------------------------------------------------------------------


def tilewise(backend: str | None = None, name: str = "", **options: object) -> Contestant:
    """A backend of tilewise by its name, or with None the one that it chooses by itself; ``options`` of the public call."""

    def prepare(x: Inputs) -> Call:
        attention = tw.attention_varlen if x.case.lengths else tw.attention
        return partial(attention, x.q, x.k, x.v, **x.options(), **options, backend=backend)

    number = measure.versions("tilewise").get("tilewise", "checkout")
    return Contestant(
        name or backend or "tilewise",
        lambda case, device: [],
        prepare,
        f"tilewise {number}",
        ours=True,
        asked=bool(name),
    )


DETERMINISTIC = {"tilewise-deterministic": True, "tilewise-everywhere": "everywhere"}
"""What an order of its sums costs tilewise, for who asks."""


# ---- PyTorch's own --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Takes:
    """What a peer runs. No peer has sinks, and every dropout draws other bits, so that it cannot be checked.

    masks: their names, every other way than as a stored N × N matrix. last: causal aligns the last query with the last key, as ours.
    biases: a bias of pairs, to which any mask is added. module: what has to be installed.
    """

    masks: Collection[str | None] = (None, "causal")
    scores: bool = False
    biases: bool = False
    packed: bool = False
    last: bool = True
    cuda: bool = True
    half: bool = True
    module: str | None = None

    def unsupported(self, case: Case, device: str) -> list[str]:
        """Every reason that a case cannot be run."""
        biased = self.biases and case.score in BIASES
        reasons = {
            f"runs on CUDA, this is {device}": self.cuda and not device.startswith("cuda"),
            f"dtype {case.dtype}: bfloat16 or float16 only": self.half and case.dtype not in ("bfloat16", "float16"),
            f"mask {case.mask}": case.mask not in self.masks and not biased,
            "its causal aligns the first query with the first key": not self.last
            and (case.mask == "causal" and case.seqlen_q != case.seqlen_k and not biased),
            "packed sequences": case.lengths and not self.packed,
            "scores": case.score and not self.scores and not biased,
            "sinks": case.sink,
            "dropout": case.dropout_p,
            f"{self.module} is not installed": self.module and not installed(self.module),
        }
        return [why for why, holds in reasons.items() if holds]


def installed(module: str) -> bool:
    """Whether a module is there to be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


EVERY_MASK = (None, *MASKS)


BIASES = ("bias", "bias-16")


def _sdpa_prepare(x: Inputs) -> Call:
    """SDPA, causal or whole; a bias, with -inf where a mask hides a pair, is its float mask, whose sum each call makes."""
    biased = x.case.score in BIASES
    options = {"is_causal": x.case.mask == "causal" and not biased, "enable_gqa": x.case.heads_q != x.case.heads_k}
    hidden = _hidden(x) if biased and x.case.mask else None

    def call() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        if biased:
            options["attn_mask"] = x.leaves["bias"].to(q.dtype) + (0 if hidden is None else hidden)
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return call


def _hidden(x: Inputs) -> Tensor:
    """-inf for each pair that the mask hides and 0 for others, (B or 1, H or 1, Nq, Nk)."""
    i, j = (torch.arange(n, device=x.q.device) for n in (x.case.seqlen_q, x.case.seqlen_k))
    keep = MASKS[x.case.mask].keep(x)(*_indices(x, i, j))
    return torch.zeros(keep.shape, device=keep.device, dtype=x.q.dtype).masked_fill(~keep, -math.inf)


def _only(backend_name: str) -> Callable[[], AbstractContextManager]:
    """The context in which SDPA has one backend."""
    return lambda: sdpa_kernel(getattr(SDPBackend, backend_name))


# ---- FlashAttention-3 and -4, where they are installed ----------------------------------------------------------------


def _flash(name: str, module: str, what: str) -> Contestant:
    """A FlashAttention by the module whose ``flash_attn_func`` it is."""

    def prepare(x: Inputs) -> Call:
        attention, causal = importlib.import_module(module).flash_attn_func, x.case.mask == "causal"

        def call() -> Tensor:
            result = attention(x.q, x.k, x.v, causal=causal)
            return result[0] if isinstance(result, tuple) else result  # some versions return lse too

        return call

    return Contestant(name, Takes(module=module).unsupported, prepare, what)


# ---- cuEquivariance, where it is installed ------------------------------------------------------------------------------


def _triangle_unsupported(case: Case, device: str) -> list[str]:
    takes = Takes(biases=True, half=False, module="cuequivariance_torch")
    return takes.unsupported(case, device) + ["a bias alone"] * (case.mask is not None or case.score not in BIASES)


def _triangle_prepare(x: Inputs) -> Call:
    """Triangle attention: the batch is the rows, and one bias is that of all."""
    from cuequivariance_torch import triangle_attention

    def call() -> Tensor:
        q, k, v = (t.transpose(1, 2)[None] for t in (x.q, x.k, x.v))
        return triangle_attention(q, k, v, x.leaves["bias"][None])[0].transpose(1, 2)

    return call


# ---- FlexAttention ----------------------------------------------------------------------------------------------------

_FLEX_OPTIONS = {"bias": {"bwd_num_stages": 2}, "bias-16": {"bwd_num_stages": 2}}
"""By score, where FlexAttention's own tiles do not fit the chip (D 128 on an H200: 256 KB of 227 with three stages) and it raises."""

BY_HEAD = (
    *("key-lengths", "keep-odd", "dense", "prefix-of-each", "regions", "shifted-windows"),
    *("selected", "selected-causal", "selected-16"),
)
"""Masks that read b or h: FlexAttention makes a block mask of them for every batch element and head, and of others one."""


def flex_block_mask(x: Inputs) -> object:
    """FlexAttention's plan of a case's mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    shape = (x.case.batch, x.case.heads_q) if x.case.mask in BY_HEAD else (None, None)
    return create_block_mask(MASKS[x.case.mask].keep(x), *shape, x.case.seqlen_q, x.case.seqlen_k, str(x.q.device))


def _flex_prepare(x: Inputs) -> Call:
    """FlexAttention compiled for these very shapes.

    Dynamo forgets what it compiled before: past its limit of recompilations FlexAttention would silently run eager. Its block mask is
    made without compiling, which for every case took 24 s on an H200, and for blocks of 128 in 16k did not end within 110.
    """
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward is timed again and again on one graph
    flex = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    options = {"enable_gqa": x.case.heads_q != x.case.heads_k}
    if x.case.mask:
        options["block_mask"] = flex_block_mask(x)
    if x.case.score:
        options["score_mod"] = SCORES[x.case.score].apply(x)
        options["kernel_options"] = _FLEX_OPTIONS.get(x.case.score)

    def call() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        return flex(q, k, v, **options).transpose(1, 2)

    return call


# ---- cudnn.flex_attention, where it is installed ------------------------------------------------------------------------


def interval_ends(x: Inputs, rows: int = 256) -> Tensor:
    """The keys that every query keeps, as intervals [0, e0), [e1, e2) and so on of an unpacked case whose heads see the same.

    Returns int32 (1, ends, batch × seqlen_q), an odd number of ends for each query; intervals that it lacks are empty.
    """
    case, device = x.case, x.q.device
    j = torch.arange(case.seqlen_k, device=device)
    keep = MASKS[case.mask].keep(x) if case.mask else lambda b, h, i, j: (i >= 0) & (j >= 0)
    blocks = []
    for b in range(x.first_batch, x.first_batch + case.batch):
        for start in range(0, case.seqlen_q, rows):
            i = torch.arange(start, min(start + rows, case.seqlen_q), device=device)[:, None]
            kept = keep(torch.tensor(b, device=device), torch.tensor(0, device=device), i, j).expand(len(i), len(j))
            kept = F.pad(
                F.pad(kept, (1, 0), value=True), (0, 1), value=False
            )  # an interval is open before the first key
            changes = kept[:, 1:] != kept[:, :-1]
            row, end = changes.nonzero(as_tuple=True)
            place = changes.cumsum(1)[row, end] - 1
            ends = torch.full((len(i), int(changes.sum(1).max())), case.seqlen_k, device=device)
            ends[row, place] = end
            blocks.append(ends)
    width = max(ends.shape[1] for ends in blocks)
    return torch.cat([F.pad(ends, (0, width - ends.shape[1]), value=case.seqlen_k) for ends in blocks]).T[None].int()


def _cudnn_flex_prepare(x: Inputs) -> Call:
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    parts = [interval_ends(part) for part in (split_packed(x) if x.case.lengths else [x])]
    width = max(ends.shape[1] for ends in parts)
    fill = x.case.seqlen_k
    ends = torch.cat([F.pad(part, (0, 0, 0, width - part.shape[1]), value=fill) for part in parts], 2).contiguous()
    packed = {}
    if x.case.lengths:
        packed = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
        packed |= {"max_seqlen_q": x.case.seqlen_q, "max_seqlen_k": x.case.seqlen_k}
    plan = create_mask_plan(ends, x.q, x.k, x.v, build_backward=x.case.backward, **packed)
    return lambda: flex_attn_func(x.q, x.k, x.v, mask_plan=plan)


# ---- limits ---------------------------------------------------------------------------------------------------------


def _read_unsupported(case: Case, device: str) -> list[str]:
    return [] if "decode" in case.tags else ["reading K and V once bounds decoding alone"]


def _read_prepare(x: Inputs) -> Call:
    """Reads every byte of K and V once, on all threads: their sums, as fp32 whatever they hold."""
    k, v = (t.detach().reshape(-1).view(torch.float32) for t in (x.k, x.v))
    return lambda: k.sum() + v.sum()


def all_contestants() -> dict[str, Contestant]:
    """Everyone who can be asked to run, by name. Every backend of tilewise is one of them."""
    torch_version = f"torch {torch.__version__}"
    cudnn_version = f"cuDNN {torch.backends.cudnn.version()}, {torch_version}"
    anywhere, on_cuda = Takes(last=False, cuda=False, half=False, biases=True), Takes(last=False).unsupported
    flex = Takes(masks=EVERY_MASK, scores=True, half=False).unsupported  # compiled with its backward only on CUDA
    intervals = [mask for mask in EVERY_MASK if mask not in ("keep-odd", "dense")]  # which have too many a row
    cudnn_flex = Takes(masks=intervals, packed=True, module="cudnn.flex_attention").unsupported
    peers = (
        Contestant("eager", _eager_unsupported, eager_call, torch_version),
        Contestant("sdpa", anywhere.unsupported, _sdpa_prepare, torch_version),
        Contestant("fa2", on_cuda, _sdpa_prepare, f"SDPA flash, {torch_version}", _only("FLASH_ATTENTION")),
        _flash("fa3", "flash_attn_interface", "FlashAttention-3"),
        _flash("fa4", "flash_attn.cute.interface", "FlashAttention-4"),
        Contestant("cudnn", on_cuda, _sdpa_prepare, cudnn_version, _only("CUDNN_ATTENTION")),
        Contestant("flex", flex, _flex_prepare, torch_version),
        Contestant("cudnn-flex", cudnn_flex, _cudnn_flex_prepare, "cudnn.flex_attention"),
        Contestant("cuequivariance", _triangle_unsupported, _triangle_prepare, "cuequivariance_torch"),
        Contestant("read", _read_unsupported, _read_prepare, torch_version, limit=True),
    )
    ours = [tilewise(), *(tilewise(backend.name) for backend in dispatch.BACKENDS)]  # without the oracle
    ours += [tilewise(name=name, deterministic=how) for name, how in DETERMINISTIC.items()]
    return {c.name: c for c in (*ours, *peers)}
