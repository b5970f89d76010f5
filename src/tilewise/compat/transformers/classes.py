"""Attention classes for model families that never ask transformers' AttentionInterface, one each, in the places of their own.

A family's own class projects, rotates and caches; these replace what lies between, and hand it to the attention that models with the
interface call. A family is prepared when the first of its models is made with ``attn_implementation="tilewise"``.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from tilewise.compat.transformers.masks import HandedMask
from tilewise.masks.catalogue import window


def prepare(model: torch.nn.Module, name: str, attend: Callable) -> bool:
    """Make the family of ``model`` find its class under ``name``. ``attend``: the attention that the interface calls.

    Returns:
        whether the family is known.
    """
    module = sys.modules.get(type(model).__module__)
    family = FAMILIES.get(type(model).__module__)
    if module is None or family is None:
        return False
    family(module, name, attend)
    return True


def refuse_others(model: torch.nn.Module, name: str) -> None:
    """Make a model say so if it looks for ``name`` among attention classes of its own and has none there."""
    module = sys.modules.get(type(model).__module__)
    for key, found in vars(module).items() if module else ():
        if key.endswith("ATTENTION_CLASSES") and isinstance(found, dict):
            found.setdefault(name, _refusal(name, [*found]))


def _refusal(name: str, others: list[str]) -> Callable:
    def refuse(*_, **__):
        raise NotImplementedError(
            f'attn_implementation="{name}": this model chooses among attention classes of its own, {", ".join(others)}; load it, or the '
            'part of it that is meant (attn_implementation={"vision_config": "eager", ...}), with one of these'
        )

    return refuse


def _watching(base: type, attend: Callable) -> type:
    """Return ``base`` with :attr:`watched`, whether the layer's caller asked for probabilities, and the attention of a layer."""

    class Watching(base):
        def forward(self, *arguments, output_attentions: bool | None = False, **options):
            self.watched = bool(output_attentions)
            return super().forward(*arguments, output_attentions=output_attentions, **options)

        def attended(
            self, query: Tensor, key: Tensor, value: Tensor, mask, scaling: float
        ) -> tuple[Tensor, Tensor | None]:
            dropout = self.attn_dropout.p if self.training else 0.0
            asked = {"scaling": scaling, "dropout": dropout, "output_attentions": self.watched}
            o, weights = attend(self, query.to(value), key.to(value), value, mask, **asked)
            return o.transpose(1, 2), weights

    return Watching


def _gptj(module: ModuleType, name: str, attend: Callable) -> None:
    class TilewiseGPTJAttention(_watching(module.GPTJAttention, attend)):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None) -> tuple[Tensor, Tensor | None]:
            return self.attended(query, key, value, attention_mask, 1 / self.scale_attn)

    module.GPTJ_ATTENTION_CLASSES.setdefault(name, TilewiseGPTJAttention)


def _gpt_neo(module: ModuleType, name: str, attend: Callable) -> None:
    class TilewiseGPTNeoSelfAttention(_watching(module.GPTNeoSelfAttention, attend)):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None) -> tuple[Tensor, Tensor | None]:
            if self.attention_type == "local":
                attention_mask = _windowed(attention_mask, self.config.window_size)
            return self.attended(query, key, value, attention_mask, 1.0)

    module.GPT_NEO_ATTENTION_CLASSES.setdefault(name, TilewiseGPTNeoSelfAttention)


def _windowed(mask: HandedMask | Tensor | None, size: int) -> HandedMask:
    """Return the mask, and of a query's keys the last ``size``, its own among them."""
    if not isinstance(mask, HandedMask):
        raise NotImplementedError(
            "a local layer of GPT-Neo with an attention mask of your own; leave the window to the model, or load it with "
            'attn_implementation="eager"'
        )
    if mask.keys != mask.shape[-1]:
        raise NotImplementedError(
            'a local layer of GPT-Neo with a static cache; use a dynamic one, or attn_implementation="eager"'
        )
    return replace(mask, mask=mask.mask & window(left=size - 1), band=None)


def _falcon(module: ModuleType, name: str, attend: Callable) -> None:
    class TilewiseFalconAttention(module.FalconAttention):
        """It calls torch's scaled_dot_product_attention, which a HandedMask answers; ALiBi and probabilities compute with the mask."""

        def __init__(self, config, layer_idx=None):
            super().__init__(config, layer_idx)
            self.config = copy.copy(config)
            self.config._attn_implementation_internal = "sdpa"

    module.FALCON_ATTENTION_CLASSES.setdefault(name, TilewiseFalconAttention)


def _bloom(module: ModuleType, name: str, attend: Callable) -> None:
    if hasattr(module.BloomAttention, "tilewise"):
        return
    base = module.BloomAttention

    class BloomAttention(base):
        tilewise = True

        @functools.wraps(base.__init__)
        def __init__(self, config, layer_idx=None):
            super().__init__(config, layer_idx)
            self.config = config

        def forward(self, hidden_states, residual, alibi, attention_mask, layer_past=None, **options):
            if self.config._attn_implementation != name:
                return super().forward(hidden_states, residual, alibi, attention_mask, layer_past, **options)
            query, key, value = self._reshape(self.query_key_value(hidden_states))
            if layer_past is not None:
                key, value = layer_past.update(key, value, self.layer_idx)
            o, weights = attend(
                self, query, key, value, attention_mask,
                scaling=1 / math.sqrt(self.head_dim),
                dropout=self.attention_dropout.p if self.training else 0.0,
                position_bias=alibi.unflatten(0, (-1, self.num_heads)),
                output_attentions=options.get("output_attentions"),
            )  # fmt: skip
            o = self.dense(o.flatten(2))
            return module.dropout_add(o, residual, self.hidden_dropout, self.training), weights

    module.BloomAttention = BloomAttention


FAMILIES: dict[str, Callable[[ModuleType, str, Callable], None]] = {
    "transformers.models.gptj.modeling_gptj": _gptj,
    "transformers.models.gpt_neo.modeling_gpt_neo": _gpt_neo,
    "transformers.models.falcon.modeling_falcon": _falcon,
    "transformers.models.bloom.modeling_bloom": _bloom,
}
