"""`tilewise explain`: which backend would run an attention of these sizes, and why not the others."""

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from tilewise.cli import checkout

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class ExplainOptions:
    """One attention call, by its sizes."""

    batch: Annotated[int, typer.Option(help="Sequences.")] = 1
    seqlen: Annotated[int, typer.Option(help="Queries, and keys unless --seqlen-k says otherwise.")] = 4096
    seqlen_k: Annotated[int | None, typer.Option(help="Keys.")] = None
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8
    heads_k: Annotated[int | None, typer.Option(help="Key and value heads; default: as many as --heads.")] = None
    head_dim: Annotated[int, typer.Option(help="Width of q and k.")] = 64
    head_dim_v: Annotated[int | None, typer.Option(help="Width of v and o; default: as --head-dim.")] = None
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float32"
    causal: Annotated[bool, typer.Option("--causal", help="Hide the keys after a query.")] = False
    window: Annotated[int | None, typer.Option(help="Keep only this many keys before a query, and its own.")] = None
    mask: Annotated[
        str, typer.Option(help='A mask, such as "causal() & key_lengths(1000)"; tilewise show draws it.')
    ] = ""
    score: Annotated[str, typer.Option(help='A score, such as "softcap(30)".')] = ""
    dropout: Annotated[float, typer.Option(help="Probability of dropping a pair.")] = 0.0
    backward: Annotated[bool, typer.Option("--backward", help="Include the gradients.")] = False
    backend: Annotated[str | None, typer.Option(help="Use this backend, or say why it cannot run the call.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


def explain(options: ExplainOptions) -> int:
    """Say which backend would run a call, with which tiles and traffic, and why the others would not. Computes nothing."""
    import tilewise as tw

    sizes = ("batch", "seqlen", "seqlen_k", "heads", "heads_k", "head_dim", "head_dim_v")
    negative = [name for name in sizes if (getattr(options, name) or 0) < 0]
    if negative:
        raise ValueError(f"--{negative[0].replace('_', '-')} is negative")
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype {options.dtype}: allowed are {', '.join(DTYPES)}")
    told = tw.explain(*_tensors(options), **_keywords(options))
    print(json.dumps(told.as_dict()) if options.as_json else told)
    return 0


def _keywords(o: ExplainOptions) -> dict:
    """Return the keywords of the call, tensors of its mask and score on its device."""
    import tilewise as tw
    from tilewise.pictures.reading import read_mask, read_score

    device = checkout.choose_device(o.device)
    masks = [read_mask(o.mask)] if o.mask else []
    masks += [] if o.window is None else [tw.window(left=o.window, right=0)]
    score = read_score(o.score) if o.score else None
    mask = masks[0] & masks[1] if len(masks) > 1 else next(iter(masks), None)
    mask, score = (
        None if x is None else type(x)(x.text, tuple([leaf.to(device) for leaf in x.leaves])) for x in (mask, score)
    )
    return {"causal": o.causal, "mask": mask, "score": score, "dropout_p": o.dropout, "backend": o.backend}


def _tensors(o: ExplainOptions) -> list:
    """q, k, v of those shapes without memory: explaining reads no values."""
    import torch

    seqlen_k = o.seqlen if o.seqlen_k is None else o.seqlen_k
    heads_k = o.heads if o.heads_k is None else o.heads_k
    head_dim_v = o.head_dim if o.head_dim_v is None else o.head_dim_v
    shapes = (
        (o.batch, o.seqlen, o.heads, o.head_dim),
        (o.batch, seqlen_k, heads_k, o.head_dim),
        (o.batch, seqlen_k, heads_k, head_dim_v),
    )
    # Fake tensors have the strides of real ones and no memory.
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = checkout.choose_device(o.device)
    make = {"dtype": getattr(torch, o.dtype), "device": device, "requires_grad": o.backward}
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty(shape, **make) for shape in shapes]
