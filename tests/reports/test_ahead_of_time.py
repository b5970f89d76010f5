"""Reports of packages and wrappers in C++ that PyTorch compiles of a model: AOTInductor, ``cpp_wrapper``."""

import warnings

import pytest
import torch

import tilewise as tw
from tests.backends.contract import normal, qkv
from tests.test_operators import wanting_grad
from tilewise.derivatives import FLAT
from tilewise.spec import Options, assemble

pytestmark = pytest.mark.timeout(600)  # a C++ compiler runs


class EveryOperator(torch.nn.Module):
    """The operators of a call without extras, whose list of them is empty: forward, with statistics, backward, and their tangents."""

    def __init__(self):
        super().__init__()
        self.call = assemble(*wanting_grad(*qkv()), Options(causal=True))

    def forward(self, q, k, v):
        o = tw.attention(q, k, v, causal=True)
        stats = tw.attention_with_stats(q, k, v, causal=True)
        operators, (extras, seed, spec) = torch.ops.tilewise, self.call
        do, dlse, inputs, along = torch.ones_like(o), torch.zeros_like(stats.lse), [q, k, v, o, stats.lse], [q, k, v]
        listed = operators.attention_backward.default(do, dlse, *inputs, extras, seed, spec)[:3]
        flat = operators.attention_backward.flat0(do, dlse, *inputs, extras, seed, spec)
        moved = operators.attention_jvp.default(inputs, extras, seed, along, spec)
        grads = [do, dlse, None, None]
        second = operators.attention_backward_jvp.default(grads, list(moved), inputs, extras, seed, along, spec)
        return o, *stats, *listed, *flat, *moved, *second[:3]


class Plain(torch.nn.Module):
    def forward(self, q, k, v):
        return (tw.attention(q, k, v, causal=True),)


@pytest.mark.parametrize("lengths", ["fixed", "dynamic"])
def test_a_package_runs_what_it_was_compiled_of(tmp_path, lengths):
    """Report: TypeError, "Value after * must be an iterable, not NoneType", where a package runs a call without extras."""
    model = Plain() if lengths == "fixed" else EveryOperator()  # a C++ compiler takes its time
    inputs = qkv(nq=40, nk=40, d=16, dv=16)
    n = torch.export.Dim("n", min=2, max=4096)
    shapes = None if lengths == "fixed" else {name: {1: n} for name in "qkv"}
    exported = torch.export.export(model, inputs, dynamic_shapes=shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own writing of a tree
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for given in [inputs] if lengths == "fixed" else [inputs, qkv(nq=77, nk=77, d=16, dv=16)]:
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(package(*given), model(*given))


@pytest.mark.parametrize("count", [0, FLAT - 1])
def test_a_wrapper_in_cpp_has_the_gradients_of_every_tensor(count):
    """Report: AssertionError, "fallback kernels … only support tensor returns", where ``cpp_wrapper`` compiles a backward."""
    torch._dynamo.reset()
    inputs = wanting_grad(*qkv(nq=20, nk=20))
    extras = wanting_grad(*(normal(4, 20) for _ in range(count)))

    def forward(q, k, v, *extras):
        score = None
        for x in extras:
            step = tw.score(lambda s, b, h, i, j, x=x: s + x[h, j])
            score = step if score is None else score >> step
        return tw.attention(q, k, v, causal=True, score=score).square().sum()

    wanted = torch.autograd.grad(forward(*inputs, *extras), (*inputs, *extras))
    with torch._inductor.config.patch(cpp_wrapper=True):
        compiled = torch.compile(forward, fullgraph=True)
        got = torch.autograd.grad(compiled(*inputs, *extras), (*inputs, *extras))
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)
