"""Other libraries' names over the same op: ``cuequivariance``, ``diffusers``, ``flash_attn``, ``flex_attention``, ``sdpa``, ``sglang``,
``torch_provider``, ``transformers``, ``vllm``, ``xformers``.

Unsupported arguments are refused by name.

Import each module by its name (``from tilewise.compat import flash_attn``): ``import tilewise`` loads none of them, and none loads a
package that only another one needs. They share ``layouts`` (orders of dimensions), ``padding`` (of keys, as intervals),
``probabilities`` (the matrix P on request), ``refusals`` (unsupported arguments) and ``stand_in`` (modules under another package's
name).
"""
