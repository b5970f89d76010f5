"""Continuous batching, ``model.generate_batch``: sequences of different lengths in one row, over transformers' paged cache.

transformers knows by name which attention can do this: eager and SDPA with a mask, and flash-attention without one. Only with the latter
it uses CUDA graphs, prepares a batch while another one runs, and decodes over pages. :func:`accept` adds a name to the latter. A batch
comes in one of two forms::

    mixed       k and v of all sequences, gathered from the cache, and where each sequence begins: attention_varlen
    decoding    the new rows of k and v, the pages of the cache, and its block table: append, then attention_paged
"""

from __future__ import annotations

import functools

from torch import Tensor

import tilewise as tw


@functools.cache
def accept(name: str) -> None:
    """Let transformers' continuous batching take an attention of this name as it takes flash-attention.

    Where a transformers has no such questions, ``generate_batch`` itself refuses the name.
    """
    try:
        from transformers.generation.continuous_batching import cache, continuous_api, initialization

        asking = cache, continuous_api, initialization
        answers = [(module, _flash_or(name, module.is_flash_attention_requested)) for module in asking]
        answers += [(initialization, _paged_or(name, initialization.ensure_decode_fast_path_is_available))]
    except (ImportError, AttributeError):
        return
    for module, answer in answers:
        setattr(module, answer.__name__, answer)


def _flash_or(name: str, asked):
    """transformers' question whether an attention is a flash-attention, of any version unless one is named."""

    @functools.wraps(asked)
    def check(config=None, requested_attention_implementation=None, version=None):
        requested = requested_attention_implementation if config is None else config._attn_implementation
        return requested == name or asked(config, requested_attention_implementation, version)

    return check


def _paged_or(name: str, ensured):
    """transformers' check that decoding may go over pages. It asks flash-attention for a kernel; here only the layers decide."""
    from transformers.generation.continuous_batching import cache

    @functools.wraps(ensured)
    def ensure(config, cb_config, user_requested):
        kinds = [cache.ATTN_TYPE_TO_ALLOCATOR[kind] for kind in cache.group_layers_by_attn_type(config)]
        if config._attn_implementation != name:
            ensured(config, cb_config, user_requested)
        elif not all(kind.supports_block_table for kind in kinds):
            cb_config.max_blocks_per_request = 0

    return ensure


def over_pages(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor, Tensor], **options
) -> Tensor:
    """Compute attention of each sequence's last rows over its pages, once their keys and values are written there.

    Args:
        q: ``(total, heads_q, head_dim)``. k, v: ``(total, heads_k, head_dim)``, of the new rows.
        starts: of the sequences' rows, and of their keys with the new ones. A graph's padding sequences have neither.
        pages: of keys and of values, ``(num_pages, page_size, heads_k, head_dim)``, and the block table.
    """
    starts_q, starts_k = starts
    cache = tw.paged(*pages, (starts_k.diff() - starts_q.diff()).int())
    return tw.attention_paged(q, tw.append(cache, k, v, starts_q), starts_q, **options)
