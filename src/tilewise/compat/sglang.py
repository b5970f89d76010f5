"""An attention backend of SGLang 0.5.23: ``--attention-backend tilewise``. SGLang finds :func:`register` by this package's entry point.

SGLang keeps the keys of a layer in slots, ``(slots, heads_k, head_dim)``, of which ``page_size`` in a row are a page, and a table of the
slot of each token, ``req_to_token``. Every ``page_size``-th entry of its rows is a page's first slot: that is our block table.

All that a step needs is computed on the device in :meth:`TilewiseAttnBackend.init_forward_metadata_in_graph`, with fixed shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

import tilewise as tw
from tilewise.compat.refusals import refuse

NAME = "tilewise"
MODES = ("EXTEND", "DECODE", "MIXED", "IDLE", "SPLIT_PREFILL")


def register() -> None:
    """Make ``"tilewise"`` one of SGLang's attention backends. A second call changes nothing."""
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(TilewiseAttnBackend)


_OF_A_MODEL = {
    "use_mla_backend": "latent attention (MLA); choose another backend for this model",
    "is_encoder_decoder": "cross attention; choose another backend for this model",
    "pool": "a pool of its own for layers with a window; pass --disable-hybrid-swa-memory",
    "attn_dcp_size": "decode context parallelism; leave --dcp-size at 1",
    "attn_cp_size": "context parallelism; leave --attn-cp-size at 1",
    "dtype": "the caches are float16, bfloat16, float32 and float8_e4m3fn",
    "layout": "the layouts of a cache are nhd and hnd",
}
_OF_A_BATCH = {
    "forward_mode": f"the modes are {', '.join(MODES)}",
    "spec_info": "speculative decoding",
    "encoder_lens": "cross attention",
}
_OF_A_LAYER = {
    "is_cross_attention": "choose another backend for this model",
    "attn_type": "decoder and encoder_only are the types; an encoder has no window",
    "logit_capping_method": "tanh is the method",
    "xai_temperature_len": "choose another backend for this model",
    "others": "no such option here",
}


class _Sequences(NamedTuple):
    """A step's sequences: where rows of q begin ``(batch + 1,)``, keys of each ``(batch,)``, their pages ``(batch, max_pages)``; int32."""

    starts: Tensor
    lengths: Tensor
    table: Tensor


class TilewiseAttnBackend(AttentionBackend):
    """The attention of all layers.

    Raises:
        NotImplementedError: a model, a batch or a layer that it does not run, with every reason by name.
    """

    def __init__(self, model_runner):
        super().__init__()
        # Models ask the backend for both pools, by these names.
        self.token_to_kv_pool, self.req_to_token_pool = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        self.page_size = model_runner.page_size or 1
        pool = self.token_to_kv_pool
        dtype, layout = getattr(pool, "dtype", None), getattr(pool, "kv_cache_layout", "nhd")
        known = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
        given = {
            "use_mla_backend": model_runner.use_mla_backend,
            "is_encoder_decoder": model_runner.model_config.is_encoder_decoder,
            "pool": isinstance(pool, BaseSWAKVPool),
            "attn_dcp_size": get_parallel().attn_dcp_size > 1,
            "attn_cp_size": get_parallel().attn_cp_size > 1,
            "dtype": None if dtype in known else str(dtype),
            "layout": None if layout in ("nhd", "hnd") else layout,
        }
        refuse("the attention backend tilewise", given, _OF_A_MODEL)
        self.one = torch.ones((), device=self.req_to_token_pool.req_to_token.device)

    def init_forward_metadata(self, forward_batch) -> None:
        """Read a batch outside a graph, where its table need not be wider than its longest sequence."""
        lengths = forward_batch.seq_lens_cpu
        self._read(forward_batch, None if lengths is None or not len(lengths) else int(lengths.max()))

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        self._read(forward_batch, None)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing is allocated: what a graph computes lies in its own memory."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _read(self, batch, longest: int | None) -> None:
        mode = batch.forward_mode
        given = {"forward_mode": None if mode.name in MODES else mode.name, "spec_info": batch.spec_info}
        refuse("the attention backend tilewise", given | {"encoder_lens": batch.encoder_lens}, _OF_A_BATCH)
        lengths = batch.seq_lens.int()
        new = torch.ones_like(lengths) if mode.is_decode_or_idle() else batch.extend_seq_lens
        starts = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        first_slots = self.req_to_token_pool.req_to_token[:, : longest : self.page_size][batch.req_pool_indices]
        self.forward_metadata = _Sequences(starts, lengths, (first_slots // self.page_size).int())

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **others) -> Tensor:
        """Compute :meth:`forward_extend` with one new token a sequence."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks, **others)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **others) -> Tensor:
        """Write the new keys and values, and compute attention of the new rows over each sequence.

        Args:
            q: ``(tokens, heads * head_dim)``. k, v: ``(tokens, heads_k, head_dim)``, of the new rows. sinks: ``(heads,)``.

        Returns:
            ``(tokens, heads * head_dim_v)``.
        """
        _refuse_layer(layer, others)
        if save_kv_cache and k is not None:
            if layer.k_scale is not None:  # the pool divides in place
                k, v = k.clone(), v.clone()
            location = KVWriteLoc.for_batch(forward_batch)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
        starts, lengths, table = self.forward_metadata
        left = layer.sliding_window_size if layer.sliding_window_size >= 0 else None
        right = None if layer.attn_type == AttentionType.ENCODER_ONLY else 0
        mask = tw.causal() if (left, right) == (None, 0) else tw.window(left, right)
        score = tw.softcap(layer.logit_cap) if layer.logit_cap else None
        o = tw.attention_paged(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self._cache(layer, table, lengths),
            starts,
            mask=mask,
            score=score,
            softmax_scale=layer.scaling,
            sink=sinks,
        )
        return o.flatten(1)

    def _cache(self, layer, table: Tensor, lengths: Tensor) -> tw.PagedCache | tw.QuantizedCache:
        pool = self.token_to_kv_pool
        k, v = (self._in_pages(get(layer.layer_id)) for get in (pool.get_key_buffer, pool.get_value_buffer))
        if k.dtype != torch.float8_e4m3fn:
            return tw.paged(k, v, table, lengths)
        k_scale, v_scale = (self.one if x is None else x.view(()) for x in (layer.k_scale, layer.v_scale))
        return tw.paged(k, v, table, lengths, k_scale=k_scale, v_scale=v_scale)

    def _in_pages(self, slots: Tensor) -> Tensor:
        """View a layer's buffer as ``(pages, page_size, heads_k, head_dim)``."""
        if slots.ndim == 4:  # hnd
            return slots.transpose(1, 2)
        pages = slots.shape[0] // self.page_size
        return slots[: pages * self.page_size].unflatten(0, (pages, self.page_size))


def _refuse_layer(layer, others: dict) -> None:
    encoder = layer.attn_type == AttentionType.ENCODER_ONLY
    known = layer.attn_type == AttentionType.DECODER or (encoder and layer.sliding_window_size < 0)
    tanh = not layer.logit_cap or layer.logit_capping_method == "tanh"
    given = {
        "is_cross_attention": layer.is_cross_attention,
        "attn_type": None if known else layer.attn_type.value,
        "logit_capping_method": None if tanh else layer.logit_capping_method,
        "xai_temperature_len": layer.xai_temperature_len if layer.xai_temperature_len > 0 else None,
        "others": ", ".join(sorted(name for name, x in others.items() if x is not None)) or None,
    }
    refuse("the attention backend tilewise", given, _OF_A_LAYER)


__all__ = ["TilewiseAttnBackend", "register"]
