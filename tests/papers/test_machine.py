"""The counts are honest: what the machine charges, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.cases import machine
from tilewise_papers.machine import DoesNotFit, Level, Machine, Traffic


def on_chip(m: Machine, shape: tuple[int, int], value: float = 1.0):
    return m.hold("X", value, shape)


def test_load_counts_reads_and_store_counts_writes_in_elements_and_bytes():
    m = machine()
    a = m.place("A", np.ones((6, 4), np.float32))
    stat = m.place("m", np.ones((6, 1), np.float32))
    m.store(a[0:2], m.load(a[0:2]))
    m.load(stat)
    assert m.counts.slow == Traffic(reads=8 + 6, writes=8, read_bytes=8 * 2 + 6 * 4, write_bytes=8 * 2)


def test_traffic_of_each_boundary_is_counted_apart():
    m = machine(3)
    a = m.place("A", np.ones((4, 4), np.float32))
    tile = m.load(a)
    piece = m.load(tile[0:2])
    m.store(tile[0:2], piece)
    assert [(b.reads, b.writes) for b in m.counts.boundaries] == [(16, 0), (8, 8)]


def test_products_cost_2mnk_and_other_operations_are_kept_apart():
    m = machine()
    a, b = on_chip(m, (3, 5)), on_chip(m, (5, 7))
    c = m.hold("C", a @ b)
    c.add_product(a, b)
    assert (m.counts.matmul_flops, m.counts.other_flops) == (2 * 2 * 3 * 5 * 7, 0)
    np.testing.assert_array_equal(c.read(), np.full((3, 7), 10, np.float32))


@pytest.mark.parametrize(
    ("operation", "cost"),
    [
        (lambda x, r: x + x, 12),
        (lambda x, r: x * 2.0, 12),
        (lambda x, r: r / x, 12),
        (lambda x, r: x.exp_minus(r), 24),
        (lambda x, r: x.rowsum(), 12),
        (lambda x, r: x.rowmax(), 12),
        (lambda x, r: r.log(), 3),
        (lambda x, r: x.select(lambda: np.ones((3, 4), bool)), 12),
        (lambda x, r: x.times(lambda: np.ones((3, 4))), 12),
    ],
    ids=["add", "scale", "broadcast divide", "exp minus", "row sum", "row max", "log", "select", "times"],
)
def test_an_operation_costs_one_for_each_element(operation, cost):
    m = machine()
    operation(on_chip(m, (3, 4)), on_chip(m, (3, 1)))
    assert m.counts.other_flops == cost


def test_a_tile_that_does_not_fit_names_itself_its_bytes_and_the_level():
    m = machine(fast_bytes=100)
    k = m.place("K", np.ones((16, 4), np.float32))
    m.load(k[0:8])
    with pytest.raises(DoesNotFit, match=r"tile K 8×4 needs 64 bytes, but sram has 36 of 100 left\n.*K 8×4 \(64 B\)"):
        m.load(k[8:16])


def test_slow_memory_has_an_end_too():
    m = Machine([Level("hbm", 64), Level("sram", 1000)])
    with pytest.raises(DoesNotFit, match="hbm has 64 of 64 left"):
        m.place("Q", np.ones((16, 4), np.float32))


def test_a_loop_pass_gives_its_room_back_and_the_peak_is_remembered():
    m = machine(fast_bytes=100)
    k = m.place("K", np.ones((16, 4), np.float32))
    for rows in m.loop([slice(0, 8), slice(8, 16)]):
        tile = m.load(k[rows])
    assert m.counts.peak_bytes == [128, 64]
    with pytest.raises(ValueError, match="left level sram"):
        tile.read()


def test_a_value_is_used_once_unless_it_is_held():
    m = machine()
    x = on_chip(m, (2, 2)) + 1.0
    x.rowsum()
    with pytest.raises(ValueError, match="used twice"):
        x.rowmax()


def test_arithmetic_needs_its_operands_in_the_last_level():
    m = machine(3)
    tile = m.load(m.place("A", np.ones((2, 2), np.float32)))
    with pytest.raises(ValueError, match="A lies in sram: load it"):
        tile + 1.0
    with pytest.raises(ValueError, match="A lies in sram: load it"):
        m.hold("copy", tile)


def test_store_moves_one_level_only():
    m = machine(3)
    a = m.place("A", np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="one level"):
        m.store(a, on_chip(m, (2, 2)))


def test_work_items_must_not_share_anything_on_chip():
    m = machine()
    k = m.place("K", np.ones((4, 4), np.float32))
    shared = m.load(k)
    with pytest.raises(ValueError, match="not independent: K stayed on chip"):
        next(m.launch("bad", range(2)))
    m.free(shared)
    assert [m.load(k).shape for _ in m.launch("good", range(3))] == [(4, 4)] * 3
    assert m.counts.launches["good"].items == 3


def test_a_store_of_another_shape_is_refused_rather_than_broadcast():
    m = machine()
    a = m.place("A", np.ones((4, 4), np.float32))
    with pytest.raises(ValueError, match=r"\(4, 4\), the value is \(4, 1\)"):
        m.store(a, on_chip(m, (4, 1)))


def test_numbers_never_written_show_as_nan():
    m = machine()
    assert np.isnan(m.empty("O", (2, 2)).read()).all()


def test_heads_multiply_the_counts_but_not_the_room_on_chip():
    m = machine()
    a = m.place("A", np.ones((4, 4), np.float32))
    for _ in m.launch("copy", range(1)):
        m.store(a, m.load(a))
    many = m.counts.of_heads(3)
    assert (many.slow.reads, many.slow.writes, many.launches["copy"].items) == (48, 48, 3)
    assert many.peak_bytes == [3 * 32, 32]


@pytest.mark.parametrize("dry", [False, True])
def test_alike_passes_count_as_often_as_there_are(dry: bool):
    """10 rows in tiles of 4, each with 3 passes inside: a dry machine runs two tiles and one pass, and counts the same."""
    m = machine(dry=dry)
    a, ran = m.place("A", np.ones((10, 4), np.float32)), 0
    for rows in m.launch("copy", [slice(0, 4), slice(4, 8), slice(8, 10)], alike=True):
        for _ in m.loop(range(3), alike=True):
            ran += 1
            m.store(a[rows], m.hold("B", m.load(a[rows]) + 1.0))
            m.barrier()
    work = m.counts.launches["copy"]
    assert ran == (2 if dry else 9)
    assert (work.items, work.barriers, work.other_flops) == (3, 9, 3 * 40)
    assert (work.boundaries[0].reads, work.boundaries[0].writes) == (3 * 40, 3 * 40)
