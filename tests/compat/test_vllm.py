"""vLLM's backend: an engine's steps through its builder and implementation, against float64. Where vLLM's files can be imported the
classes are its own and more is asked of them; elsewhere small stand-ins carry its interfaces. Its wheel, unpacked on PYTHONPATH, is enough.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.compat import stand_ins
from tests.compat.eager import normal
from tests.compat.served import Served, Step

RELEASED = importlib.util.find_spec("vllm") is not None
if RELEASED:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
with nullcontext() if RELEASED else stand_ins.standing(stand_ins.VLLM):
    from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tilewise.compat import vllm as door

H, HK, D, PAGE = 4, 2, 32, 16
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
released = pytest.mark.skipif(not RELEASED, reason="the files of vllm are not installed")
# How a layer's (blocks, heads, rows, content) lies in memory: the order of layers, blocks, heads, rows, content.
LAYOUTS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4)}
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))


def config(**changes) -> SimpleNamespace:
    """What of vLLM's configuration the builder asks for."""
    options = {"enable_chunked_prefill": False, "enable_prefix_caching": False, "speculative_config": None} | changes
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=options["enable_chunked_prefill"]),
        cache_config=SimpleNamespace(enable_prefix_caching=options["enable_prefix_caching"]),
        speculative_config=options["speculative_config"],
    )


def builder(**changes):
    return door.TilewiseBackend.get_builder_cls()(None, ["layer"], config(**changes), torch.device("cpu"))


def attention(**options):
    return door.TilewiseBackend.get_impl_cls()(H, D, options.pop("scale", D**-0.5), HK, **options)


class Engine:
    """A layer's cache, poisoned with NaN, its block table in another order, and the steps that vLLM's model runner makes."""

    def __init__(self, served: Served, layout: str = "LBHNC", dtype: torch.dtype | None = None):
        self.served, blocks = served, 24
        shape = [2, blocks, served.heads_k, PAGE, served.dim + served.dim_v]
        order = LAYOUTS[layout]
        memory = torch.full([shape[n] for n in order], torch.nan, dtype=dtype or served.dtype)
        self.cache = memory.permute([order.index(n) for n in range(5)])[1]
        if dtype is not None:
            self.cache = self.cache.view(torch.uint8)  # as vLLM keeps numbers of 8 bits
        self.table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).view(4, 6).int()

    def told(self, step, padding: int = 3, **metadata) -> CommonAttentionMetadata:
        """What vLLM's model runner says of a step. It pads the rows."""
        starts, lengths, table = step.starts, step.lengths, self.table[step.sequences]
        at = [(b, torch.arange(begin, end)) for b, begin, end in step.rows]
        slots = torch.cat([self.table[b, j // PAGE].long() * PAGE + j % PAGE for b, j in at])
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(lengths), num_actual_tokens=len(slots),
            max_query_len=int(starts.diff().max()), max_seq_len=int(lengths.max()), block_table_tensor=table,
            slot_mapping=torch.nn.functional.pad(slots, (0, padding), value=-1), **metadata,
        )  # fmt: skip

    def rows(self, step, padding: int = 3) -> list[torch.Tensor]:
        """The step's q, k and v, padded."""
        s = self.served
        return [torch.nn.functional.pad(step.new(x), (0, 0, 0, 0, 0, padding)) for x in (s.q, s.k, s.v)]

    def run(self, layer, impl, make, step, **metadata) -> torch.Tensor:
        """Write and attend one step's rows; it returns those that are no padding."""
        said, (q, k, v) = self.told(step, **metadata), self.rows(step)
        batch, n = make.build(0, said), said.num_actual_tokens
        output = torch.full((*q.shape[:2], v.shape[2]), 7.0, dtype=q.dtype)
        impl.do_kv_cache_update(layer, k, v, self.cache, said.slot_mapping)
        assert impl.forward(layer, q, k, v, self.cache, batch, output) is output
        assert bool((output[n:] == 7).all())
        return output[:n]


SLOPES = [0.5, 0.25, 0.125, 0.0625]
OPTIONS = {  # of a layer, and what they mean
    "causal": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "window": ({"sliding_window": 9}, {"kept": lambda i, j: (j <= i) & (j > i - 9)}),
    "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "sinks": ({"sinks": normal(H, seed=5)}, {"sinks": normal(H, seed=5)}),
    "alibi": ({"alibi_slopes": SLOPES}, {"slopes": torch.tensor(SLOPES)}),
    "all": (
        {"sliding_window": 20, "logits_soft_cap": 2.0, "sinks": normal(H, seed=5).bfloat16(), "alibi_slopes": SLOPES},
        {
            "kept": lambda i, j: (j <= i) & (j > i - 20),
            "softcap": 2.0,
            "sinks": normal(H, seed=5).bfloat16(),
            "slopes": torch.tensor(SLOPES),
        },
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_prompts_pieces_and_decoding_in_one_batch(name, dtype):
    given, means = OPTIONS[name]
    engine, impl, make = Engine(Served(dtype=dtype)), attention(**given), builder()
    for step in engine.served.steps():
        step.judge(engine.run(LAYER, impl, make, step), **means)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_is_read_and_written_in_place_in_each_layout(layout):
    engine, impl, make = Engine(Served(dim_v=16), layout), attention(), builder()
    for step in engine.served.steps():
        step.judge(engine.run(LAYER, impl, make, step))
    read = impl._cache(LAYER, engine.cache, engine.table, engine.table[:, 0])
    assert {x.untyped_storage().data_ptr() for x in read[:2]} == {engine.cache.untyped_storage().data_ptr()}
    b, length = 1, engine.served.have[1]
    stored = engine.cache[engine.table[b].long()].transpose(1, 2).flatten(0, 1)
    assert torch.equal(stored[:length], torch.cat([engine.served.k[b], engine.served.v[b]], -1)[:length])
    assert bool(stored[length:].isnan().all())


@pytest.mark.parametrize("each_head", [False, True], ids=["one-scale", "a-scale-a-head"])
def test_a_cache_in_8_bits(each_head):
    scales = (
        (torch.tensor([0.5, 0.125]), torch.tensor([0.25, 0.5]))
        if each_head
        else (torch.tensor([0.5]), torch.tensor(0.25))
    )
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    engine, impl, make = (
        Engine(Served(dtype=torch.bfloat16), dtype=torch.float8_e4m3fn),
        attention(kv_cache_dtype="fp8"),
        builder(),
    )

    def kept(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scale = scale.view(-1, 1)
        return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16()

    keys = [
        [kept(x, scale) for x in tensors]
        for tensors, scale in zip((engine.served.k, engine.served.v), scales, strict=True)
    ]
    for step in engine.served.steps():
        step.judge(engine.run(layer, impl, make, step), keys=keys)


def test_queries_that_see_what_comes_after_them():
    engine, impl, make = Engine(Served()), attention(sliding_window=9), builder()
    for step in engine.served.steps():
        o = engine.run(LAYER, impl, make, step, causal=False)
        step.judge(o, kept=lambda i, j: (i - j).abs() < 9)


def test_each_sequence_may_say_whether_it_is_causal():
    engine, impl, make = Engine(Served()), attention(), builder()
    for step in engine.served.steps():
        causal = torch.tensor([b % 2 for b in step.sequences], dtype=torch.int32)
        o = engine.run(LAYER, impl, make, step, causal=causal)
        for n, row in enumerate(step.rows):
            kept = (lambda i, j: j <= i) if row[0] % 2 else (lambda i, j: j < 1000)
            Step(step.of, [row]).judge(o[step.starts[n] : step.starts[n + 1]], kept=kept)


@pytest.mark.parametrize("kind", ["encoder_only", "encoder"])
@pytest.mark.parametrize("window", [None, 5])
def test_encoders_have_no_cache(kind, window):
    served = Served()
    engine, make = Engine(served), builder()
    impl = attention(attn_type=AttentionType(kind), sliding_window=window)
    step = next(iter(served.steps()))
    o = engine.run(LAYER, impl, make, step, causal=False)
    step.judge(o, kept=lambda i, j: (i - j).abs() < (window or 1000))
    assert bool(engine.cache.isnan().all())


def test_a_sequences_bits_do_not_depend_on_its_mates_in_the_invariant_mode(monkeypatch):
    monkeypatch.setattr(door.envs, "VLLM_BATCH_INVARIANT", True)
    engine, impl, make = Engine(Served(dtype=torch.bfloat16)), attention(), builder()
    for step in engine.served.steps():
        together = engine.run(LAYER, impl, make, step)
        for n, row in enumerate(step.rows):
            alone = engine.run(LAYER, impl, make, Step(step.of, [row]))
            assert torch.equal(alone, together[step.starts[n] : step.starts[n + 1]])


def test_a_run_without_metadata_measures_memory():
    output = torch.full((3, H, D), torch.nan)
    attention().forward(LAYER, output, output, output, torch.empty(0), None, output)
    assert bool((output == 0).all())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: the caches are"),
        ({"kv_cache_dtype": "int8_per_token_head", "attn_type": "other"}, "(?s)kv_cache_dtype: .*attn_type: "),
        ({"chunk_lookback": 3}, "others: no such option"),
    ],
    ids=["e5m2", "both", "unknown"],
)
def test_a_layer_that_is_not_honoured_is_refused_by_name(options, says):
    with pytest.raises(NotImplementedError, match=says):
        attention(**options)


@pytest.mark.parametrize("name", ["mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens"])
def test_a_batch_that_is_not_honoured_is_refused_by_name(name):
    engine = Engine(Served())
    step = next(iter(engine.served.steps()))
    with pytest.raises(NotImplementedError, match=name):
        engine.run(LAYER, attention(), builder(), step, **{name: {0: [(0, 3)]}})


def test_an_output_in_8_bits_is_refused():
    output = torch.empty(1, H, D)
    with pytest.raises(NotImplementedError, match="output_scale: the output is not quantised"):
        attention().forward(LAYER, output, output, output, None, None, output, output_scale=torch.ones(1))


def test_prompts_in_pieces_are_refused_in_the_invariant_mode(monkeypatch):
    builder(enable_chunked_prefill=True)
    monkeypatch.setattr(door.envs, "VLLM_BATCH_INVARIANT", True)
    with pytest.raises(
        NotImplementedError, match=r"(?s)enable_chunked_prefill: it cuts.*enable_prefix_caching: it cuts"
    ):
        builder(enable_chunked_prefill=True, enable_prefix_caching=True)


@pytest.fixture
def _unregistered():
    yield
    if RELEASED:
        AttentionBackendEnum.CUSTOM.clear_override()
    else:
        stand_ins.REGISTERED.clear()


@pytest.mark.usefixtures("_unregistered")
def test_it_is_custom_once_registered_and_leaves_another_in_place(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.1")
    with pytest.warns(UserWarning, match=r"needs vLLM >= 0\.33, here is 0\.32\.1"):
        door.register()
    assert not AttentionBackendEnum.CUSTOM.is_overridden()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0")
    door.register()
    door.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "tilewise.compat.vllm.TilewiseBackend"
    door.register_backend(AttentionBackendEnum.CUSTOM, "theirs.Backend")
    with pytest.warns(UserWarning, match=r"CUSTOM is theirs\.Backend"):
        door.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "theirs.Backend"


def test_the_package_names_its_door_where_vllm_looks_for_plugins():
    entries = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    assert entries["vllm.general_plugins"] == {"tilewise": f"{door.__name__}:{door.register.__name__}"}


# -- The released package ----------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(_unregistered):
    """vLLM's own way from the entry point to the choice of CUSTOM, in a configuration that every layer reads."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.attention import AttentionConfig
    from vllm.plugins import load_plugins_by_group

    plugins = load_plugins_by_group("vllm.general_plugins")
    plugins.get("tilewise", door.register)()
    configuration = VllmConfig(attention_config=AttentionConfig(backend="custom"))
    before = torch.get_default_dtype()
    with set_current_vllm_config(configuration):
        yield configuration
    torch.set_default_dtype(before)


@released
@pytest.mark.parametrize(
    ("asks", "says"),
    [
        (
            {"use_mla": True, "use_mm_prefix": True},
            "partial multimodal token full attention not supported; MLA not supported",
        ),
        ({"kv_cache_dtype": "fp8_e5m2", "use_dcp": True}, "kv_cache_dtype not supported; DCP not supported"),
        ({"use_rswa": True, "dtype": torch.float64}, "dtype not supported; R-SWA not supported"),
    ],
    ids=["latent", "8-bits", "windows"],
)
@pytest.mark.usefixtures("chosen")
def test_a_cpu_gives_custom_to_who_asks_for_it_and_refuses_by_name(asks, says):
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = AttentionSelectorConfig(
        D, torch.float32, "auto", None, has_sink=True, has_sliding_window=True, use_non_causal=True
    )
    choose = current_platform.get_attn_backend_cls
    assert choose(AttentionBackendEnum.CUSTOM, attn_selector_config=asked) == "tilewise.compat.vllm.TilewiseBackend"
    assert "cpu_attn" in choose(None, attn_selector_config=asked)
    with pytest.raises(ValueError, match=says):
        choose(AttentionBackendEnum.CUSTOM, attn_selector_config=asked._replace(**asks))


@released
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_vllms_attention_layer_over_the_cache_that_vllm_allots(layout, chosen):
    from vllm.config import CacheConfig
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    names = ["model.layers.0.attn", "model.layers.1.attn"]
    options = {
        "cache_config": CacheConfig(),
        "logits_soft_cap": 2.0,
        "per_layer_sliding_window": 20,
        "sinks": normal(H, seed=5),
    }
    torch.set_default_dtype(torch.float16)  # the cache's, where there is no model
    layers = [Attention(H, D, D**-0.5, HK, prefix=name, **options) for name in names]
    engine = Engine(Served(dtype=torch.float16))
    spec, blocks, order = layers[0].get_kv_cache_spec(chosen), engine.table.numel(), KVCacheLayout[layout]
    assert spec.block_size == PAGE
    between_layers, between_blocks, *_ = compute_layout_strides(spec, blocks, len(layers), order)
    where = KVCacheTensor(len(layers) * spec.page_size_bytes * blocks, names, between_layers, between_blocks)
    raw = torch.full((where.size,), -1, dtype=torch.int8)  # NaN
    for layer, view in zip(layers, create_kv_cache_views(raw, spec, blocks, order, where), strict=True):
        layer.kv_cache = view
    make = layers[0].get_attn_backend().get_builder_cls()(spec, names, chosen, torch.device("cpu"))
    means = {"softcap": 2.0, "sinks": options["sinks"], "kept": lambda i, j: (j <= i) & (j > i - 20)}
    for step in engine.served.steps():
        said, (q, k, v) = engine.told(step), engine.rows(step)
        batch, n = make.build(0, said), said.num_actual_tokens
        with set_forward_context(
            dict.fromkeys(names, batch), chosen, slot_mapping=dict.fromkeys(names, said.slot_mapping)
        ):
            first, second = (
                layer(q.flatten(1), k.flatten(1), x.flatten(1)) for layer, x in zip(layers, (v, 2 * v), strict=True)
            )
        step.judge(first[:n], **means)
        torch.testing.assert_close(second[:n], 2 * first[:n])


@released
def test_vllms_cross_attention_over_the_keys_of_an_encoder(chosen):
    from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

    served, lengths = Served(), torch.tensor([20, 5], dtype=torch.int32)
    backend = create_cross_attention_backend(door.TilewiseBackend)
    engine, spec = Engine(served), SimpleNamespace(block_size=PAGE)
    impl = backend.get_impl_cls()(H, D, D**-0.5, HK, attn_type=AttentionType.ENCODER_DECODER)
    make = backend.get_builder_cls()(spec, ["layer"], chosen, torch.device("cpu"))
    layer = SimpleNamespace(kv_sharing_target_layer_name=None)
    keys = [[x[0][:20], x[1][:5]] for x in (served.k, served.v)]
    for begin, end in ((0, 7), (7, 8)):  # a prompt, which brings the encoders' keys, and one token
        step = Step(served, [(0, begin, end), (1, begin, end)])
        lengths_cpu = {"encoder_seq_lens_cpu": lengths.numpy(), "seq_lens_cpu_upper_bound": step.lengths}
        said = engine.told(step, padding=0, encoder_seq_lens=lengths, **lengths_cpu)
        k, v = (torch.cat(x) if begin == 0 else None for x in keys)
        output = torch.empty(2 * (end - begin), H, D)
        impl.forward(layer, step.new(served.q), k, v, engine.cache, make.build(0, said), output)
        step.judge(output, keys=keys, kept=lambda i, j: j < 1000, all_keys=True)


@released
def test_vllms_encoder_only_attention(chosen):
    from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend

    engine, step = Engine(Served()), next(iter(Served().steps()))
    backend = create_encoder_only_attention_backend(door.TilewiseBackend)
    impl = backend.get_impl_cls()(H, D, D**-0.5, HK, attn_type=AttentionType.ENCODER_ONLY)
    make = backend.get_builder_cls()(None, ["layer"], chosen, torch.device("cpu"))
    step.judge(engine.run(LAYER, impl, make, step), kept=lambda i, j: j < 1000)


@pytest.fixture(scope="module")
def kernels():
    """The kernels of vLLM's build for CPUs that a model of plain layers needs, which its wheel has not: none is attention."""

    def slots(starts, positions, table, slot_mapping, block_size) -> None:
        slot_mapping[int(starts[-1]) :] = -1
        for b, (begin, end) in enumerate(itertools.pairwise(starts)):
            at = positions[begin:end]
            slot_mapping[begin:end] = table[b, at // block_size] * block_size + at % block_size

    library = torch.library.Library("_C", "FRAGMENT")
    written = "(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int block_size) -> ()"
    for schema, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        (f"compute_slot_mapping_kernel_impl{written}", slots),
        ("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    yield
    library._destroy()


SIZES = {
    "hidden_size": H * D,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": HK,
}
GENERATING = {
    "Llama": {},
    "Mistral": {"sliding_window": 20},
    "Qwen3": {"head_dim": D},
    "Gemma2": {"head_dim": D, "sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": D},
}


@released
@pytest.mark.usefixtures("_unregistered", "kernels")
@pytest.mark.parametrize("name", GENERATING)
def test_vllm_generates_what_transformers_does(name, monkeypatch, tmp_path):
    """The whole engine: its scheduler cuts prompts of up to 40 tokens into pieces beside other requests that decode."""
    import transformers
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    alone = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for variable, value in (alone | {"VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
    layers, forward = [], door.TilewiseAttention.forward
    monkeypatch.setattr(
        door.TilewiseAttention, "forward", lambda self, *x, **y: layers.append(self) or forward(self, *x, **y)
    )
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **SIZES, vocab_size=256, max_position_embeddings=256, **GENERATING[name]
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.15) if weight.ndim > 1 else None
    model.save_pretrained(tmp_path)
    door.register()
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    engine = LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        attention_backend="CUSTOM",
        **sizes,
    )
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 256, (n,), generator=draw).tolist() for n in (40, 3, 17, 26, 9)]
    greedy = SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    del engine
    cleanup_dist_env_and_memory()
    assert len(layers) > 2 * 12
    model.set_attn_implementation("eager")
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer.outputs[0].token_ids == whole[0, len(prompt) :].tolist()
