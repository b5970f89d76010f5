"""cuEquivariance's drop-in against the formula in float64, the released package where it is installed, and Boltz's own layers."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compat.eager import F64, Arithmetic, agree, attend, normal
from tilewise.accuracy import judge
from tilewise.compat import cuequivariance as cue
from tilewise.compat import stand_in

PACKAGES = ("cuequivariance_torch", "cuequivariance_ops_torch")
installed = pytest.mark.skipif(
    find_spec(PACKAGES[0]) is None, reason="the package cuequivariance-torch is not installed"
)
nothing_there = pytest.mark.skipif(any(map(find_spec, PACKAGES)), reason="cuequivariance is installed")
needs_operators = pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)),
    reason="the package cuequivariance-ops-torch, which has the fallback, is not installed",
)


@pytest.fixture
def imported(monkeypatch):
    """Modules under the package's names, and changes in the package itself, live for one test."""

    def theirs():
        return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in PACKAGES}

    before = {m: dict(vars(m)) for m in theirs().values()}
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(stand_in.Distributions, "standing", {})
    yield
    for name, module in theirs().items():
        vars(module).update(before.get(module, {}))
        if module not in before:
            del sys.modules[name]


# -- Triangle attention ------------------------------------------------------------------------------------------------


def triangle(q: Tensor, bias: Tensor, seen: Tensor | None, scale: float | None):
    """The documented attention, of an arithmetic, q, k, v and bias."""

    def formula(arithmetic: Arithmetic, q, k, v, bias):
        return attend(q, k, v, arithmetic, scale=scale, change=lambda s: s + bias, kept=seen)

    return formula


SIZES = {  # B, N, H, Q, K, D
    "square": (1, 6, 2, 6, 6, 16),
    "odd": (1, 5, 3, 7, 13, 20),
    "two batches": (2, 3, 2, 9, 9, 8),
    "chunks of rows": (4, 1, 2, 17, 33, 8),
    "one": (1, 1, 1, 1, 1, 4),
}


def tensors(sizes: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, rows, heads, queries, keys, dim = SIZES[sizes]
    q = normal(batch, rows, heads, queries, dim, dtype=dtype, seed=1)
    k, v = (normal(batch, rows, heads, keys, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    return q, k, v, normal(batch, 1, heads, queries, keys, dtype=dtype, seed=4)


def holes(sizes: str) -> Tensor:
    """A mask of keys in any pattern; the last row sees none."""
    batch, rows, _, _, keys, _ = SIZES[sizes]
    mask = torch.rand(batch, rows, 1, 1, keys, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[:, -1] = False
    return mask


def lengths(sizes: str) -> Tensor:
    """From no key to all, and more."""
    batch, rows, _, _, keys, _ = SIZES[sizes]
    return torch.linspace(0, keys + 1, batch * rows, dtype=F64).to(torch.int32).view(batch, rows, 1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("hidden", ["nothing", "mask", "kv_lengths"])
def test_outputs_and_all_gradients_are_those_of_the_formula(hidden, sizes, dtype):
    q, k, v, bias = tensors(sizes, dtype)
    seen = {"nothing": None, "mask": holes(sizes), "kv_lengths": torch.arange(k.shape[3]) < lengths(sizes)}[hidden]
    given = {"nothing": {}, "mask": {"mask": seen}, "kv_lengths": {"kv_lengths": lengths(sizes)}}[hidden]

    def run(*x):
        o, lse, _ = cue.triangle_attention(*x, scale=0.3, return_aux=True, **given)
        return o, lse

    results = agree(run, triangle(q, bias, seen, 0.3), (q, k, v, bias))
    assert (results["o"].dtype, results["lse"].dtype) == (dtype, torch.float32)
    if seen is not None:
        nothing = ~seen.any(-1).flatten(2)[:, :, 0]
        assert nothing.any() or sizes == "chunks of rows"
        assert not torch.cat([results["o"][nothing], results["d0"][nothing]]).any()
        assert results["lse"][nothing].eq(-torch.inf).all()


def test_a_bias_of_float32_beside_queries_of_16_bits_is_read_as_it_is():
    q, k, v, _ = tensors("two batches", torch.bfloat16)
    bias = normal(2, 1, 2, 9, 9, seed=4)
    o = cue.triangle_attention(q, k, v, bias)
    oracle, _ = attend(q.double(), k.double(), v.double(), Arithmetic(F64), change=lambda s: s + bias.double())
    eager, _ = attend(q, k, v, Arithmetic(torch.bfloat16), change=lambda s: s + bias)
    assert judge("o", o, oracle, [eager]).ok


def test_the_largest_score_is_that_of_the_keys_that_are_seen():
    q, k, v, bias = ((4 * x).round() for x in tensors("odd"))  # whole numbers are added without an error
    mask = holes("odd")
    *_, largest = cue.triangle_attention(q, k, v, bias, mask, scale=0.5, return_aux=True)
    assert torch.equal(largest, (0.5 * q @ k.mT + bias).masked_fill(~mask, -torch.inf).amax(-1))


@pytest.mark.parametrize("hidden", ["mask", "kv_lengths"])
def test_without_the_batch_dimension_it_is_one(hidden):
    q, k, v, bias = tensors("odd")
    given = {"mask": holes("odd").float()} if hidden == "mask" else {"kv_lengths": lengths("odd")}
    o = cue.triangle_attention(q, k, v, bias, **given)
    four = cue.triangle_attention(q[0], k[0], v[0], bias[0], **{name: x[0] for name, x in given.items()})
    assert torch.equal(four, o)  # of 5 dimensions, as the original's


def test_a_bias_is_not_expanded_over_rows_in_either_pass():
    """256 rows share a bias of 1 MiB: beside it all tensors and gradients take 64 MiB, expanded it would take 256."""
    code = """
import resource, torch
from tilewise.compat.cuequivariance import triangle_attention
def call(rows, n):
    q, k, v = (torch.randn(1, rows, 4, n, 8, requires_grad=True) for _ in "qkv")
    bias, mask = torch.randn(1, 1, 4, n, n, requires_grad=True), torch.rand(1, rows, 1, 1, n) < 0.9
    triangle_attention(q, k, v, bias, mask).sum().backward()
call(2, 256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
call(256, 256)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 256 * 1024


WRONG = {
    "shapes": (
        lambda q, k, v, b: cue.triangle_attention(q, k, v[:, :1], b[:, :, :1]),
        r"v is \(1, 1, 3, 13, 20\); beside q \(1, 5, 3, 7, 20\) it must be \(1, 5, 3, 13, 20\)\n  bias is \(1, 1, 1, 7, 13\)",
    ),
    "six dimensions": (lambda q, k, v, b: cue.triangle_attention(q[None], k, v, b), "5 dimensions, or 4 .* got q"),
    "a mask for every query": (
        lambda q, k, v, b: cue.triangle_attention(q, k, v, b, torch.ones(1, 5, 1, 7, 13)),
        r"mask is \(1, 5, 1, 7, 13\); .* must be \(1, 5, 1, 1, 13\)",
    ),
    "mask and lengths": (
        lambda q, k, v, b: cue.triangle_attention(q, k, v, b, holes("odd"), kv_lengths=lengths("odd")),
        "mask and kv_lengths exclude each other",
    ),
    "a bool bias": (lambda q, k, v, b: cue.triangle_attention(q, k, v, b > 0), "bias is torch.bool.*hide keys by mask"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_it_must_be(name):
    call, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        call(*tensors("odd"))


def test_a_mask_that_wants_a_gradient_is_refused():
    with pytest.raises(NotImplementedError, match=r"triangle_attention\n  mask wants a gradient.*detach"):
        cue.triangle_attention(*tensors("odd"), holes("odd").float().requires_grad_())


def test_lengths_of_a_mask_without_holes():
    seen = torch.arange(13) < lengths("odd")
    assert torch.equal(cue.mask_to_kv_lengths(seen), lengths("odd").clamp_max(13))
    assert cue.mask_to_kv_lengths(seen[0].float()).dtype == torch.int32
    for mask, says in ((seen.flip(-1), "masked key before a kept one"), (seen[None], "takes"), (seen.mT, "takes")):
        with pytest.raises(ValueError, match=says):
            cue.mask_to_kv_lengths(mask)


# -- Layers ------------------------------------------------------------------------------------------------------------

B, M, N, C, CZ, H, DH = 2, 3, 7, 12, 5, 2, 8
LAYER = {
    "w_ln_a": (C,), "b_ln_a": (C,), "w_proj_q": (H * DH, C), "b_proj_q": (H * DH,), "w_proj_k": (H * DH, C), "w_proj_v": (H * DH, C),
    "w_proj_g": (H * DH, C), "w_proj_o": (C, H * DH), "w_proj_z": (H, CZ), "b_proj_o": (C,), "b_proj_z": (H,), "w_ln_z": (CZ,),
    "b_ln_z": (CZ,), "b_proj_k": (H * DH,), "b_proj_v": (H * DH,), "w_ln_q": (H * DH,), "b_ln_q": (H * DH,), "w_ln_k": (H * DH,),
    "b_ln_k": (H * DH,), "b_proj_g": (H * DH,),
}  # fmt: skip
BIASES = ("b_ln_a", "b_ln_q", "b_ln_k", "b_ln_z")


def pair_bias(arithmetic: Arithmetic, single, pair, w: dict, mask: Tensor | None, kind: str, cached: bool):
    """Algorithm 24 written down, of one sequence and copy after the other."""

    def norm(x, name):
        if kind == "rms_norm":
            return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"w_ln_{name}"]
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"w_ln_{name}"] + w[f"b_ln_{name}"]

    def project(x, name):
        return arithmetic.matmul(x, w[f"w_proj_{name}"].T) + w.get(f"b_proj_{name}", 0)

    rows = []
    for n, x in enumerate(single):
        a = norm(x, "a")
        q, k = (norm(project(a, name), name) for name in "qk")
        q, k, v = (x.view(N, H, DH).transpose(0, 1) for x in (q, k, project(a, "v")))
        bias = pair[n // M] if cached else project(norm(pair[n // M], "z"), "z").permute(2, 0, 1)
        seen = None if mask is None else mask[n if len(mask) == B * M else n // M].bool()
        o, _ = attend(q, k, v, arithmetic, scale=0.4, change=lambda s, bias=bias: s + bias, kept=seen)
        rows.append(project(o.transpose(0, 1).flatten(1) * torch.sigmoid(project(a, "g")), "o"))
    return torch.stack(rows)


@pytest.mark.parametrize("cached", [False, True], ids=["projected here", "cached"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("masked", [None, "batch", "copies"])
def test_attention_with_a_pair_bias_is_algorithm_24(masked, kind, cached):
    names = [
        name for name in LAYER if not ((kind == "rms_norm" and name in BIASES) or (cached and name.endswith("_z")))
    ]
    weights = [normal(*LAYER[name], seed=n) for n, name in enumerate(names)]
    mask = (
        None
        if masked is None
        else (torch.arange(N) < torch.arange(2, 8).view(-1, 1))[: B * M if masked == "copies" else B]
    )
    pair = normal(B, H, N, N, seed=31) if cached else normal(B, N, N, CZ, seed=31)
    fixed = {name: None for name in LAYER if name in ("b_ln_a", "b_proj_q")}

    def run(single, pair, *weights):
        given = fixed | dict(zip(names, weights, strict=True))
        options = {"norm_kind": kind, "attn_scale": 0.4, "is_cached_z_proj": cached}
        return cue.attention_pair_bias(single, pair, mask, H, **given, **options)[0]

    def formula(arithmetic, single, pair, *weights):
        return (pair_bias(arithmetic, single, pair, dict(zip(names, weights, strict=True)), mask, kind, cached),)

    agree(run, formula, (normal(B * M, N, C, seed=30), pair, *weights), ("o",))


def test_a_projected_bias_may_be_kept_for_the_next_call():
    w = {name: normal(*shape, seed=n) for n, (name, shape) in enumerate(LAYER.items())}
    single, pair = normal(B, N, C, seed=30), normal(B, N, N, CZ, seed=31)
    o, z = cue.attention_pair_bias(single, pair, None, H, **w, return_z_proj=True)
    again, none = cue.attention_pair_bias(single, z, None, H, **w, is_cached_z_proj=True)
    assert (z.shape, none) == ((B, H, N, N), None)
    assert torch.equal(o, again)


def test_a_layer_is_refused_with_every_reason():
    w = {name: normal(*shape) for name, shape in LAYER.items()} | {"w_proj_z": None}
    single, pair, mask = normal(3, N, C), normal(B, N, N, CZ), torch.ones(3, N + 1)
    with pytest.raises(ValueError, match="called wrongly") as error:
        cue.attention_pair_bias(single, pair, mask, H, **w, inf=5.0, norm_kind="rms_norm")
    for reason in (
        "single_repr",
        "mask is",
        "w_proj_z is missing",
        "inf 5.0",
        *(f"{name}: rms_norm" for name in BIASES),
    ):
        assert f"\n  {reason}" in str(error.value)
    with pytest.raises(NotImplementedError, match=r"mask wants a gradient.*detach"):
        cue.attention_pair_bias(
            single[:2], pair, torch.ones(2, N, requires_grad=True), H, **w | {"w_proj_z": normal(H, CZ)}
        )


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_the_multiplicative_update_is_algorithms_11_and_12(direction):
    hidden = 6
    shapes = {
        "norm_in_weight": (C,), "norm_in_bias": (C,), "p_in_weight": (2 * hidden, C), "g_in_weight": (2 * hidden, C),
        "norm_out_weight": (hidden,), "norm_out_bias": (hidden,), "p_out_weight": (C, hidden), "g_out_weight": (C, C),
    }  # fmt: skip
    w = [normal(*shape, seed=n) for n, shape in enumerate(shapes.values())]
    mask = (torch.arange(N * N).view(1, N, N) % 3 > 0).float()

    def run(x, *w):
        return cue.triangle_multiplicative_update(x, direction, mask, **dict(zip(shapes, w, strict=True)))

    def formula(arithmetic, x, *w):
        w = dict(zip(shapes, w, strict=True))
        x = F.layer_norm(x, (C,), w["norm_in_weight"], w["norm_in_bias"])
        gated = arithmetic.matmul(x, w["p_in_weight"].T) * torch.sigmoid(arithmetic.matmul(x, w["g_in_weight"].T))
        a, b = (t.permute(0, 3, 1, 2) for t in (gated * mask[..., None].to(x.dtype)).split(hidden, -1))
        a, b = (a, b.mT) if direction == "outgoing" else (a.mT, b)
        y = F.layer_norm(
            arithmetic.matmul(a, b).permute(0, 2, 3, 1), (hidden,), w["norm_out_weight"], w["norm_out_bias"]
        )
        return (arithmetic.matmul(y, w["p_out_weight"].T) * torch.sigmoid(arithmetic.matmul(x, w["g_out_weight"].T)),)

    agree(run, formula, (normal(1, N, N, C, seed=30), *w), ("o",))


def test_an_update_that_is_not_built_is_refused():
    x, w = (
        normal(1, N, N, C),
        {f"{name}_weight": normal(2 * C if name[-2:] == "in" else C, C) for name in ("p_in", "g_in", "p_out")},
    )
    with pytest.raises(ValueError, match=r"g_out_weight is missing\n  direction takes .*got 'up'"):
        cue.triangle_multiplicative_update(x, "up", **w)
    w["g_out_weight"] = normal(C, C)
    with pytest.raises(NotImplementedError, match=r"precision: .*set_float32_matmul_precision"):
        cue.triangle_multiplicative_update(x, **w, precision=cue.TriMulPrecision.TF32)
    expected = cue.triangle_multiplicative_update(x, **w)
    assert torch.equal(expected, cue.triangle_multiplicative_update(x, **w, precision=cue.TriMulPrecision.NONE))


# -- The released package ----------------------------------------------------------------------------------------------


@installed
@pytest.mark.parametrize(
    "name", ["triangle_attention", "attention_pair_bias", "triangle_multiplicative_update", "mask_to_kv_lengths"]
)
def test_names_order_and_defaults_are_the_releases(name):
    def parameters(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    theirs = importlib.import_module("cuequivariance_torch.primitives.triangle")
    assert parameters(getattr(cue, name)) == parameters(getattr(theirs, name))


@installed
def test_helpers_are_the_releases():
    theirs = importlib.import_module("cuequivariance_torch")
    assert {x.name: x.value for x in cue.TriMulPrecision} == {x.name: x.value for x in theirs.TriMulPrecision}
    seen = torch.arange(13) < lengths("odd")
    ours = cue.mask_to_kv_lengths(seen)
    assert torch.equal(ours, theirs.mask_to_kv_lengths(seen))


@installed
def test_installed_over_the_real_package_it_replaces_the_attention_alone(imported):
    package = importlib.import_module("cuequivariance_torch")
    before = dict(vars(package))
    cue.install_as_cuequivariance()
    from cuequivariance_torch.primitives.triangle import attention_pair_bias, triangle_attention

    assert triangle_attention is package.triangle_attention is cue.triangle_attention
    assert attention_pair_bias is package.attention_pair_bias is cue.attention_pair_bias
    changed = {name for name in before if vars(package)[name] is not before[name]}
    assert changed == {"triangle_attention", "attention_pair_bias"}


@needs_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("hidden", ["nothing", "mask", "kv_lengths"])
def test_results_and_gradients_are_those_of_the_releases_fallback(hidden, dtype):
    """It computes in PyTorch for so few keys; a row without keys, where the two differ, gets no gradient here."""
    theirs = importlib.import_module("cuequivariance_ops_torch").triangle_attention
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = [t.to(device).requires_grad_() for t in tensors("two batches", dtype)]
    seen = holes("two batches").to(device)
    given = {"nothing": {}, "mask": {"mask": seen}, "kv_lengths": {"kv_lengths": lengths("two batches").to(device)}}[
        hidden
    ]
    alive = seen.any(-1, keepdim=True) if hidden == "mask" else torch.ones((), device=device)
    weights = normal(*x[0].shape, seed=7).to(device) * alive

    def derived(function, x):
        o = function(*x, **given) * alive
        return [o, *torch.autograd.grad((o * weights).sum(), x)]

    oracle = derived(cue.triangle_attention, [t.detach().double().requires_grad_() for t in x])
    for name, ours, right, eager in zip(
        "oqkvb", derived(cue.triangle_attention, x), oracle, derived(theirs, x), strict=True
    ):
        error = judge(name, ours, right, [eager])
        assert error.ok, error


# -- Libraries that import it ------------------------------------------------------------------------------------------


def needs(library: str):
    missing = pytest.mark.skipif(find_spec(library) is None, reason=f"the package {library} is not installed")
    return pytest.param(library, marks=missing)


@nothing_there
def test_installed_under_its_name_it_is_what_libraries_import(imported):
    with pytest.raises(ImportError):
        import cuequivariance_torch
    cue.install_as_cuequivariance()
    cue.install_as_cuequivariance()  # twice is once
    import cuequivariance_ops_torch
    import cuequivariance_torch
    from cuequivariance_ops_torch.triangle_attention import CUEQ_TRIATTN_FALLBACK_THRESHOLD
    from cuequivariance_torch.primitives.triangle import triangle_attention, triangle_multiplicative_update

    assert triangle_attention is cuequivariance_torch.triangle_attention is cue.triangle_attention
    assert cuequivariance_ops_torch.triangle_attention is cue.triangle_attention
    assert triangle_multiplicative_update is cue.triangle_multiplicative_update
    assert cuequivariance_torch.attention_pair_bias is cue.attention_pair_bias
    assert CUEQ_TRIATTN_FALLBACK_THRESHOLD == 0
    assert importlib.metadata.version("cuequivariance-torch") == cuequivariance_torch.__version__ == "0.13.0+tilewise"
    with pytest.raises(ImportError):
        from cuequivariance_torch import SegmentedPolynomial  # noqa: F401


@nothing_there
@pytest.mark.parametrize("library", [needs(name) for name in ("boltz", "openfold3", "protenix")])
def test_every_import_of_a_library_is_found(library, imported):
    cue.install_as_cuequivariance()
    found, (folder,) = set(), find_spec(library).submodule_search_locations
    for file in Path(folder).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "cuequivariance" in text and "tests" not in file.parts:
            nodes = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.ImportFrom)]
            found |= {ast.unparse(x) for x in nodes if (x.module or "").startswith("cuequivariance")}
    assert any("triangle_attention" in line for line in found)
    for line in found:
        exec(line, {})


@pytest.mark.skipif(find_spec("boltz") is None, reason="the package boltz is not installed")
@pytest.mark.parametrize("layer", ["TriangleAttention, starting", "TriangleAttention, ending", "outgoing", "incoming"])
def test_boltz_gets_from_its_kernels_what_it_computes_itself(layer, imported, monkeypatch):
    cue.install_as_cuequivariance()
    package = importlib.import_module("cuequivariance_torch.primitives.triangle")
    monkeypatch.setattr(package, "triangle_multiplicative_update", cue.triangle_multiplicative_update)
    torch.manual_seed(0)
    if "Triangle" in layer:
        triangles = importlib.import_module("boltz.model.layers.triangular_attention.attention")
        module = triangles.TriangleAttention(16, 8, 2, starting="starting" in layer)
    else:
        updates = importlib.import_module("boltz.model.layers.triangular_mult")
        module = getattr(updates, f"TriangleMultiplication{layer.title()}")(16)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x, mask = normal(2, 19, 19, 16), (torch.arange(19) < torch.tensor([[19], [12]])).float()
    mask = mask[:, :, None] * mask[:, None]
    kept = mask[..., None]

    def derived(module, x, use_kernels):
        y = module(x, mask=mask.to(x.dtype), use_kernels=use_kernels) * kept.to(x.dtype)
        grads = torch.autograd.grad(y.square().sum(), list(module.parameters()))
        return [y.detach(), *grads]

    ours, eager = derived(module, x, True), derived(module, x, False)
    monkeypatch.setattr(Tensor, "float", lambda x: x)  # the layers' own casts would round the oracle
    oracle = derived(module.double(), x.double(), False)
    for n, (got, right, its) in enumerate(zip(ours, oracle, eager, strict=True)):
        error = judge(str(n), got, right, [its])
        assert error.ok, error
