"""The ranks of DTensors: made once for each process group. Their results are in test_processes.py, over real processes."""

from __future__ import annotations

from dataclasses import dataclass, field

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
