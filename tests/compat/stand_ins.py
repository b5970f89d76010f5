"""The interfaces of vLLM 0.33 and SGLang 0.5.23 that our doors are written to, as small modules: what a test imports where the package is
not installed. They hold signatures and flags, and nothing that computes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto
from types import SimpleNamespace
from typing import Generic, TypeVar
from unittest.mock import MagicMock

from torch import Tensor

from tilewise.compat.stand_in import put_module

T = TypeVar("T")


@contextmanager
def standing(modules: dict[str, dict]) -> Iterator[None]:
    """Have these modules importable, each with its names, and gone afterwards: other tests ask what is installed."""
    for name, contents in modules.items():
        for package in [name[:n] for n, c in enumerate(name) if c == "."]:
            put_module(package, {}, package=True)
        put_module(name, contents)
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in {name.partition(".")[0] for name in modules}:
            del sys.modules[name]


def instead_of_torchvision() -> None:
    """Let SGLang's files be imported where torchvision is not: they name it, and what is tested here calls nothing of it."""
    if importlib.util.find_spec("torchvision") is None:
        import transformers

        assert not transformers.utils.is_torchvision_available()  # its answer stays what it is now
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
            put_module(name, {"__getattr__": lambda name: MagicMock()}, package=True)


# -- vLLM --------------------------------------------------------------------------------------------------------------


class VllmBackend:
    supported_dtypes = ()
    supported_kv_cache_dtypes = ()

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes


class VllmBuilder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.vllm_config = vllm_config


class VllmImpl(Generic[T]):
    pass


class VllmType(StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class VllmGraphs(Enum):
    ALWAYS = 3
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    mm_req_doc_ranges: dict | None = None
    rswa_prefix_lens: Tensor | None = None
    dcp_local_seq_lens: Tensor | None = None


class VllmBackends(Enum):
    CPU_ATTN = "vllm's own"
    CUSTOM = None

    def get_path(self) -> str:
        return REGISTERED.get(self, self.value)

    def is_overridden(self) -> bool:
        return self in REGISTERED


REGISTERED: dict[VllmBackends, str] = {}

VLLM = {
    "vllm": {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
    "vllm.v1.attention.backend": {
        "AttentionBackend": VllmBackend,
        "AttentionCGSupport": VllmGraphs,
        "AttentionImpl": VllmImpl,
        "AttentionMetadataBuilder": VllmBuilder,
        "AttentionType": VllmType,
        "CommonAttentionMetadata": CommonAttentionMetadata,
        "MultipleOf": MultipleOf,
    },
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": VllmBackends,
        "register_backend": REGISTERED.__setitem__,
    },
}


# -- SGLang ------------------------------------------------------------------------------------------------------------


class SglangBackend:
    forward_metadata = None

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **others):
        run = self.forward_decode if forward_batch.forward_mode.is_decode_or_idle() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **others)


class SglangType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


class SlidingPool:
    pass


class TokenPool:
    """Slots of keys and values, ``(slots, heads, dim)``, or in pages with heads before rows."""

    def __init__(self, size, page_size, dtype, head_num, head_dim, use_hnd=False):
        self.dtype, self.page_size, self.use_hnd = dtype, page_size, use_hnd
        self.kv_cache_layout = "hnd" if use_hnd else "nhd"
        slots = size + page_size
        shape = (slots // page_size, head_num, page_size, head_dim) if use_hnd else (slots, head_num, head_dim)
        self.k_buffer, self.v_buffer = ([Tensor.new_zeros(Tensor(), shape).to(dtype)] for _ in "kv")

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v_buffer[layer_id]

    def set_kv_buffer(self, layer, location, k, v, k_scale=None, v_scale=None) -> None:
        for buffer, new, scale in ((self.k_buffer, k, k_scale), (self.v_buffer, v, v_scale)):
            new = (new if scale is None or new.dtype == self.dtype else new.div_(scale)).to(self.dtype)
            if self.use_hnd:
                buffer[layer.layer_id][location.loc // self.page_size, :, location.loc % self.page_size] = new
            else:
                buffer[layer.layer_id][location.loc] = new


@dataclass
class WriteLocation:
    loc: Tensor

    @classmethod
    def for_batch(cls, forward_batch) -> WriteLocation:
        return cls(forward_batch.out_cache_loc)


CHOICES = ["triton"]
SGLANG_BACKENDS: dict[str, type] = {}


def register_attention_backend(name: str):
    return lambda made: SGLANG_BACKENDS.setdefault(name, made)


SGLANG = {
    "sglang.srt.arg_groups.choices": {
        "ATTENTION_BACKEND_CHOICES": CHOICES,
        "add_attention_backend_choices": CHOICES.extend,
    },
    "sglang.srt.layers.attention.attention_registry": {
        "ATTENTION_BACKENDS": SGLANG_BACKENDS,
        "register_attention_backend": register_attention_backend,
    },
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": SglangBackend},
    "sglang.srt.layers.radix_attention": {"AttentionType": SglangType},
    "sglang.srt.mem_cache.base_swa_memory_pool": {"BaseSWAKVPool": SlidingPool},
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": WriteLocation, "MHATokenToKVPool": TokenPool},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
    "sglang.srt.runtime_context": {"get_parallel": lambda: None},
}
