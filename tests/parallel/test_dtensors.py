"""The ranks of DTensors: made once for each process group. Their results are in test_processes.py, over real processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import tilewise as tw
from tilewise.parallel import dtensors


@dataclass(frozen=True)
class Mesh:
    """A mesh of one dimension; as PyTorch's, equal to another one of the same ranks whose groups are other ones."""

    name: str
    group: object = field(default_factory=object, compare=False)

    def get_group(self, dim: int) -> object:
        return self.group


def test_an_equal_mesh_of_another_process_group_has_ranks_of_its_own(monkeypatch):
    monkeypatch.setattr(dtensors, "_contexts", {})
    monkeypatch.setattr(dtensors, "context_parallel", lambda group, layout: [group])
    first, second = Mesh("cp"), Mesh("cp")
    assert first == second
    contexts = [dtensors._context(mesh, 0) for mesh in (first, first, second, second)]
    assert [context[0] for context in contexts] == [first.group, first.group, second.group, second.group]
    assert contexts[0] is contexts[1]
    assert contexts[2] is contexts[3]
    assert len(dtensors._contexts) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 4, 5, 8, 9])
def test_heads_are_dealt_as_pytorch_deals_them(count, ranks):
    chunks = [(int(x[0]), int(x[-1]) + 1) for x in torch.arange(count).chunk(ranks)]
    assert dtensors._chunks(count, [ranks]) == chunks + [(count, count)] * (ranks - len(chunks))


def test_a_second_dimension_deals_what_the_first_has_dealt():
    assert dtensors._chunks(9, [2, 2]) == [(0, 3), (3, 5), (5, 7), (7, 9)]


@pytest.mark.parametrize(
    ("heads", "sizes"), [((8, 2), [2]), ((12, 4), [4]), ((12, 4), [2, 2]), ((16, 8), [3]), ((5, 5), [2]), ((8, 2), [])]
)
def test_query_heads_beside_their_key_heads_are_computed(heads, sizes):
    dtensors._refuse_heads(*heads, sizes)


@pytest.mark.parametrize(
    ("heads", "sizes", "dealt"),
    [
        ((8, 2), [4], "2 / 1, 2 / 1, 2 / 0, 2 / 0"),  # the second rank's key head is that of the third and fourth
        ((4, 1), [2], "2 / 1, 2 / 0"),
        ((9, 3), [2], "5 / 2, 4 / 1"),
        ((5, 5), [4], "2 / 2, 2 / 2, 1 / 1, 0 / 0"),
        ((8, 2), [2, 2], "2 / 1, 2 / 0, 2 / 1, 2 / 0"),
    ],
)
def test_query_heads_elsewhere_than_their_key_heads_are_refused(heads, sizes, dealt):
    with pytest.raises(NotImplementedError, match=f"each rank must hold whole groups: .* are sharded as {dealt}\n"):
        dtensors._refuse_heads(*heads, sizes)


class Sharded(torch.Tensor):
    device_mesh = None


def test_a_plain_tensor_among_dtensors_and_their_gradients_by_a_call_are_refused_with_what_to_write():
    x = torch.zeros(1, 4, 2, 8)
    for q, k, v in ((x, x.as_subclass(Sharded), x), (x, x, x.as_subclass(Sharded))):
        with pytest.raises(ValueError, match=r"q is not; distribute q alike"):
            tw.attention(q, k, v)
    with pytest.raises(NotImplementedError, match=r"attention_backward does not support DTensors; pass x\.to_local"):
        tw.attention_backward(x.as_subclass(Sharded), x, x, x, x, x[..., 0].mT)
