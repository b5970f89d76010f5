"""An attention backend of vLLM 0.33: ``--attention-backend CUSTOM``. vLLM finds :func:`register` by the entry point of this package.

vLLM's cache of a layer is ``(num_blocks, heads_k, block_size, head_dim + head_dim_v)`` in any strides: keys and values lie side by side.
:func:`tilewise.paged` reads it in place. A slot of its ``slot_mapping`` is ``block * block_size + row``.

vLLM asks the backend's class what it supports and refuses the rest by name; on a CPU it asks nobody, so :func:`_cpu_choice` asks there.
What only a layer or a batch tells is refused here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import tilewise as tw
from tilewise import settings
from tilewise.compat.refusals import refuse

OLDEST = (0, 33)
WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def register() -> None:
    """Make tilewise vLLM's backend ``CUSTOM``; it warns and changes nothing if vLLM is too old or another plugin has the name."""
    version, path = importlib.metadata.version("vllm"), f"{__name__}.{TilewiseBackend.__qualname__}"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        warnings.warn(f"tilewise.compat.vllm needs vLLM >= 0.33, here is {version}", stacklevel=2)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != path:
        told = f"vLLM's backend CUSTOM is {custom.get_path()}, not tilewise; VLLM_PLUGINS=tilewise loads tilewise alone"
        warnings.warn(told, stacklevel=2)
        return
    register_backend(custom, path)
    if current_platform.is_cpu() and not hasattr(current_platform.get_attn_backend_cls, "__wrapped__"):
        platform = type(current_platform)
        platform.get_attn_backend_cls = staticmethod(_cpu_choice(current_platform.get_attn_backend_cls))


def _cpu_choice(choose):
    """Wrap a CPU's choice, which gives its own backend whatever was asked for."""

    @functools.wraps(choose)
    def chosen(selected_backend, attn_selector_config, num_heads=None) -> str:
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return choose(selected_backend, attn_selector_config, num_heads)
        reasons = TilewiseBackend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError("the attention backend CUSTOM (tilewise) cannot run this: " + "; ".join(reasons))
        return selected_backend.get_path()

    return chosen


class TilewiseBackend(AttentionBackend):
    """What vLLM asks before it chooses: sinks, windows, non-causal and bidirectional layers, caches in 8 bits; no latent attention."""

    forward_includes_kv_cache_update = False
    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3")

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilewiseAttention]:
        return TilewiseAttention

    @staticmethod
    def get_builder_cls() -> type[TilewiseBuilder]:
        return TilewiseBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[MultipleOf]:
        return [MultipleOf(16)]  # what Hopper's kernels take; the others take any

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *WITHOUT_CACHE)

    @classmethod
    def _yes(cls) -> bool:
        return True

    supports_sink = supports_sliding_window = supports_non_causal = _yes
    supports_per_head_quant_scales = supports_batch_invariance = _yes


@dataclass
class TilewiseMetadata:
    """A step's sequences, as all layers see them.

    Attributes:
        query_start_loc: int32 ``(num_reqs + 1,)``. seq_lens: int32 ``(num_reqs,)``, with the new keys. block_table: int32 ``(num_reqs,
            max_blocks)``. slot_mapping: int64 ``(num_tokens,)``.
        num_actual_tokens: rows of q that are no padding. causal: for all, or per sequence int32 or bool ``(num_reqs,)``.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_actual_tokens: int
    causal: bool | Tensor


class TilewiseBuilder(AttentionMetadataBuilder[TilewiseMetadata]):
    """Hands vLLM's tensors on as they are, which is why a CUDA graph may hold any batch."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not envs.VLLM_BATCH_INVARIANT:
            return
        options = {
            "enable_chunked_prefill": vllm_config.scheduler_config.enable_chunked_prefill,
            "enable_prefix_caching": vllm_config.cache_config.enable_prefix_caching,
            "speculative_config": vllm_config.speculative_config,
        }
        refuse("the attention backend CUSTOM (tilewise) with VLLM_BATCH_INVARIANT", options, _CUT)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> TilewiseMetadata:
        batch = common_attn_metadata
        refuse("the attention backend CUSTOM (tilewise)", vars(batch), _OF_A_BATCH)
        return TilewiseMetadata(
            batch.query_start_loc,
            batch.seq_lens.to(torch.int32),
            batch.block_table_tensor,
            batch.slot_mapping,
            batch.num_actual_tokens,
            batch.causal,
        )


_CUT = dict.fromkeys(
    ("enable_chunked_prefill", "enable_prefix_caching", "speculative_config"),
    "it cuts a prompt as other requests decide, and a row's bits depend on the rows beside it; turn it off",
)
_OF_A_BATCH = {
    "mm_req_doc_ranges": "tokens of an image that see one another; choose another backend for this model",
    "rswa_prefix_lens": "reference sliding windows; choose another backend for this model",
    "dcp_local_seq_lens": "decode context parallelism; leave --decode-context-parallel-size at 1",
}
_OF_A_LAYER = {
    "kv_cache_dtype": f"the caches are {', '.join(TilewiseBackend.supported_kv_cache_dtypes)}",
    "attn_type": "the types are decoder, encoder, encoder_only and encoder_decoder",
    "others": "no such option here",
}
_OF_A_CALL = dict.fromkeys(
    ("output_scale", "output_block_scale"), "the output is not quantised; turn fuse_attn_quant off"
)


class TilewiseAttention(AttentionImpl[TilewiseMetadata]):
    """A layer's attention."""

    # fmt: off
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, **others,
    ):
        # fmt: on
        known = TilewiseBackend.supports_kv_cache_dtype(kv_cache_dtype), TilewiseBackend.supports_attn_type(attn_type)
        given = {"kv_cache_dtype": None if known[0] else kv_cache_dtype, "attn_type": None if known[1] else attn_type}
        given["others"] = ", ".join(sorted(others)) or None
        refuse("the attention backend CUSTOM (tilewise)", given, _OF_A_LAYER)
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        self.head_size, self.scale, self.kv_cache_dtype = head_size, float(scale), kv_cache_dtype
        self.cached, self.sinks = attn_type not in WITHOUT_CACHE, sinks
        left = None if sliding_window is None else sliding_window - 1
        self.masks = {True: tw.window(left, 0) if left is not None else tw.causal(), False: tw.window(left, left)}
        # vLLM caps a score before it adds the distance.
        scores = [tw.softcap(logits_soft_cap)] if logits_soft_cap else []
        scores += [] if alibi_slopes is None else [tw.alibi(torch.tensor(alibi_slopes, dtype=torch.float32))]
        self.score = functools.reduce(lambda first, then: first >> then, scores) if scores else None

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None,
    ) -> Tensor:  # fmt: skip
        """Write attention of the new rows into output ``(num_tokens, heads, head_dim_v)``.

        Args:
            query: ``(num_tokens, heads, head_dim)``. key, value: of the new rows; those of a cache were written by
                :meth:`do_kv_cache_update`. attn_metadata: None while vLLM measures memory.
        """
        given = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        refuse("the attention backend CUSTOM (tilewise)", given, _OF_A_CALL)
        if attn_metadata is None:
            return output.fill_(0)
        batch, n = attn_metadata, attn_metadata.num_actual_tokens
        options = {"mask": self._mask(batch.causal), "score": self.score, "softmax_scale": self.scale, "sink": self.sinks}
        options["deterministic"] = True if envs.VLLM_BATCH_INVARIANT else None
        if self.cached:
            cache = self._cache(layer, kv_cache, batch.block_table, batch.seq_lens)
            o = tw.attention_paged(query[:n], cache, batch.query_start_loc, **options)
        else:
            o = tw.attention_varlen(query[:n], key[:n], value[:n], batch.query_start_loc, **options)
        output[:n] = o.view_as(output[:n])
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write the new rows ``(num_tokens, heads_k, head_dim)`` into their slots; a slot of -1 is none."""
        if not self.cached:
            return
        slots, n = slot_mapping, slot_mapping.shape[0]
        key, value = key[:n], value[:n]
        if settings.checks_values(slots.device):  # where rows without a place are an error
            real = slots >= 0
            slots, key, value = slots[real], key[real], value[real]
        # Each row is a sequence of one page: the block, at whose row it is appended.
        size = kv_cache.shape[2]
        block, row = (slots // size).int(), (slots % size).int()
        tw.append(self._cache(layer, kv_cache, block.unsqueeze(1), row), key.unsqueeze(1), value.unsqueeze(1))

    def _cache(self, layer, kv_cache: Tensor, table: Tensor, lengths: Tensor) -> tw.PagedCache | tw.QuantizedCache:
        pages = kv_cache.transpose(1, 2)
        if not self.kv_cache_dtype.startswith("fp8"):
            return tw.paged(pages[..., : self.head_size], pages[..., self.head_size :], table, lengths)
        pages = pages.view(torch.float8_e4m3fn)
        scales = [x.view(()) if x.numel() == 1 else x for x in (layer._k_scale, layer._v_scale)]
        k, v = pages[..., : self.head_size], pages[..., self.head_size :]
        return tw.paged(k, v, table, lengths, k_scale=scales[0], v_scale=scales[1])

    def _mask(self, causal: bool | Tensor) -> tw.Mask:
        if not isinstance(causal, Tensor):
            return self.masks[causal]
        # A window of sequences that are not causal is as wide on the right.
        return self.masks[False] & tw.keep(lambda b, h, i, j: (j <= i + tw.offset) | (tw.lookup(causal, b) == 0))


__all__ = ["TilewiseAttention", "TilewiseBackend", "TilewiseBuilder", "TilewiseMetadata", "register"]
