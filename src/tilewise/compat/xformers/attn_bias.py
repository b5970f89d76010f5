"""xformers' bias classes, by their names, fields and constructors: blocks of queries and keys, and a band within each.

Each class says which keys a query sees by a :class:`Band` in :data:`BANDS`, by the class's *name*: objects of the real xformers are
read by the same table. Keys of the padded and gappy classes lie in slots of which only the first ``seqlen`` rows are in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import tilewise as tw


@dataclass(frozen=True)
class Band:
    """Query i of a block sees its keys ``place - left <= j <= place + right``; None is unbounded.

    Attributes:
        from_last: place is ``i + keys - queries`` (queries and keys are aligned at the last), else ``i`` (at the first).
    """

    left: int | None = None
    right: int | None = None
    from_last: bool = True

    def mask(self, equal: bool) -> tw.Mask | None:
        """Return the band as a mask. ``equal``: every block has as many keys as queries, so that both alignments are one."""
        if self.left is None and self.right is None:
            return None
        return tw.window(self.left, self.right, align="last" if self.from_last or equal else "first")

    def pairs(self, queries: int, keys: int) -> Tensor:
        """Return the pairs that are kept, bool ``(queries, keys)``."""
        j, i = (torch.arange(n, device="cpu") for n in (keys, queries))
        distance = j - i.view(-1, 1) - (keys - queries if self.from_last else 0)
        kept = torch.ones_like(distance, dtype=torch.bool)
        kept = kept if self.left is None else kept & (distance >= -self.left)
        return kept if self.right is None else kept & (distance <= self.right)


BANDS: dict[str, Callable[[object], Band]] = {
    "LowerTriangularMask": lambda bias: Band(None, 0, from_last=False),
    "LowerTriangularMaskWithTensorBias": lambda bias: Band(None, 0, from_last=False),
    "LowerTriangularFromBottomRightMask": lambda bias: Band(None, 0),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda bias: Band(bias._window_size - 1, 0),
    "LocalAttentionFromBottomRightMask": lambda bias: Band(bias.window_left, bias.window_right),
    "BlockDiagonalMask": lambda bias: Band(),
    "BlockDiagonalCausalMask": lambda bias: Band(None, 0, from_last=False),
    "BlockDiagonalCausalFromBottomRightMask": lambda bias: Band(None, 0),
    "BlockDiagonalCausalLocalAttentionMask": lambda bias: Band(bias._window_size - 1, 0, from_last=False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda bias: Band(bias._window_size - 1, 0),
    "BlockDiagonalPaddedKeysMask": lambda bias: Band(),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": lambda bias: Band(None, 0),
    "BlockDiagonalLocalAttentionPaddedKeysMask": lambda bias: Band(bias.window_left, bias.window_right),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": lambda bias: Band(bias._window_size - 1, 0),
    "BlockDiagonalGappyKeysMask": lambda bias: Band(),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": lambda bias: Band(None, 0),
}


def dense_part(bias: object) -> Tensor | None:
    """Return the tensor that a bias of a class adds to the scores, as this module and the real xformers keep it."""
    if type(bias).__name__ != "LowerTriangularMaskWithTensorBias":
        return None
    return bias._bias if hasattr(bias, "_bias") else bias._subtensor


class AttentionBias:
    """The base of what ``attn_bias`` may be besides a tensor."""

    def to(self, device: torch.device | str) -> AttentionBias:
        return self

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the matrix that this bias stands for, 0 and -inf, expanded to ``shape (..., queries, keys)``; for tests."""
        kept = torch.zeros(*shape[-2:], dtype=torch.bool, device="cpu")
        band = BANDS[type(self).__name__](self)
        for (q0, q1), (k0, k1) in self._blocks(*shape[-2:]):
            kept[q0:q1, k0:k1] = band.pairs(q1 - q0, k1 - k0)
        matrix = torch.zeros_like(kept, dtype=dtype).masked_fill(~kept, -torch.inf)
        return matrix.to(device).expand(*shape)

    def _blocks(self, queries: int, keys: int) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        return [((0, queries), (0, keys))]


# -- Bands of one whole matrix ---------------------------------------------------------------------------------------


class LowerTriangularMask(AttentionBias):
    """Query i sees keys ``j <= i``, also where the lengths differ."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """:class:`LowerTriangularMask` and a tensor ``(batch, heads, queries, keys)`` that is added to the scores."""

    def __init__(self, bias: Tensor):
        self._bias = bias

    def materialize(self, shape, dtype=torch.float32, device="cpu") -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias.to(device)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, aligned at the last query and key."""

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal, and of the keys before a query the last ``_window_size``, its own among them."""

    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Keeps from ``window_left`` keys before a query's place to ``window_right`` after it."""

    window_left: int
    window_right: int


# -- Blocks ----------------------------------------------------------------------------------------------------------


@dataclass
class _SeqLenInfo:
    """The starts of blocks in a dimension: ``seqstart``, int32 ``(blocks + 1,)``, and the same as a list."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: torch.device | str | None = None) -> _SeqLenInfo:
        lengths = [int(n) for n in seqlens]
        starts = list(itertools.accumulate(lengths, initial=0))
        seqstart = torch.tensor(starts, dtype=torch.int32, device=device)
        return cls(seqstart, max(lengths, default=-1), min(lengths, default=-1), starts)

    def to(self, device: torch.device | str) -> _SeqLenInfo:
        return type(self)(**vars(self) | {n: x.to(device) for n, x in vars(self).items() if isinstance(x, Tensor)})

    def intervals(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.seqstart_py))

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Return the blocks of ``x (1, total, ...)``, as many in each tensor as ``batch_sizes`` says: ``(batch, seqlen, ...)``."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(f"split takes (1, {self.seqstart_py[-1]}, ...), got {tuple(x.shape)}")
        parts, first = [], 0
        for size in [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else batch_sizes:
            rows = slice(self.seqstart_py[first], self.seqstart_py[first + size])
            parts.append(x[0, rows].unflatten(0, (size, -1)))
            first += size
        return parts


@dataclass
class _SlotInfo(_SeqLenInfo):
    """Blocks with room: ``seqlen`` rows from the start of each are in use. There may be gaps between them, and blocks may share rows."""

    seqlen: Tensor
    seqlen_py: list[int]

    @classmethod
    def of(cls, starts: Sequence[int], seqlens: Sequence[int], device: torch.device | str | None) -> _SlotInfo:
        starts, lengths = [int(n) for n in starts], [int(n) for n in seqlens]
        if len(starts) != len(lengths) + 1 or any(at + n > starts[-1] for at, n in zip(starts, lengths, strict=False)):
            raise ValueError(f"keys of lengths {lengths} do not fit into slots that start at {starts}")
        tensors = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lengths))
        seqstart, seqlen = tensors
        return cls(seqstart, max(lengths, default=-1), min(lengths, default=-1), starts, seqlen, lengths)

    def intervals(self) -> list[tuple[int, int]]:
        return [(start, start + n) for start, n in zip(self.seqstart_py, self.seqlen_py, strict=False)]


@dataclass
class _Blocks(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def to(self, device: torch.device | str) -> _Blocks:
        infos = {"q_seqinfo": self.q_seqinfo.to(device), "k_seqinfo": self.k_seqinfo.to(device)}
        return type(self)(**vars(self) | infos)

    def _blocks(self, queries: int, keys: int) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        ends = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if (queries, keys) != ends:
            raise ValueError(f"the blocks are of {ends[0]} queries and {ends[1]} keys, got {queries} and {keys}")
        return zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)


@dataclass
class BlockDiagonalMask(_Blocks):
    """Query block n sees key block n: sequences packed into a batch of one."""

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> BlockDiagonalMask:
        q_info = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        return cls(q_info, q_info if same else _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """Return the mask of tensors ``(batch, seqlen, ...)`` and their rows one after another, ``(1, total, ...)``."""
        bias, packed, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        return bias, packed

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple[BlockDiagonalMask, Tensor, Tensor, Tensor | None]:
        lengths = [[x.shape[1] for x in tensors for _ in range(x.shape[0])] for tensors in (tensors_q, tensors_k)]
        bias = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors_q]
        q, k, v = (x and torch.cat([part.flatten(0, 1) for part in x])[None] for x in (tensors_q, tensors_k, tensors_v))
        return bias, q, k, v

    def split(self, tensor: Tensor) -> list[Tensor]:
        return self.split_queries(tensor)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(**vars(self))

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(**vars(self))

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(**vars(self), _window_size=window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(**vars(self), _window_size=window_size)


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each block causal, aligned at its first query and key."""


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each block causal, aligned at its last query and key."""


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """:class:`BlockDiagonalCausalMask` within the last ``_window_size`` keys."""

    _window_size: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """:class:`BlockDiagonalCausalFromBottomRightMask` within the last ``_window_size`` keys."""

    _window_size: int = 0


@dataclass
class BlockDiagonalPaddedKeysMask(_Blocks):
    """Query block n sees the keys in use of slot n; the slots are ``kv_padding`` rows each."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: object = None,
        *,
        device: torch.device | str | None = None,
    ) -> BlockDiagonalPaddedKeysMask:
        """Make the mask of blocks with these lengths. ``causal_diagonal`` has no effect, as in the original."""
        if max(kv_seqlen, default=0) > kv_padding:
            raise ValueError(f"keys of lengths {list(kv_seqlen)} do not fit into slots of {kv_padding}")
        starts = [n * kv_padding for n in range(len(kv_seqlen) + 1)]
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), _SlotInfo.of(starts, kv_seqlen, device))

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], *sizes: int, **named: int
    ) -> BlockDiagonalPaddedKeysMask:
        """Make the mask with a window. ``sizes``: the window, for the classes that have one."""
        free = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen)
        return cls(free.q_seqinfo, free.k_seqinfo, *sizes, **named)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalPaddedKeysMask`, causal, aligned at the last query and the last key in use."""


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalPaddedKeysMask` from ``window_left`` keys before a query's place to ``window_right`` after it."""

    window_left: int
    window_right: int


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalCausalWithOffsetPaddedKeysMask` within the last ``_window_size`` keys."""

    _window_size: int


@dataclass
class BlockDiagonalGappyKeysMask(_Blocks):
    """Query block n sees ``kv_seqlen[n]`` keys from ``kv_seqstarts[n]`` on; the last start is the number of key rows."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: torch.device | str | None = None,
    ) -> BlockDiagonalGappyKeysMask:
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), _SlotInfo.of(kv_seqstarts, kv_seqlen, device))


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """:class:`BlockDiagonalGappyKeysMask`, causal, aligned at the last query and the last key in use."""


__all__ = ["AttentionBias", *BANDS]
