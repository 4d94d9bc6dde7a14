"""The simulation of PyTorch's allocator: cases by hand, and what holds for random buffers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import remat
from remat.arena import load_of, places_in_words, simulate_allocator
from remat.arena.allocators import ENDLESS, Block, OutOfMemory, SimulatedAllocator, SimulatedExpandable
from remat.cli import main

KIB, MIB = 1 << 10, 1 << 20
KINDS = [SimulatedAllocator, SimulatedExpandable]


@pytest.mark.parametrize(
    ("n_bytes", "reserved"), [(MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (21 * MIB + 1, 22)]
)
def test_segments_have_the_sizes_that_pytorch_asks_the_driver_for(n_bytes: int, reserved: int) -> None:
    allocator = SimulatedAllocator()
    allocator.allocate(n_bytes)
    assert allocator.reserved_bytes == reserved * MIB
    expandable = SimulatedExpandable()  # whole pages of 2 or 20 MiB
    expandable.allocate(n_bytes)
    assert expandable.reserved_bytes == (2 if n_bytes <= MIB else -(-n_bytes // (20 * MIB)) * 20) * MIB


@pytest.mark.parametrize("kind", KINDS)
def test_small_requests_are_cut_from_one_segment_in_blocks_of_512_bytes(kind: type[SimulatedAllocator]) -> None:
    allocator = kind()
    blocks = [allocator.allocate(n) for n in (1, 512, 513, MIB)]
    assert [(b.start, b.size) for b in blocks] == [(0, 512), (512, 512), (1024, 1024), (2048, MIB)]
    assert allocator.reserved_bytes == 2 * MIB


def test_a_large_block_keeps_a_rest_of_one_mib_and_gives_up_a_larger_one() -> None:
    allocator = SimulatedAllocator()
    first = allocator.allocate(20 * MIB)
    allocator.free(first)
    whole = allocator.allocate(19 * MIB)
    assert (whole.size, allocator.reserved_bytes) == (20 * MIB, 20 * MIB)
    allocator.free(whole)
    cut = allocator.allocate(19 * MIB - 512)
    assert cut.size == 19 * MIB - 512
    expandable = SimulatedExpandable()
    assert expandable.allocate(20 * MIB - 512).size == 20 * MIB - 512


def test_the_tightest_free_block_serves_a_request_and_neighbours_merge() -> None:
    allocator = SimulatedAllocator()
    a, b, c, d = (allocator.allocate(n * MIB) for n in (6, 4, 5, 3))  # 18 of 20 MiB: the rest of 2 is free
    allocator.free(a)
    allocator.free(c)
    assert allocator.allocate(5 * MIB) is c
    allocator.free(c)
    allocator.free(b)  # with both neighbours 15 MiB
    assert allocator.reserved_bytes == 20 * MIB
    assert (allocator.allocate(15 * MIB).start, allocator.reserved_bytes) == (0, 20 * MIB)
    allocator.free(d)
    assert (allocator.allocate(5 * MIB).start, allocator.reserved_bytes) == (15 * MIB, 20 * MIB)


def test_free_blocks_of_two_native_segments_do_not_serve_a_request_that_spans_both() -> None:
    allocator, expandable = SimulatedAllocator(50 * MIB), SimulatedExpandable()
    for each in (allocator, expandable):
        for block in [each.allocate(20 * MIB), each.allocate(20 * MIB)]:
            each.free(block)
        each.allocate(40 * MIB)  # native: both are given back first
    assert (allocator.reserved_bytes, expandable.reserved_bytes) == (40 * MIB, 40 * MIB)
    assert SimulatedAllocator().reserved_bytes == 0


def test_a_segment_with_a_block_in_use_is_not_given_back() -> None:
    allocator = SimulatedAllocator(40 * MIB)
    half = allocator.allocate(9 * MIB)
    other = allocator.allocate(20 * MIB)
    allocator.free(other)
    with pytest.raises(OutOfMemory):
        allocator.allocate(22 * MIB)
    assert allocator.reserved_bytes == 20 * MIB  # all that could be, was given back
    allocator.free(half)
    allocator.allocate(22 * MIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_pages_without_a_block_in_use_are_given_back_and_mapped_again() -> None:
    allocator = SimulatedExpandable(100 * MIB)
    _, b, c = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB), allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(b)  # MiB 30 to 60, of which 40 to 60 are a whole page
    d = allocator.allocate(31 * MIB)  # from 80 on, two pages: 120 are too many, and the page is given back
    assert (d.start, allocator.reserved_bytes) == (80 * MIB, 100 * MIB)
    allocator.free(c)
    e = allocator.allocate(29 * MIB)  # from 30 on: the page of c is given back for the one from 40 to 60
    assert (e.start, allocator.reserved_bytes) == (30 * MIB, 100 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(10 * MIB)  # 9 are free from 111 on, 1 from 59 on
    assert allocator.allocate(9 * MIB).start == 111 * MIB


def invariants(allocator: SimulatedAllocator, used: list[Block]) -> None:
    """Blocks in use are disjoint and lie on memory that the driver gave, which is reserved exactly."""
    for is_small in (True, False):
        blocks = [b for b in used if b.is_small == is_small] + [b for _, _, b in allocator.pools[is_small]]
        blocks.sort(key=lambda b: b.start)
        for one, two in pairwise(blocks):
            assert one.start + one.size <= two.start
            if one.after is two:
                assert one.start + one.size == two.start
                assert not (one.is_free and two.is_free)
    free = [b for pool in allocator.pools.values() for _, _, b in pool]
    assert sum(b.size for b in (*used, *free)) == allocator.reserved_bytes <= allocator.limit
    if isinstance(allocator, SimulatedExpandable):
        for is_small, page in ((True, 2 * MIB), (False, 20 * MIB)):
            holes = [hole for _, hole in allocator.holes[is_small]]
            assert all(hole.start % page == 0 for hole in holes)
            assert all(hole.size % page == 0 for hole in holes[:-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_disjoint_and_reserved_bytes_are_exact_at_any_limit(
    kind: type[SimulatedAllocator], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    allocator, used, n_failed = kind(ENDLESS if seed == 0 else 60 * MIB), list[Block](), 0
    for _ in range(600):
        if used and rng.random() < 0.48:
            allocator.free(used.pop(rng.integers(len(used))))
        else:
            try:
                used.append(allocator.allocate(int(2 ** rng.uniform(5, 25.5))))
            except OutOfMemory:
                n_failed += 1
        invariants(allocator, used)
    assert (n_failed > 0) == (seed > 0)


@pytest.mark.parametrize("is_expandable", [False, True])
def test_no_simulated_allocator_needs_less_than_the_load(is_expandable: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        lower = rng.integers(0, 40, 60)
        upper, size = lower + rng.integers(1, 15, 60), (2 ** rng.uniform(0, 26, 60)).astype(np.int64)
        need = simulate_allocator(lower, upper, size, is_expandable=is_expandable)
        assert load_of(lower, upper, size) <= need.limit_bytes <= need.reserved_bytes


def test_the_smallest_limit_is_where_steps_begin_to_survive() -> None:
    assert simulate_allocator([0, 0], [1, 1], [0, 512]).limit_bytes == 2 * MIB
    assert simulate_allocator([], [], []).limit_bytes == 0
    native = simulate_allocator([0, 1, 1, 2], [1, 2, 2, 3], [n * MIB for n in (40, 20, 20, 40)], steps=1)
    assert native.reserved_bytes == native.limit_bytes == 40 * MIB  # two halves of one segment, merged again
    lower, upper, size = [0, 0, 1, 2], [1, 1, 2, 3], [n * MIB for n in (20, 20, 40, 40)]
    native = simulate_allocator(lower, upper, size)
    assert native.reserved_bytes == 80 * MIB
    assert 40 * MIB <= native.limit_bytes <= 40.1 * MIB  # both segments are given back for the one of 40
    expandable = simulate_allocator(lower, upper, size, is_expandable=True)
    assert expandable.reserved_bytes == expandable.limit_bytes == 40 * MIB


def test_printed_words_name_the_simulation_and_the_command_prints_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "resnet50_b184_6GB_p100"
    graph, plan = remat.zoo.graph(name), remat.zoo.load(name)
    words = places_in_words(graph, plan)
    assert words["CUDA allocator"].startswith("simulated: needs 6.")
    assert words["places"].startswith("one block of 1.0")
    assert list(places_in_words(graph, plan, is_cuda=False)) == ["places"]
    remat.save_graph(graph, tmp_path / "graph.json")
    plan.save(tmp_path / "plan.json")
    graph_file, plan_file = str(tmp_path / "graph.json"), str(tmp_path / "plan.json")
    assert main(["arena", plan_file, "--graph", graph_file, "--time-limit", "1"]) == 0
    assert words["CUDA allocator"] in capsys.readouterr().out
