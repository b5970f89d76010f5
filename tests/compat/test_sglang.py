"""SGLang's backend: an engine's steps through SGLang's pool of keys, against float64. Where SGLang's files can be imported the classes
are its own and more is asked of them; elsewhere small stand-ins carry its interfaces. Its wheel, unpacked on PYTHONPATH, is enough.
"""

from __future__ import annotations

import importlib.util
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.compat import stand_ins
from tests.compat.eager import normal
from tests.compat.served import STEPS, Served, Step

RELEASED = importlib.util.find_spec("sglang") is not None
if RELEASED:
    stand_ins.instead_of_torchvision()
with nullcontext() if RELEASED else stand_ins.standing(stand_ins.SGLANG):
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from tilewise.compat import sglang as door

H, HK, D, CONTEXT = 4, 2, 32, 64
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
released = pytest.mark.skipif(not RELEASED, reason="the files of sglang are not installed")


def attention(**changes) -> SimpleNamespace:
    """A layer as models make it."""
    own = {
        "layer_id": 0,
        "tp_q_head_num": H,
        "tp_k_head_num": HK,
        "qk_head_dim": D,
        "v_head_dim": D,
        "scaling": D**-0.5,
    }
    plain = {"logit_cap": 0.0, "logit_capping_method": "tanh", "sliding_window_size": -1, "is_cross_attention": False}
    rest = {"attn_type": AttentionType.DECODER, "xai_temperature_len": -1, "k_scale": None, "v_scale": None}
    return SimpleNamespace(**own | plain | rest | changes)


def pool_of(served: Served, page: int, hnd: bool = False, dtype: torch.dtype | None = None):
    """A pool of one layer, poisoned with NaN."""
    sizes = {
        "size": 256,
        "page_size": page,
        "dtype": dtype or served.dtype,
        "head_num": served.heads_k,
        "head_dim": served.dim,
    }
    if RELEASED:
        from sglang.srt.environ import envs

        with envs.SGLANG_USE_HND_KVCACHE.override(hnd):
            pool = memory_pool.MHATokenToKVPool(**sizes, layer_num=1, device="cpu", enable_memory_saver=False)
    else:
        pool = memory_pool.MHATokenToKVPool(**sizes, use_hnd=hnd)
    for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
        buffer.view(torch.uint8).fill_(255)
    return pool


class Engine:
    """A pool, the table of its slots in another order of pages, and the batches of SGLang's scheduler."""

    def __init__(self, served: Served, page: int = 4, **pool):
        self.served, self.page = served, page
        pages = torch.randperm(4 * CONTEXT // page, generator=torch.Generator().manual_seed(0)).view(4, -1)
        slots = (pages.unsqueeze(-1) * page + torch.arange(page)).flatten(1)
        self.slots = slots[[2, 0, 3, 1]].int()  # a sequence's row of the table is not its number
        self.rows = torch.arange(4)
        self.runner = SimpleNamespace(
            token_to_kv_pool=pool_of(served, page, **pool), req_to_token_pool=SimpleNamespace(req_to_token=self.slots),
            page_size=page, use_mla_backend=False, model_config=SimpleNamespace(is_encoder_decoder=False),
        )  # fmt: skip

    def backend(self):
        return ATTENTION_BACKENDS["tilewise"](self.runner)

    def batch(self, step: Step, **changes) -> SimpleNamespace:
        lengths, news = step.lengths.long(), step.starts.diff().long()
        written = [self.slots[b, begin:end] for b, begin, end in step.rows]
        decodes = bool((news == 1).all())
        told = {
            "forward_mode": ForwardMode.DECODE if decodes else ForwardMode.MIXED, "batch_size": len(lengths), "seq_lens": lengths,
            "seq_lens_cpu": lengths, "req_pool_indices": torch.tensor(step.sequences), "out_cache_loc": torch.cat(written).long(),
            "extend_seq_lens": None if decodes else news, "spec_info": None, "encoder_lens": None, "out_cache_loc_is_physical": False,
        }  # fmt: skip
        return SimpleNamespace(**told | changes)

    def run(self, backend, layer, step: Step, in_graph: bool = False, **options) -> torch.Tensor:
        s, batch = self.served, self.batch(step)
        backend.init_forward_metadata_in_graph(batch) if in_graph else backend.init_forward_metadata(batch)
        q, k, v = step.new(s.q).flatten(1), step.new(s.k), step.new(s.v)
        return backend.forward(q, k, v, layer, batch, **options)


@pytest.fixture(autouse=True)
def ranks(monkeypatch) -> SimpleNamespace:
    """How many ranks share a sequence, which a server says before it makes a backend."""
    told = SimpleNamespace(attn_dcp_size=1, attn_cp_size=1)
    monkeypatch.setattr(door, "get_parallel", lambda: told)
    return told


@pytest.fixture(autouse=True)
def _registered():
    door.register()
    door.register()
    yield
    ATTENTION_BACKEND_CHOICES.remove("tilewise")
    del ATTENTION_BACKENDS["tilewise"]


DECODING = (1, 1, 1, 1)  # a last step, in which all decode
SINKS = normal(H, seed=5)
OPTIONS = {  # of a layer, of the call, and what they mean
    "causal": ({}, {}, {}),
    "scale": ({"scaling": 0.3}, {}, {"scale": 0.3}),
    "window": ({"sliding_window_size": 9}, {}, {"kept": lambda i, j: (j <= i) & (j >= i - 9)}),
    "softcap": ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": SINKS}, {"sinks": SINKS}),
    "encoder": ({"attn_type": AttentionType.ENCODER_ONLY}, {}, {"kept": lambda i, j: j < 1000}),
    "all": (
        {"sliding_window_size": 20, "logit_cap": 2.0},
        {"sinks": SINKS.bfloat16()},
        {"softcap": 2.0, "sinks": SINKS.bfloat16(), "kept": lambda i, j: (j <= i) & (j >= i - 20)},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_prompts_pieces_and_decoding_in_one_batch(name, dtype):
    layer, call, means = OPTIONS[name]
    engine = Engine(Served(dtype=dtype, steps_of=(*STEPS, DECODING)))
    backend = engine.backend()
    for step in engine.served.steps():
        step.judge(engine.run(backend, attention(**layer), step, **call), **means)


@pytest.mark.parametrize("in_graph", [False, True], ids=["outside", "in-a-graph"])
@pytest.mark.parametrize(("page", "hnd"), [(1, False), (16, False), (16, True)])
def test_pages_of_any_size_are_read_in_place(page, hnd, in_graph):
    engine = Engine(Served(steps_of=(*STEPS, DECODING)), page, hnd=hnd)
    backend = engine.backend()
    for step in engine.served.steps():
        step.judge(engine.run(backend, attention(), step, in_graph))
    cache = backend._cache(attention(), *backend.forward_metadata[:0:-1])
    kept = [
        x.untyped_storage().data_ptr()
        for x in (engine.runner.token_to_kv_pool.k_buffer[0], engine.runner.token_to_kv_pool.v_buffer[0])
    ]
    assert [x.untyped_storage().data_ptr() for x in cache[:2]] == kept


@pytest.mark.parametrize("scaled", [False, True], ids=["no-scale", "scales"])
def test_a_cache_in_8_bits(scaled):
    engine = Engine(Served(dtype=torch.bfloat16), 16, dtype=torch.float8_e4m3fn)
    scales = (torch.tensor([0.5]), torch.tensor([0.25])) if scaled else (None, None)
    layer, backend = attention(k_scale=scales[0], v_scale=scales[1]), engine.backend()

    def kept(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        scale = 1 if scale is None else scale
        return ((x / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16()

    before = [x.clone() for x in engine.served.k]
    keys = [
        [kept(x, scale) for x in tensors]
        for tensors, scale in zip((engine.served.k, engine.served.v), scales, strict=True)
    ]
    for step in engine.served.steps():
        step.judge(engine.run(backend, layer, step), keys=keys)
    assert all(torch.equal(x, y) for x, y in zip(before, engine.served.k, strict=True))


def test_a_layer_may_read_what_another_wrote():
    engine = Engine(Served())
    backend = engine.backend()
    for step in engine.served.steps():
        written = engine.run(backend, attention(), step)
        step.judge(engine.run(backend, attention(), step, save_kv_cache=False))
        assert torch.equal(written, engine.run(backend, attention(), step, save_kv_cache=False))


def test_a_batch_of_nothing():
    engine = Engine(Served())
    nothing = torch.empty(0, dtype=torch.long)
    idle = {"seq_lens": nothing, "seq_lens_cpu": nothing, "req_pool_indices": nothing, "forward_mode": ForwardMode.IDLE}
    backend, step = engine.backend(), next(iter(engine.served.steps()))
    backend.init_forward_metadata(engine.batch(step, **idle))
    assert [x.shape[0] for x in backend.forward_metadata] == [1, 0, 0]


def test_several_ranks_of_a_sequence_are_refused(ranks):
    ranks.attn_dcp_size = ranks.attn_cp_size = 2
    with pytest.raises(NotImplementedError, match=r"(?s)attn_dcp_size: .*--dcp-size at 1.*attn_cp_size: "):
        Engine(Served()).backend()


def test_models_that_are_not_honoured_are_refused_by_name():
    engine = Engine(Served())
    engine.runner.use_mla_backend, engine.runner.model_config.is_encoder_decoder = True, True
    with pytest.raises(NotImplementedError, match=r"(?s)use_mla_backend: latent.*is_encoder_decoder: cross attention"):
        engine.backend()


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (MagicMock(spec=BaseSWAKVPool, dtype=torch.float32, kv_cache_layout="nhd"), "--disable-hybrid-swa-memory"),
        (SimpleNamespace(dtype=torch.float8_e5m2, kv_cache_layout="vectorized_5d"), r"(?s)dtype: .*layout: "),
    ],
    ids=["windows", "layout"],
)
def test_pools_that_are_not_honoured_are_refused_by_name(pool, says):
    engine = Engine(Served())
    engine.runner.token_to_kv_pool = pool
    with pytest.raises(NotImplementedError, match=says):
        engine.backend()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"forward_mode": ForwardMode.TARGET_VERIFY, "spec_info": "tree"},
            r"(?s)forward_mode: .*spec_info: speculative",
        ),
        ({"encoder_lens": torch.ones(2)}, "encoder_lens: cross attention"),
    ],
    ids=["speculation", "encoder"],
)
def test_batches_that_are_not_honoured_are_refused_by_name(changes, says):
    engine = Engine(Served())
    with pytest.raises(NotImplementedError, match=says):
        engine.backend().init_forward_metadata(engine.batch(next(iter(engine.served.steps())), **changes))


@pytest.mark.parametrize(
    ("layer", "call", "says"),
    [
        ({"is_cross_attention": True}, {}, "is_cross_attention"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}, "attn_type: decoder and encoder_only"),
        ({"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 3}, {}, "an encoder has no window"),
        ({"logit_cap": 2.0, "logit_capping_method": "sigmoid"}, {}, "logit_capping_method: tanh"),
        ({"xai_temperature_len": 8}, {"k_rope": torch.ones(1)}, r"(?s)xai_temperature_len: .*others: no such"),
    ],
    ids=["cross", "bidirectional", "window", "cap", "unknown"],
)
def test_layers_that_are_not_honoured_are_refused_by_name(layer, call, says):
    engine = Engine(Served())
    with pytest.raises(NotImplementedError, match=says):
        engine.run(engine.backend(), attention(**layer), next(iter(engine.served.steps())), **call)


def test_the_package_names_its_door_where_sglang_looks_for_plugins():
    entries = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    assert entries["sglang.srt.plugins"] == {"tilewise": f"{door.__name__}:{door.register.__name__}"}


# -- The released package ----------------------------------------------------------------------------------------------


@released
def test_sglangs_command_line_takes_the_name():
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = ["--model-path", "model", "--attention-backend", "tilewise"]
    assert parser.parse_args(arguments).attention_backend == "tilewise"


@released
def test_sglangs_attention_layer():
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    engine = Engine(Served(dtype=torch.bfloat16, steps_of=(*STEPS, DECODING)), 16)
    layer, backend, s = (
        RadixAttention(H, D, D**-0.5, HK, 0, logit_cap=2.0, sliding_window_size=20),
        engine.backend(),
        engine.served,
    )
    means = {"softcap": 2.0, "sinks": SINKS, "kept": lambda i, j: (j <= i) & (j >= i - 20)}
    for step in s.steps():
        told = vars(engine.batch(step))
        news = told.pop("extend_seq_lens")
        batch = ForwardBatch(input_ids=None, seq_lens_sum=int(step.lengths.sum()), **told)
        batch.extend_seq_lens = news
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata(batch)
            o = layer(step.new(s.q).flatten(1), step.new(s.k).flatten(1), step.new(s.v).flatten(1), batch, sinks=SINKS)
        step.judge(o, **means)
