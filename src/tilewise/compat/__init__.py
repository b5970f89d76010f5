"""Other libraries' names over the same op: ``flash_attn``, ``flex_attention``, ``sdpa``, ``transformers``, ``xformers``.

What cannot be honoured is refused.

Each module is imported by its name (``from tilewise.compat import flash_attn``), so that ``import tilewise`` loads none of
them, and none loads a package that the others would need. They share ``layouts`` (orders of dimensions), ``probabilities`` (the matrix P
for those who ask), ``refusals`` (what cannot be honoured) and ``stand_in`` (being found under another package's name).
"""
