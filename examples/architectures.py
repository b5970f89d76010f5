"""Attention as published models call it: one function for each, with gradients for every tensor that it takes.

docs/architectures.md shows the functions' own sources and is written by `python -m tests.support --write`;
tests/test_architectures.py holds each against the textbook, o and every gradient. Layouts are (batch, seqlen, heads, head_dim).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import tilewise as tw

# -- Language models -----------------------------------------------------------------------------------------------


def causal_lm(q, k, v):
    return tw.attention(q, k, v, causal=True)


def encoder(q, k, v, lengths):
    """lengths (batch,): the tokens of each row; the rest is padding.

    The padding changes no result, even if it holds NaN.
    """
    return tw.attention(q, k, v, mask=tw.key_lengths(lengths))


def t5_buckets(distance, both_ways, buckets=32, longest=128):
    """T5's bucket of key position - query position.

    Each short distance has its own bucket; the others are logarithmic.
    """
    side = (distance > 0) * (buckets // 2) if both_ways else 0
    n = distance.abs() if both_ways else (-distance).clamp(min=0)
    buckets = buckets // 2 if both_ways else buckets
    exact = buckets // 2
    far = torch.log(n.clamp(min=exact) / exact) / math.log(longest / exact)
    far = exact + (far * (buckets - exact)).long()
    return side + torch.where(n < exact, n, far.clamp(max=buckets - 1))


def t5_bias(table, both_ways, longest=128):
    """table (buckets, heads_q).

    A bucket depends on the distance alone: find them all before the attention.
    """
    distance = torch.arange(-longest, longest + 1, device=table.device)
    bias = table[t5_buckets(distance, both_ways)]  # (2 * longest + 1, heads_q)

    def by_distance(s, b, h, i, j):
        distance = (j - i - tw.offset).clamp(-longest, longest)
        return s + tw.lookup(bias, distance + longest, h)

    return tw.score(by_distance)


def t5_encoder(q, k, v, table, lengths):
    seen, bias = tw.key_lengths(lengths), t5_bias(table, True)
    return tw.attention(q, k, v, mask=seen, score=bias, softmax_scale=1.0)


def t5_decoder(q, k, v, table):
    bias = t5_bias(table, False)
    return tw.attention(q, k, v, causal=True, score=bias, softmax_scale=1.0)


def t5_cross(q, k, v, lengths):
    """q of the decoder; k and v of the encoder, with `lengths` tokens."""
    seen = tw.key_lengths(lengths)
    return tw.attention(q, k, v, mask=seen, softmax_scale=1.0)


def prefix_lm(q, k, v, prefix):
    """prefix (batch,): tokens of image and prompt, which see each other.

    The tokens after them are causal.
    """
    return tw.attention(q, k, v, mask=tw.prefix(prefix))


def mistral(q, k, v, window=4096):
    """A query sees itself and the window - 1 keys before it."""
    return tw.attention(q, k, v, mask=tw.window(left=window - 1, right=0))


def gemma2(q, k, v, window=4096, cap=50.0):
    """Every other layer; the layers between have causal=True and no window."""
    near = tw.window(left=window - 1, right=0)
    return tw.attention(q, k, v, mask=near, score=tw.softcap(cap))


def gpt_oss(q, k, v, sink, window=128):
    """sink (heads_q,): a learned logit beside the keys', with no value."""
    near = tw.window(left=window - 1, right=0)
    return tw.attention(q, k, v, mask=near, sink=sink)


def alibi(q, k, v, slopes):
    """slopes (heads_q,): 2 ** (-8 (h + 1) / heads_q), or learned."""
    return tw.attention(q, k, v, causal=True, score=tw.alibi(slopes))


def grouped(q, k, v):
    """Query heads share key heads; no copy of a key head is made.

    The queries are the last tokens of the keys: a prompt read in chunks.
    """
    return tw.attention(q, k, v, causal=True)


def multi_query(q, k, v):
    """All query heads read one key head."""
    return tw.attention(q, k, v, causal=True)


def mla(q, k, v):
    """Training form: q and k have 128 + 64 (rotated) dimensions, v has 128."""
    return tw.attention(q, k, v, causal=True)


def mla_absorbed(q_nope, q_rope, cache, w_k, w_v):
    """Decoding form: the one key head is the cache.

    cache (batch, seqlen_k, 1, 512 + 64); its first 512 numbers are the values.
    w_k (heads, 128, 512) and w_v (heads, 512, 128) would have made keys and
    values from the cache.
    """
    head_dim, rank = q_nope.shape[-1] + q_rope.shape[-1], w_k.shape[-1]
    q = torch.cat([torch.einsum("bihd,hdc->bihc", q_nope, w_k), q_rope], dim=-1)
    values, scale = cache[..., :rank], head_dim**-0.5
    o = tw.attention(q, cache, values, causal=True, softmax_scale=scale)
    return torch.einsum("bihc,hcd->bihd", o, w_v)


def packed(q, k, v, cu_seqlens):
    """q, k, v (total, heads, head_dim).

    Document n is rows cu_seqlens[n] to cu_seqlens[n + 1].
    """
    return tw.attention_varlen(q, k, v, cu_seqlens, causal=True)


def packed_ids(q, k, v, ids):
    """ids (batch, seqlen): the document of each token."""
    return tw.attention(q, k, v, mask=tw.causal() & tw.documents(ids))


def bigbird(q, k, v, random, lengths, block=64):
    """random (heads_q, blocks, blocks), bool: a few for each row of blocks.

    Each block also sees its neighbours, the first and the last block.
    """
    n = random.shape[-1]
    near = tw.local_global(n, n, local=1, globals_=1, device=q.device)
    last = torch.arange(n, device=q.device) == n - 1
    pattern = near | last | last[:, None] | random
    mask = tw.block_sparse(pattern, block, block) & tw.key_lengths(lengths)
    return tw.attention(q, k, v, mask=mask)


def sparse_latent(q, latent, tokens, head_dim_v=512):
    """latent (batch, seqlen, 1, 576): keys, of which 512 numbers are values.

    tokens (batch, 1, seqlen, 2048), int: what an indexer chose.
    """
    v = latent[..., :head_dim_v]
    mask = tw.causal() & tw.selected(tokens)
    return tw.attention(q, latent, v, mask=mask, softmax_scale=192**-0.5)


def native_sparse(q, k, v, blocks, block=64):
    """Of its three attentions the one over selected blocks.

    blocks (batch, heads_k, seqlen, 16), int: those that the heads of a group
    share for each query, its own block among them.
    """
    mask = tw.causal() & tw.selected(blocks, block)
    return tw.attention(q, k, v, mask=mask)


def moba(q, k, v, blocks, block=4096):
    """blocks (batch, heads_q, seqlen, 12), int: one is the query's own block.

    Each query head chooses, so that each needs a key head.
    """
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    mask = tw.causal() & tw.selected(blocks, block)
    return tw.attention(q, k, v, mask=mask)


# -- Vision and biology --------------------------------------------------------------------------------------------


def vit(q, k, v):
    return tw.attention(q, k, v)


def swin(q, k, v, table, window=7, shift=3):
    """q, k, v (batch, rows, columns, heads, head_dim).

    table (heads, 2 window - 1, 2 window - 1): a bias by distance.
    """
    (batch, rows, columns), w = q.shape[:3], window

    def split(x):  # (batch, rows, columns, …) -> (batch * windows, w * w, …)
        x = x.unflatten(2, (-1, w)).unflatten(1, (-1, w)).transpose(2, 3)
        return x.flatten(3, 4).flatten(0, 2)

    def region(size):
        # The shift moves the first rows behind the last ones, into the same
        # window: they do not see each other.
        position = torch.arange(size, device=q.device)
        return (position >= size - w).int() + (position >= size - shift).int()

    def same(b, h, i, j):
        n = b % len(regions)
        return tw.lookup(regions, n, i) == tw.lookup(regions, n, j)

    place = torch.arange(w * w, device=q.device)
    down, right = (x[:, None] - x + w - 1 for x in (place // w, place % w))
    bias = table[:, down, right]  # once, for all windows
    regions = 3 * region(rows)[:, None] + region(columns)
    regions = split(regions[None])  # (windows, w * w)
    shifted = (split(x.roll((-shift, -shift), (1, 2))) for x in (q, k, v))
    o = tw.attention(*shifted, mask=same if shift else None, score=bias)
    o = (
        o.unflatten(1, (w, w))
        .unflatten(0, (batch, rows // w, columns // w))
        .transpose(2, 3)
        .flatten(3, 4)
        .flatten(1, 2)
    )
    return o.roll((shift, shift), (1, 2))


def msa_row(q, k, v, pair_bias, seen):
    """Rows of an alignment are the batch; they share one bias and its gradient.

    pair_bias (heads, residues, residues);
    seen (rows, residues), bool: the residues that a row has.
    """
    return tw.attention(q, k, v, mask=seen[:, None, None, :], score=pair_bias)


def triangle(q, k, v, bias, ending=False):
    """Around the starting node, or the ending one.

    q, k, v (N, N, heads, head_dim) and bias (N, N, heads), of the same pairs.
    """
    if ending:
        q, k, v, bias = (x.transpose(0, 1) for x in (q, k, v, bias))
    o = tw.attention(q, k, v, score=tw.bias(bias.permute(2, 0, 1)))
    return o.transpose(0, 1) if ending else o


def video_sparse(q, k, v, cubes, cube=64):
    """Tokens in an order in which a cube of 4 x 4 x 4 is a block of 64.

    cubes (batch, heads, seqlen / 64, 32), int: those of keys for each cube of
    queries.
    """
    mask = tw.selected(cubes, cube, block_q=cube)
    return tw.attention(q, k, v, mask=mask)


# -- The rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Row:
    """One architecture.

    Attributes:
        call: the function that the page shows, after ``helpers``, which it calls.
        models, papers: what it stands for.
        instead: what a naive implementation writes.
        full, small: its arguments, at the model's size and at one for tests: the shape of a floating tensor, another
            tensor as it is, or a number.
    """

    call: Callable
    title: str
    models: str
    papers: str
    instead: str
    full: dict
    small: dict
    helpers: tuple[Callable, ...] = ()

    @property
    def name(self) -> str:
        return self.call.__name__.replace("_", "-")


def arguments(sizes: dict, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
    """The arguments that ``sizes`` describes: normal numbers that want a gradient; on "meta", no numbers."""
    generator = torch.Generator().manual_seed(0)

    def make(size):
        if isinstance(size, torch.Tensor):
            return size.to(device)
        if not isinstance(size, tuple):
            return size
        x = torch.empty(size, device=device) if device == "meta" else torch.randn(size, generator=generator).to(device)
        return x.to(dtype).requires_grad_()

    return {name: make(size) for name, size in sizes.items()}


def _qkv(q: tuple, k: tuple | None = None, v: tuple | None = None) -> dict:
    return {"q": q, "k": k or q, "v": v or k or q}


def _random_blocks(heads: int, blocks: int, each: int) -> torch.Tensor:
    """bool (heads, blocks, blocks): ``each`` blocks of every row."""
    order = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return order < each


def _random_entries(batch: int, heads: int, rows: int, blocks: int, each: int) -> torch.Tensor:
    """int64 (batch, heads, rows, each), numbers of blocks: some are -1, some stand twice, one is the row's own."""
    entries = torch.randint(-1, blocks, (batch, heads, rows, each), generator=torch.Generator().manual_seed(0))
    entries[..., 0] = torch.arange(rows) * blocks // rows
    return entries


ROWS = (
    Row(
        causal_lm,
        "Causal language model",
        "GPT-2, Llama 2 7B",
        "Radford et al. 2019; Touvron et al. 2023, arXiv:2307.09288",
        "all of s, of which it then fills half with −∞",
        _qkv((4, 4096, 32, 128)),
        _qkv((2, 37, 4, 8)),
    ),
    Row(
        encoder,
        "Encoder with padding",
        "BERT base",
        "Devlin et al. 2019, arXiv:1810.04805",
        "s plus a mask of large negative numbers, through which a NaN of the padding passes",
        _qkv((32, 512, 12, 64)) | {"lengths": torch.arange(512, 0, -16)},
        _qkv((3, 37, 4, 8)) | {"lengths": torch.tensor([37, 20, 1])},
    ),
    Row(
        t5_encoder,
        "Encoder–decoder: the encoder, with bucketed relative bias",
        "T5 base",
        "Raffel et al. 2020, arXiv:1910.10683",
        "a (1, heads, seqlen, seqlen) bias gathered from the table, kept for the backward, which scatters as much back",
        _qkv((8, 512, 12, 64)) | {"table": (32, 12), "lengths": torch.arange(512, 0, -64)},
        _qkv((2, 41, 3, 8)) | {"table": (32, 3), "lengths": torch.tensor([41, 30])},
        (t5_buckets, t5_bias),
    ),
    Row(
        t5_decoder,
        "Encoder–decoder: the decoder",
        "T5 base",
        "Raffel et al. 2020, arXiv:1910.10683",
        "the bias as above, with the causal −∞ added into it",
        _qkv((8, 512, 12, 64)) | {"table": (32, 12)},
        _qkv((1, 150, 2, 8)) | {"table": (32, 2)},
    ),
    Row(
        t5_cross,
        "Encoder–decoder: cross-attention",
        "T5 base",
        "Raffel et al. 2020, arXiv:1910.10683",
        "a padding mask expanded to every query",
        _qkv((8, 128, 12, 64), (8, 512, 12, 64)) | {"lengths": torch.arange(512, 0, -64)},
        _qkv((2, 13, 3, 8), (2, 41, 3, 8)) | {"lengths": torch.tensor([41, 5])},
    ),
    Row(
        prefix_lm,
        "Prefix language model",
        "PaliGemma 3B, UniLM",
        "Beyer et al. 2024, arXiv:2407.07726; Dong et al. 2019, arXiv:1905.03197",
        "a mask of its own for every row of the batch, (batch, 1, seqlen, seqlen)",
        _qkv((8, 1024, 8, 256), (8, 1024, 1, 256)) | {"prefix": torch.arange(256, 320, 8)},
        _qkv((3, 37, 4, 8), (3, 37, 1, 8)) | {"prefix": torch.tensor([11, 37, 0])},
    ),
    Row(
        mistral,
        "Sliding window",
        "Mistral 7B",
        "Jiang et al. 2023, arXiv:2310.06825",
        "all of s, and a banded mask over it: the window saves nothing",
        _qkv((1, 32768, 32, 128), (1, 32768, 8, 128)),
        _qkv((2, 53, 4, 8), (2, 53, 2, 8)) | {"window": 9},
    ),
    Row(
        gemma2,
        "Sliding window and softcap",
        "Gemma 2 9B",
        "Gemma Team 2024, arXiv:2408.00118",
        "s, tanh(s / cap), the masked s and P: four matrices, of which autograd keeps three",
        _qkv((1, 8192, 16, 256), (1, 8192, 8, 256)),
        _qkv((2, 53, 4, 8), (2, 53, 2, 8)) | {"window": 11, "cap": 1.5},
    ),
    Row(
        gpt_oss,
        "Attention sinks",
        "GPT-OSS 20B and 120B",
        "OpenAI 2025, arXiv:2508.10925; Xiao et al. 2023, arXiv:2309.17453",
        "s with one column more, a softmax over it, and a copy of P without the column",
        _qkv((1, 8192, 64, 64), (1, 8192, 8, 64)) | {"sink": (64,)},
        _qkv((2, 53, 4, 8), (2, 53, 2, 8)) | {"sink": (4,), "window": 9},
    ),
    Row(
        alibi,
        "Linear biases (ALiBi)",
        "BLOOM 176B, MPT",
        "Press et al. 2022, arXiv:2108.12409; Le Scao et al. 2022, arXiv:2211.05100",
        "a (heads, seqlen, seqlen) tensor of slope times distance",
        _qkv((1, 2048, 112, 128)) | {"slopes": (112,)},
        _qkv((2, 37, 4, 8)) | {"slopes": (4,)},
    ),
    Row(
        grouped,
        "Grouped queries, more keys than queries",
        "Llama 3 70B",
        "Ainslie et al. 2023, arXiv:2305.13245; Grattafiori et al. 2024, arXiv:2407.21783",
        "k and v repeated for every query head",
        _qkv((1, 2048, 64, 128), (1, 8192, 8, 128)),
        _qkv((2, 23, 6, 8), (2, 61, 2, 8)),
    ),
    Row(
        multi_query,
        "Multi-query",
        "Falcon 7B, PaLM",
        "Shazeer 2019, arXiv:1911.02150; Almazrouei et al. 2023, arXiv:2311.16867",
        "k and v repeated for every query head, 71 times",
        _qkv((4, 2048, 71, 64), (4, 2048, 1, 64)),
        _qkv((2, 37, 5, 8), (2, 37, 1, 8)),
    ),
    Row(
        mla,
        "Multi-head latent attention, as trained",
        "DeepSeek-V2 and V3",
        "DeepSeek-AI 2024, arXiv:2405.04434 and 2412.19437",
        "v padded from 128 to 192 where a library wants one head_dim, and o cut back",
        _qkv((1, 4096, 128, 192), v=(1, 4096, 128, 128)),
        _qkv((2, 37, 4, 12), v=(2, 37, 4, 8)),
    ),
    Row(
        mla_absorbed,
        "Multi-head latent attention, absorbed",
        "DeepSeek-V2 and V3",
        "DeepSeek-AI 2024, arXiv:2405.04434 and 2412.19437",
        "keys and values of 128 heads, made again from the cache at every step",
        {
            "q_nope": (8, 1, 128, 128),
            "q_rope": (8, 1, 128, 64),
            "cache": (8, 32768, 1, 576),
            "w_k": (128, 128, 512),
            "w_v": (128, 512, 128),
        },
        {
            "q_nope": (2, 3, 4, 6),
            "q_rope": (2, 3, 4, 2),
            "cache": (2, 40, 1, 22),
            "w_k": (4, 6, 20),
            "w_v": (4, 20, 6),
        },
    ),
    Row(
        packed,
        "Packed documents, by their ends",
        "Llama 3 (its mask between documents), packed BERT",
        "Krell et al. 2021, arXiv:2107.02027; Grattafiori et al. 2024, arXiv:2407.21783",
        "padding to the longest document, or a block-diagonal mask over total × total",
        _qkv((8192, 32, 128), (8192, 8, 128))
        | {"cu_seqlens": torch.tensor([0, 700, 701, 2800, 3000, 7000, 8192], dtype=torch.int32)},
        _qkv((53, 4, 8), (53, 2, 8)) | {"cu_seqlens": torch.tensor([0, 20, 21, 21, 50], dtype=torch.int32)},
    ),
    Row(
        packed_ids,
        "Packed documents, by their ids",
        "Llama 3",
        "Grattafiori et al. 2024, arXiv:2407.21783",
        "a (batch, 1, seqlen, seqlen) mask of equal ids",
        _qkv((2, 8192, 32, 128), (2, 8192, 8, 128)) | {"ids": torch.arange(16384).view(2, -1) // 700},
        _qkv((2, 37, 4, 8), (2, 37, 2, 8)) | {"ids": torch.arange(74).view(2, -1) // 11},
    ),
    Row(
        bigbird,
        "Block-sparse: local, global and random",
        "BigBird base",
        "Zaheer et al. 2020, arXiv:2007.14062",
        "gathered copies of the random blocks' keys and values, and five products that are joined again",
        _qkv((4, 4096, 12, 64)) | {"random": _random_blocks(12, 64, 3), "lengths": torch.tensor([4096, 4000, 100, 3])},
        _qkv((2, 61, 3, 8)) | {"random": _random_blocks(3, 8, 2), "lengths": torch.tensor([61, 50]), "block": 8},
    ),
    Row(
        sparse_latent,
        "Selected tokens, latent",
        "DeepSeek-V3.2",
        "DeepSeek-AI 2025, arXiv:2512.02556",
        "gathered copies of each query's keys, or all of s and a mask of its size",
        {"q": (1, 4096, 128, 576), "latent": (1, 4096, 1, 576), "tokens": torch.arange(2048).expand(1, 1, 4096, -1)},
        {"q": (2, 37, 3, 18), "latent": (2, 37, 1, 18), "tokens": _random_entries(2, 1, 37, 37, 9), "head_dim_v": 16},
    ),
    Row(
        native_sparse,
        "Selected blocks of a group's heads",
        "NSA, as in its paper",
        "Yuan et al. 2025, arXiv:2502.11089",
        "gathered copies of each query's blocks, or all of s and a mask of its size",
        _qkv((1, 8192, 64, 192), (1, 8192, 4, 192), (1, 8192, 4, 128))
        | {"blocks": torch.arange(16).expand(1, 4, 8192, -1)},
        _qkv((2, 40, 6, 8), (2, 40, 2, 8), (2, 40, 2, 6)) | {"blocks": _random_entries(2, 2, 40, 10, 3), "block": 4},
    ),
    Row(
        moba,
        "Selected blocks of each head",
        "MoBA (Llama-8B-1M-MoBA, at 128k)",
        "Lu et al. 2025, arXiv:2502.13189",
        "k and v repeated for every query head, and queries sorted by the blocks that they chose",
        _qkv((1, 131072, 32, 128), (1, 131072, 8, 128)) | {"blocks": torch.arange(12).expand(1, 32, 131072, -1)},
        _qkv((2, 40, 4, 8), (2, 40, 2, 8)) | {"blocks": _random_entries(2, 4, 40, 5, 2), "block": 8},
    ),
    Row(
        video_sparse,
        "Selected cubes of a video",
        "VSA, on Wan 2.1 1.3B",
        "Zhang et al. 2025, arXiv:2505.13389",
        "all of s and a mask of its size",
        _qkv((1, 16384, 12, 128)) | {"cubes": torch.arange(32).expand(1, 12, 256, -1)},
        _qkv((2, 48, 3, 8)) | {"cubes": _random_entries(2, 3, 6, 6, 2), "cube": 8},
    ),
    Row(
        vit,
        "Vision transformer",
        "ViT-B/16",
        "Dosovitskiy et al. 2021, arXiv:2010.11929",
        "s and P, of 197 × 197 for every image and head",
        _qkv((64, 197, 12, 64)),
        _qkv((2, 29, 3, 8)),
    ),
    Row(
        swin,
        "Shifted windows",
        "Swin-T, its first stage",
        "Liu et al. 2021, arXiv:2103.14030",
        "a (heads, 49, 49) bias, and a mask of −100 per window that is added to s reshaped by window",
        _qkv((32, 56, 56, 3, 32)) | {"table": (3, 13, 13)},
        _qkv((2, 9, 6, 2, 8)) | {"table": (2, 5, 5), "window": 3, "shift": 1},
    ),
    Row(
        msa_row,
        "Pair bias: rows of an alignment",
        "AlphaFold 2 (algorithm 7)",
        "Jumper et al. 2021, doi:10.1038/s41586-021-03819-2",
        "(rows, heads, residues, residues) scores, the cube that limits the size of a protein",
        _qkv((512, 256, 8, 32)) | {"pair_bias": (8, 256, 256), "seen": torch.ones(512, 256, dtype=torch.bool)},
        _qkv((5, 23, 2, 8)) | {"pair_bias": (2, 23, 23), "seen": torch.arange(115).view(5, 23) % 7 != 3},
    ),
    Row(
        triangle,
        "Pair bias: triangles",
        "AlphaFold 2 (algorithms 13 and 14), AlphaFold 3, Boltz",
        "Jumper et al. 2021, doi:10.1038/s41586-021-03819-2",
        "scores for every triple of residues, (N, heads, N, N)",
        _qkv((384, 384, 4, 32)) | {"bias": (384, 384, 4), "ending": True},
        _qkv((11, 11, 2, 8)) | {"bias": (11, 11, 2), "ending": True},
    ),
)
