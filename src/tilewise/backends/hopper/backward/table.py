"""The tiles that were measured to be the fastest on Hopper: a row for each pair of head dims. It imports no DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tilewise.backends.hopper.backward.tiles import KeyTiles, QueryTiles, SheetTiles
from tilewise.backends.hopper.config import PLAIN, Traced

BANDS = ("full", "upper", "band")  # forms whose rows' ends are numbers
# Where dS may be kept beside a band: with a softcap, of packed sequences, and where rows' ends are tensors.
KEEPS = ("softcap", "packed", "rows")


class Passes(NamedTuple):
    """Tiles of the pass over keys, and of the pass over queries where there is one."""

    keys: KeyTiles
    queries: QueryTiles | SheetTiles | None = None


@dataclass(frozen=True)
class BackwardRow:
    """The tiles for one pair of head dims. A column that is None has no tiles of its own: the next row that has them serves.

    Attributes:
        two_passes: for a mask that is a band or ends of rows, and no score.
        softcap: two passes with a softcap, whose slope takes registers.
        softcap_band: with a softcap and two ends of a row, which take more; None: those of ``softcap``.
        pairs: with a traced score or dropout (docs/decisions.md#hopper-pair-tiles).
        kept: as two_passes, for a band, but that dS is kept (docs/decisions.md#hopper-kept-ds).
        keeps: where else that pays, of KEEPS.
        one_pass: where the pass over keys accumulates dQ.
        softcap_one_pass: as one_pass, with a softcap, however few the keys are: each tanh is then computed once. Its slope takes registers,
            so that a tile has fewer queries.
        dropout: as one_pass, with dropout and no score, however few the keys are: pairs are then drawn once.
        alibi: whether one_pass is shipped with ALiBi whose bias is linear, and with a table's bias by distance.
        bias: where the pass over keys accumulates dQ, with a bias by pair.
        bits: where the pass over keys accumulates dQ, with listed blocks of 64 or 128 queries and a bit for each pair of a partial one.
        one_pass_from: keys that a query must see on average for one pass to pay (docs/decisions.md#hopper-two-or-one-pass).
        overlapping_from: the same where tiles overlap, which hides a part of that; None: as many.
        packed_from: the same of packed sequences, which are taken to be equally long: others see more. None: as many.
    """

    two_passes: Passes | None = None
    softcap: Passes | None = None
    softcap_band: Passes | None = None
    pairs: Passes | None = None
    kept: Passes | None = None
    keeps: tuple[str, ...] = ()
    one_pass: KeyTiles | None = None
    softcap_one_pass: KeyTiles | None = None
    dropout: KeyTiles | None = None
    alibi: bool = False
    bias: KeyTiles | None = None
    bits: KeyTiles | None = None
    one_pass_from: int = 0
    overlapping_from: int | None = None
    packed_from: int | None = None

    def least_keys(self, keys: KeyTiles, packed: bool) -> int:
        """How many keys a query must see on average for these tiles of ``one_pass``."""
        if packed and self.packed_from is not None:
            return self.packed_from
        return self.one_pass_from if self.overlapping_from is None or not keys.overlaps else self.overlapping_from

    def summed(self, form: str, packed: bool, dropout: bool = False, softcap: bool = False) -> KeyTiles | None:
        """The tiles of a single pass as a form has them (docs/decisions.md#hopper-overlapped-tiles, #hopper-open-heads)."""
        keys = self.dropout if dropout else self.softcap_one_pass if softcap else self.one_pass
        if keys is None:
            return None
        if softcap and (packed or form == "band"):  # it would spill, and elsewhere reading late costs 3 % (D 128)
            keys = replace(keys, reads_late=True)
        # Products subtract lse from what is the score itself: not from what a softcap or dropout is yet to change.
        keys = replace(keys, overlaps=True, counts=not packed, subtracts=not (dropout or softcap))
        return keys if form == "full" else replace(keys, queued=True, prefetches=True)

    def keeping(self, form: str, packed: bool, softcap: bool) -> Passes | None:
        """The tiles that keep dS as a form has them; None where that is not done. Rows that end somewhere are read as a band."""
        wanted = {"softcap": softcap, "packed": packed, "rows": form == "rows"}
        if self.kept is None or form == "upper" or any(wanted[name] and name not in self.keeps for name in KEEPS):
            return None
        late = softcap and form in ("band", "rows")  # both ends of a row and a softcap's slope would spill
        # Two CTAs that share a tile could not take the same one from a queue, and tiles of a full mask are alike.
        queued = form != "full" and not self.kept.keys.halved
        return Passes(replace(self.kept.keys, reads_late=late, queued=queued), self.kept.queries)

    def form_of_two_passes(self, form: str, packed: bool) -> str:
        """The form whose kernels make two passes of a problem. Where dS is kept elsewhere, what is too long for that has one form: a band
        of equal sequences is read as ends of rows, and packed sequences as a band, so that fewer kernels ship."""
        return ("band" if packed else "rows") if self.kept and form in BANDS else self.form_in(form, packed)

    def form_in(self, form: str, packed: bool, softcap: bool = False) -> str:
        """The form whose kernels serve another one without dropout: packed rows that end somewhere are read as a band, which takes as long
        but for plain ones of 64 (docs/decisions.md#hopper-fewer-forms)."""
        own = not packed or (self.one_pass is not None and self.one_pass.width == 64 and not softcap)
        return "band" if form == "upper" and not own else form

    def two_passes_of(self, form: str, packed: bool, softcap: bool) -> Passes | None:
        """The tiles of two passes that ship for a form."""
        return self.passes(form, softcap) if self.form_of_two_passes(form, packed) == form else None

    def biased(self, score: str, form: str, packed: bool) -> KeyTiles | None:
        """The tiles with a score of SCORES that reads a bias, as a form has them."""
        if score != "bias":
            return self.summed(form, packed) if self.alibi else None
        return replace(self.bias, queued=True, prefetches=True) if self.bias and form != "full" else self.bias

    def passes(self, form: str, softcap: bool, traced: Traced = PLAIN, dropout: bool = False) -> Passes | None:
        """The column of a problem that has a pass for dQ; None where this row has no tiles for it."""
        if traced != PLAIN or dropout:
            return self.pairs
        if not softcap:
            return self.two_passes
        return (form in ("band", "rows") and self.softcap_band) or self.softcap


_BITS = KeyTiles(128, 128, tile_m=64, stages=5, sums_dq=True, prefetches=True, v_register_steps=4)
_BITS = replace(_BITS, queued=True, overlaps=True, counts=True)
# A block's biases take as much memory as its Q or dO, at 64 twice as much (docs/decisions.md#hopper-pair-bias).
_BIAS = KeyTiles(128, 128, tile_m=64, stages=4, sums_dq=True, dq_first=True, v_register_steps=4, bias_stages=2)
_BIAS = replace(_BIAS, overlaps=True, counts=True)
# (head dim of q and k, head dim of v) -> tiles. The first row that holds both dims, and has tiles for the problem, is taken.
TABLE = {
    (64, 64): BackwardRow(
        two_passes=Passes(
            KeyTiles(64, 64, tile_m=128, stages=8, prefetches=True),
            QueryTiles(64, 64, warpgroups=2, tile_n=128, stages=6, makes_statistics=True, prefetches=True),
        ),
        pairs=Passes(KeyTiles(64, 64, tile_m=64, stages=8), QueryTiles(64, 64, warpgroups=2, tile_n=96, stages=6)),
        one_pass=KeyTiles(64, 64, tile_m=128, stages=5, sums_dq=True, prefetches=True, v_register_steps=4),
        softcap_one_pass=KeyTiles(64, 64, tile_m=128, stages=5, sums_dq=True, reads_late=True),
        dropout=KeyTiles(64, 64, tile_m=128, stages=5, sums_dq=True, dp_late=True),
        alibi=True,
        bias=replace(_BIAS, width=64, width_v=64, tile_m=128, dq_first=False, bias_stages=1),
        bits=replace(_BITS, width=64, width_v=64, tile_m=128, stores_first=True),
        one_pass_from=1100,
        overlapping_from=900,
        packed_from=650,
    ),
    (96, 96): BackwardRow(
        two_passes=Passes(
            KeyTiles(96, 96, tile_m=96, stages=8),
            QueryTiles(96, 96, warpgroups=2, tile_n=112, stages=6, makes_statistics=True),
        ),
    ),
    (128, 128): BackwardRow(
        two_passes=Passes(
            KeyTiles(128, 128, tile_m=64, stages=8, prefetches=True),
            QueryTiles(128, 128, warpgroups=2, tile_n=96, stages=6, makes_statistics=True, prefetches=True),
        ),
        pairs=Passes(KeyTiles(128, 128, tile_m=48, stages=8), QueryTiles(128, 128, warpgroups=2, tile_n=80, stages=6)),
        one_pass=KeyTiles(128, 128, tile_m=80, stages=4, sums_dq=True, dq_first=True, v_register_steps=1),
        softcap_one_pass=KeyTiles(128, 128, tile_m=64, stages=5, sums_dq=True, dq_first=True),
        dropout=KeyTiles(128, 128, tile_m=64, stages=5, sums_dq=True, dq_first=True),
        alibi=True,
        bias=_BIAS,
        bits=replace(_BITS, dq_first=True),
        one_pass_from=560,
    ),
    (192, 128): BackwardRow(
        two_passes=Passes(
            KeyTiles(192, 128, tile_m=96, stages=4, split=True), QueryTiles(192, 128, warpgroups=2, tile_n=80, stages=4)
        ),
        kept=Passes(
            KeyTiles(192, 128, tile_m=64, stages=6, split=True, keeps_ds=True), SheetTiles(width=192, stages=5)
        ),
        keeps=("packed", "rows"),
    ),
    (192, 192): BackwardRow(
        kept=Passes(
            KeyTiles(192, 192, tile_m=64, stages=6, split=True, keeps_ds=True), SheetTiles(width=192, stages=5)
        ),
        keeps=("packed", "rows"),
    ),
    (256, 256): BackwardRow(
        two_passes=Passes(
            KeyTiles(256, 256, tile_m=64, stages=4, split=True), QueryTiles(256, 256, warpgroups=2, tile_n=64, stages=3)
        ),
        softcap=Passes(
            KeyTiles(256, 256, tile_m=64, stages=4, split=True), QueryTiles(256, 256, warpgroups=2, tile_n=64, stages=3)
        ),
        softcap_band=Passes(
            KeyTiles(256, 256, tile_m=48, stages=4, split=True), QueryTiles(256, 256, warpgroups=2, tile_n=64, stages=3)
        ),
        pairs=Passes(
            KeyTiles(256, 256, tile_m=48, stages=4, split=True), QueryTiles(256, 256, warpgroups=2, tile_n=48, stages=3)
        ),
        kept=Passes(
            KeyTiles(256, 256, tile_m=64, stages=4, split=True, keeps_ds=True), SheetTiles(width=256, stages=4)
        ),
        keeps=("softcap", "packed", "rows"),
    ),
    (512, 512): BackwardRow(
        two_passes=Passes(
            KeyTiles(256, 256, tile_m=64, stages=4, split=True, halved=True),
            QueryTiles(256, 256, warpgroups=2, tile_n=32, stages=4, halved=True),
        ),
        kept=Passes(
            KeyTiles(256, 256, tile_m=64, stages=4, split=True, halved=True, keeps_ds=True),
            SheetTiles(width=256, stages=4, parts=2),
        ),
        keeps=("packed", "rows"),
    ),
}
