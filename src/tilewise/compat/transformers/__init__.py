"""Hugging Face models on tilewise: ``attn_implementation="tilewise"``.

::

    import tilewise.compat.transformers
    tilewise.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")

Masks come from :mod:`tilewise.compat.transformers.masks`, and from ``sharded`` for a sequence that is sharded over ranks. ``classes`` has
attention classes for models without transformers' interface, ``continuous`` what ``generate_batch`` needs. :class:`Handed` holds all other
arguments that transformers passes to an attention. Unsupported ones are refused with the reason.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, fields

import torch
from torch import Tensor

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
except ImportError as missing:
    raise ImportError(
        "tilewise.compat.transformers needs Hugging Face's transformers, 5.17 or newer: pip install 'tilewise[transformers]'"
    ) from missing

from transformers.utils.output_capturing import _active_collector

from tilewise import repeated
from tilewise.api import attention as tilewise_attention
from tilewise.api import attention_varlen
from tilewise.compat.padding import padding
from tilewise.compat.probabilities import probabilities
from tilewise.compat.transformers import classes, continuous
from tilewise.compat.transformers.masks import HandedMask, MaskCall, describe, is_told, joined, read
from tilewise.compat.transformers.sharded import ShardedMask, group, read_sharded, sharded
from tilewise.dropout import new_seed
from tilewise.masks.catalogue import Mask, causal, dense, selected, window
from tilewise.scores.catalogue import Score, bias, softcap
from tilewise.spec import Deterministic

__all__ = ["attention", "mask", "register", "sharded"]

NAME = "tilewise"
OLDEST = (5, 17)
CONTINUOUS = (5, 24)  # whose models write the paged cache before they ask for attention

# What models pass along to every layer, and what changes nothing about attention itself. A keyword that is neither here
# nor in Handed is refused: add it here if it means nothing to the attention of your model.
IGNORED = {
    "cache_position",
    "image_grid_thw",
    "image_sizes",
    "labels",
    "logits_indices",
    "logits_processor_args",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "mm_token_type_ids",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "pixel_values",
    "position_embeddings",
    "position_ids",
    "read_index",
    "return_dict",
    "seq_idx",
    "token_type_ids",
    "use_cache",
    "video_grid_thw",
    "write_index",
}

_ELSEWHERE = 'load this model with attn_implementation="eager" or "sdpa"'
REFUSED = {
    "head_mask": f"scales the probabilities of single heads, which is not built; {_ELSEWHERE}",
    "cache": f"is a paged cache (continuous batching), which needs transformers 5.24 or newer; {_ELSEWHERE}",
    "sinks": f"is a sink for every query, where tilewise has one per head; {_ELSEWHERE}",
}


@dataclass(frozen=True)
class Handed:
    """The keywords of transformers' attention interface, by transformers' names.

    Attributes:
        scaling: ``softmax_scale``. dropout: probability; models pass 0 outside training.
        softcap: cap of the scores, before position_bias, which is added, ``(batch or 1, heads or 1, Nq, Nk)``.
        s_aux: ``(heads,)``, the sink.
        is_causal, sliding_window: count where no mask was handed over; otherwise the mask has them in it.
        indices: the keys that an indexer chose for each query, whole numbers ``(batch, Nq, k)``; those that the mask hides do not count.
        block_indices: the blocks that it chose, ``(batch, heads_k, Nq, k)``, −1 where there are fewer.
        cu_seq_lens_q, cu_seq_lens_k: starts of the sequences packed into a batch of one.
        block_table, k_cache, v_cache: the pages of a cache that the packed keys and values are to be appended to
            (:mod:`~tilewise.compat.transformers.continuous`).
        deterministic: as in :func:`tilewise.attention`; without it, torch's own setting decides.
        output_attentions: the probabilities are asked for; most models do not hand it over (:func:`_recorded`).
    """

    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    position_bias: Tensor | None = None
    s_aux: Tensor | None = None
    is_causal: bool | None = None
    sliding_window: int | None = None
    indices: Tensor | None = None
    block_indices: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    block_table: Tensor | None = None
    k_cache: Tensor | None = None
    v_cache: Tensor | None = None
    deterministic: Deterministic = None
    output_attentions: bool | None = None

    @classmethod
    def of(cls, given: dict) -> Handed:
        """Raise NotImplementedError: with every keyword that cannot be honoured, and why."""
        wrong = {name: value for name, value in given.items() if name not in HONOURED and name not in IGNORED}
        reasons = [
            f"{name} {REFUSED.get(name, _UNKNOWN)}"
            for name, value in wrong.items()
            if value is not None and value is not False
        ]
        if reasons:
            raise NotImplementedError(
                f'attn_implementation="{NAME}" cannot honour' + "".join([f"\n  {r}" for r in reasons])
            )
        return cls(**{name: value for name, value in given.items() if name in HONOURED})

    @property
    def selects(self) -> bool:
        """Whether an indexer chose keys."""
        return self.indices is not None or self.block_indices is not None

    def options(self, keys: int) -> dict:
        """Return the keywords of ``tilewise.attention`` but the mask."""
        stages = [] if self.softcap is None else [softcap(self.softcap)]
        if self.position_bias is not None:
            _say_dense("a position bias", self.position_bias)
            stages.append(bias(self.position_bias[..., :keys]))
        score: Score | None = functools.reduce(lambda a, b: a >> b, stages) if stages else None
        return {
            "softmax_scale": self.scaling,
            "score": score,
            "sink": self.s_aux,
            "deterministic": self.deterministic or None,
        } | ({"dropout_p": self.dropout} if self.dropout else {})


# Read once: inside torch.compile, fields() breaks the graph.
HONOURED = frozenset(field.name for field in fields(Handed))
_UNKNOWN = (
    "is not known; if it means nothing to the attention of this model, add its name to "
    f"tilewise.compat.transformers.IGNORED, else {_ELSEWHERE}"
)


def register() -> None:
    """Register ``attn_implementation="tilewise"`` with transformers. A second call changes nothing.

    Models that compute attention without transformers' AttentionInterface would ignore the name, so they are refused.
    transformers' makers of mask functions are replaced by ones whose functions say what made them
    (:func:`~tilewise.compat.transformers.masks.describe`); the functions keep the same pairs, for every implementation.

    Raises:
        ImportError: transformers is older than 5.17.
    """
    if version() < OLDEST:
        raise ImportError(
            f"tilewise.compat.transformers needs transformers >= {OLDEST[0]}.{OLDEST[1]}, here is {transformers.__version__}: "
            "pip install --upgrade transformers"
        )
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    describe()
    checked = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(checked, "refuses_for"):
        PreTrainedModel.get_correct_attn_implementation = _refusing(checked)
    if version() >= CONTINUOUS:
        continuous.accept(NAME)


def version() -> tuple[int, ...]:
    """Return the first two numbers of the installed transformers' version."""
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def _refusing(checked):
    """transformers' own check of a model's ``attn_implementation``, and that the model asks the interface at all."""

    @functools.wraps(checked)
    def check(self, requested_attention, *arguments, **options):
        asks = requested_attention != NAME or self._can_set_attn_implementation()
        if not asks and not classes.prepare(self, NAME, attention):
            raise NotImplementedError(
                f'{type(self).__name__} cannot use attn_implementation="{NAME}": its code computes attention itself and '
                'never asks the AttentionInterface; load it with attn_implementation="eager"'
            )
        if requested_attention == NAME:
            classes.refuse_others(self, NAME)
        return checked(self, requested_attention, *arguments, **options)

    check.refuses_for = NAME
    return check


# -- The two functions that transformers calls ----------------------------------------------------------------------


def mask(**call) -> HandedMask:
    """transformers' mask interface: the mask of one kind of layer, once per forward of the model."""
    given = call.get("attention_mask")
    if isinstance(given, HandedMask):  # `generate` makes it ahead and hands it back
        return given
    told = not torch.compiler.is_compiling() or (group() is None and is_told(call))
    return _read(call) if told else _untraced(call)


@torch.compiler.disable
def _untraced(call: dict) -> HandedMask:
    """:func:`_read` outside of torch.compile's graph: it looks into functions, and at whether there is padding at all."""
    return _read(call)


def _read(call: dict) -> HandedMask:
    parallel = group()
    return read(MaskCall.of(call)) if parallel is None else read_sharded(MaskCall.of(call), parallel)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: HandedMask | Tensor | None,
    **handed,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface.

    Args:
        query: ``(batch, heads_q, seqlen_q, head_dim)``. key, value: ``(batch, heads_k, seqlen_k, head_dim)``.
        attention_mask: what :func:`mask` made; or, from models that make their own, a bool tensor ``(batch, seqlen_k)`` of
            the keys that are no padding, or the matrix ``(batch or 1, heads or 1, seqlen_q, seqlen_k)``: bool, True = kept,
            or float, added. None: :attr:`Handed.is_causal` and :attr:`Handed.sliding_window` say what is seen.
        handed: the keywords of :class:`Handed` and :data:`IGNORED`.

    Returns:
        ``(batch, seqlen_q, heads_q, head_dim)``, and the probabilities ``(batch, heads_q, seqlen_q, seqlen_k)`` where the caller
        asked the model for ``output_attentions``, else None. They are after dropout, as eager's are, and take O(N²) memory.

    Raises:
        ValueError, NotImplementedError: what cannot be honoured, with the reason.
    """
    if isinstance(attention_mask, HandedMask):
        found = _as_they_lie(query, key, value, attention_mask, handed)
        if found is not None:
            return found, None
    given = Handed.of(handed)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if group() is not None or isinstance(attention_mask, ShardedMask):
        return _over_ranks(q, k, v, attention_mask, given, handed.get("position_ids")), None
    if given.cu_seq_lens_q is not None:
        return _packed(module, (q, k, v), attention_mask, given), None
    seen, keys, added = _seen(module, q, k, attention_mask, given)
    if given.selects:
        seen = joined([seen, _selected(module, given, keys)])
    options = {"mask": seen} | given.options(keys)
    if added is not None:
        options["score"] = bias(added) if options["score"] is None else options["score"] >> bias(added)
    k, v, cut = k[:, :keys], v[:, :keys], k.shape[1] - keys
    if not (given.output_attentions or _recorded(given.output_attentions)):
        return tilewise_attention(q, k, v, **options), None
    if given.dropout:  # the same pairs in both
        options["dropout_seed"] = new_seed(q.device)
    weights = torch.nn.functional.pad(probabilities(q, k, **options), (0, cut))
    return tilewise_attention(q, k, v, **options), weights


_PLAIN = IGNORED | {"scaling", "is_causal", "sliding_window"}  # which a HandedMask has in it, but for the scale


def _as_they_lie(query: Tensor, key: Tensor, value: Tensor, given_mask: HandedMask, handed: dict) -> Tensor | None:
    """Run a layer that hands over only a mask and a scale; None: there is more to look at.

    Views of its tensors would take half as long as the call; Dynamo, which takes them, traces less of the door.
    """
    for name, option in handed.items():
        if (
            name not in _PLAIN
            and option is not None
            and option is not False
            and not (name == "dropout" and option == 0)
        ):
            return None
    seen, shape = given_mask.mask, given_mask.shape
    if group() is not None or _recorded(handed.get("output_attentions")) or type(given_mask) is not HandedMask:
        return None
    if given_mask.keys != shape[3] or query.ndim != 4 or (query.shape[2], key.shape[2]) != (shape[2], shape[3]):
        return None
    if torch.compiler.is_compiling():
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return tilewise_attention(q, k, v, mask=seen, softmax_scale=handed.get("scaling"))
    words = False, seen, None, handed.get("scaling"), None, None, False
    found = repeated.attend(query, key, value, words, lse=False, heads_first=True)
    return None if found is None else found[0]


def _over_ranks(q: Tensor, k: Tensor, v: Tensor, given_mask, given: Handed, positions: Tensor | None) -> Tensor:
    """Compute attention of a rank's rows, within a sequence that is sharded over ranks (:func:`sharded`)."""
    wrong = [] if isinstance(given_mask, ShardedMask) else ["a layer that is handed no mask, or one of its own"]
    wrong += ["cu_seq_lens_q: pass position_ids, which tell documents apart"] if given.cu_seq_lens_q is not None else []
    wrong += ["position_bias, which is of this rank's rows"] if given.position_bias is not None else []
    wrong += ["output_attentions"] if given.output_attentions or _recorded() else []
    wrong += ["keys that an indexer chose"] if given.selects else []
    if wrong:
        raise NotImplementedError("not built for a sharded sequence: " + "; ".join(wrong))
    options = {"mask": given_mask.whole(positions), "parallel": given_mask.parallel} | given.options(k.shape[1])
    return tilewise_attention(q, k, v, **options)


def _recorded(given: bool | None = None) -> bool:
    """Return whether a model collects the probabilities of its layers, which transformers' hooks do without a word to the attention.

    Args:
        given: what the attention was told, by models that have no hooks.
    """
    if given is not None and torch.compiler.is_compiling():  # Dynamo traces the look below only behind such hooks
        return given
    collected = _active_collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)


def _seen(module, q: Tensor, k: Tensor, given_mask, given: Handed) -> tuple[Mask | None, int, Tensor | None]:
    """Return the mask, the number of keys that it is over, and what it adds to the scores."""
    keys = k.shape[1]
    if isinstance(given_mask, HandedMask):
        if given_mask.shape[-2:] != (q.shape[1], keys):
            # An encoder may have a cache, of which its mask knows nothing; sdpa is handed no mask then.
            if given_mask.hides_nothing:
                return _unmasked(module, q, k, given), keys, None
            raise ValueError(
                f"the mask was made for (Nq, Nk) = {given_mask.shape[-2:]}, this layer has {(q.shape[1], keys)}"
            )
        return given_mask.mask, given_mask.keys, None
    if given_mask is None:
        return _unmasked(module, q, k, given), keys, None
    if isinstance(given_mask, Tensor) and given_mask.ndim == 2 and given_mask.shape[1] == keys:
        return joined([_unmasked(module, q, k, given), padding(given_mask, 0, keys)]), keys, None
    if isinstance(given_mask, Tensor) and given_mask.ndim == 4 and given_mask.shape[-1] >= keys:
        _say_dense("an attention mask", given_mask)
        matrix = given_mask[..., :keys]
        return (dense(matrix), keys, None) if matrix.dtype == torch.bool else (None, keys, matrix)
    shape = tuple(given_mask.shape) if isinstance(given_mask, Tensor) else type(given_mask).__name__
    raise ValueError(
        f"attention_mask is {shape}; allowed are (batch, {keys}), True or 1 for keys that are no padding, "
        f"(batch or 1, heads or 1, {q.shape[1]}, {keys}), and None"
    )


def _selected(module, given: Handed, keys: int) -> Mask:
    """Return the mask of what a layer's indexer chose; it chooses keys past the end too where there are not enough."""
    blocks = given.block_indices is not None
    chosen, block = (given.block_indices, module.indexer.block_size) if blocks else (given.indices[:, None], 1)
    return selected(chosen.where(chosen * block < keys, -1), block=block)


def _unmasked(module, q: Tensor, k: Tensor, given: Handed) -> Mask | None:
    """Return the mask of a layer without one. Its first query must sit at its first key."""
    if _is_causal(module, given) and 1 < q.shape[1] != k.shape[1]:
        raise ValueError(
            f"a causal layer with {q.shape[1]} queries and {k.shape[1]} keys was handed no mask, so that nothing says at which "
            "key its first query sits; pass attention_mask"
        )
    return _band(module, given)


def _is_causal(module, given: Handed) -> bool:
    return getattr(module, "is_causal", False) if given.is_causal is None else given.is_causal


def _band(module, given: Handed) -> Mask | None:
    """Causal if the layer is, and its window, as flash-attention reads them: a sequence's last query sits at its last key."""
    is_causal = _is_causal(module, given)
    if given.sliding_window is None:
        return causal() if is_causal else None
    return window(left=given.sliding_window - 1, right=0 if is_causal else given.sliding_window - 1)


def _packed(module, qkv: tuple[Tensor, Tensor, Tensor], given_mask, given: Handed) -> Tensor:
    """Sequences that ``cu_seq_lens`` tells apart, in a batch of one."""
    q, k, v = qkv
    wrong = [] if q.shape[0] == 1 else [f"a batch of {q.shape[0]}: pack all sequences into one row"]
    wrong += ["position_bias, which counts along the whole row"] if given.position_bias is not None else []
    wrong += ["output_attentions: ask for it one sequence at a time"] if given.output_attentions or _recorded() else []
    wrong += ["keys that an indexer chose"] if given.selects else []
    if isinstance(given_mask, HandedMask):
        band = given_mask.band
        if band is None:
            wrong.append(
                "padding, or a mask of its own (leave attention_mask out), or chunks (leave cu_seq_lens out, pass position_ids)"
            )
    else:
        band = _band(module, given)
        wrong += ["an attention mask: leave it out"] if given_mask is not None else []
    if wrong:
        raise ValueError("cu_seq_lens_q was passed together with " + " and ".join(wrong))
    options = {"mask": band} | given.options(k.shape[1])
    starts = given.cu_seq_lens_q, given.cu_seq_lens_k
    if given.block_table is None:
        return attention_varlen(q[0], k[0], v[0], *starts, **options)[None]
    pages = given.k_cache, given.v_cache, given.block_table
    return continuous.over_pages(q[0], k[0], v[0], starts, pages, **options)[None]


def _say_dense(what: str, matrix: Tensor) -> None:
    # One row for every query takes O(N); and Dynamo traces no warning.
    if matrix.shape[-2] == 1 or torch.compiler.is_compiling():
        return
    warnings.warn(
        f"the model hands over {what} of shape {tuple(matrix.shape)}: it is honoured, but it takes O(N²) memory, which is "
        "allocated outside of tilewise",
        stacklevel=2,
    )
