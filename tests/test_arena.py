"""Arenas against brute force, cases by hand, an independent check of overlaps, and forged certificates."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import random_case, random_graph
from helpers import refused, schema_of
from ortools.sat.python import cp_model

import remat
from remat import Graph, InvalidInput, Operation, Plan, Value, simulate
from remat.arena import (
    Arena,
    compile_places,
    find_arena,
    intervals_of,
    load_of,
    place,
    placing,
    read_buffers,
    simulate_allocator,
)
from remat.check import check_file
from remat.cli import main
from remat.implementation import Implementation
from remat.plan import COMPUTE, FREE
from remat.solving.arenas import solve_with_arena


def overlapping(lower: Any, upper: Any, size: Any, offsets: Any) -> list[tuple[int, int]]:
    """Pairs of buffers that are live at once and overlap, by looking at every pair."""
    n = len(size)
    return [
        (i, j) for i, j in itertools.combinations(range(n), 2)
        if lower[i] < upper[j] and lower[j] < upper[i] and offsets[i] < offsets[j] + size[j]
        and offsets[j] < offsets[i] + size[i]
    ]  # fmt: skip


def least_block(lower: Sequence[int], upper: Sequence[int], size: Sequence[int]) -> int:
    """The smallest block, by trying every order: each buffer is placed on all earlier ones that it overlaps in time."""
    n, best = len(size), sum(size)

    def go(placed: tuple[tuple[int, int], ...], left: frozenset[int], top: int) -> None:
        nonlocal best
        if not left:
            best = min(best, top)
        for b in left:
            at = max((t for o, t in placed if lower[o] < upper[b] and lower[b] < upper[o]), default=0)
            if at + size[b] < best:
                go((*placed, (b, at + size[b])), left - {b}, max(top, at + size[b]))

    go((), frozenset(range(n)), 0)
    return best


def random_buffers(rng: np.random.Generator, n: int, times: int, most: int) -> tuple[list[int], list[int], list[int]]:
    ends = np.sort(rng.integers(0, times, (n, 2)), axis=1)
    return ends[:, 0].tolist(), (ends[:, 1] + 1).tolist(), rng.integers(0, most, n).tolist()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """The searches are compiled, so that limits of seconds are for them alone."""
    compile_places()


@pytest.mark.parametrize("has_greedy", [True, False])
def test_blocks_are_the_smallest_ones_by_brute_force(has_greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_greedy:  # the complete search alone finds and refutes
        monkeypatch.setattr(placing._Placer, "greedy", lambda self: None)
        monkeypatch.setattr(placing._Pushes, "can_run", lambda self: False)
    rng = np.random.default_rng(0)
    for n in (0, 1, 2, *range(3, 7), *range(3, 7)) * 8 + (7,) * 12:
        lower, upper, size = random_buffers(rng, n, 8, 9)
        placed = place(lower, upper, size, seed=n)
        assert not overlapping(lower, upper, size, placed.offsets)
        assert placed.bytes == max((placed.offsets + np.array(size, dtype=int)).tolist(), default=0)
        assert placed.is_optimal
        assert placed.bytes == least_block(lower, upper, size)


# Found by trying random buffers that fill their load at every time.
ABOVE_LOAD = [
    ([0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 5], [1, 2, 3, 4, 6, 6, 4, 5, 5, 6, 6], [2, 5, 1, 1, 2, 1, 1, 1, 1, 2, 2]),
    ([0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 5, 5], [1, 2, 3, 4, 4, 3, 4, 6, 5, 6, 6, 6], [5, 2, 3, 2, 1, 1, 2, 2, 5, 3, 1, 1]),
    ([0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 6, 6], [2, 1, 5, 3, 4, 3, 6, 5, 6, 7, 7, 7], [3, 2, 1, 1, 1, 2, 3, 1, 2, 2, 1, 2]),
]


@pytest.mark.parametrize(("lower", "upper", "size"), ABOVE_LOAD)
def test_a_block_that_must_exceed_its_load_is_proven_so(lower: list[int], upper: list[int], size: list[int]) -> None:
    for seed in range(3):
        placed = place(lower, upper, size, seed=seed)
        assert (placed.bytes, placed.bound, placed.is_optimal) == (placed.load + 1, placed.load + 1, True)
        assert not overlapping(lower, upper, size, placed.offsets)
    model = cp_model.CpModel()  # another complete solver
    starts = [model.new_int_var(0, placed.load - each, "") for each in size]
    along = [model.new_fixed_size_interval_var(start, each, "") for start, each in zip(starts, size, strict=True)]
    across = [model.new_fixed_size_interval_var(a, b - a, "") for a, b in zip(lower, upper, strict=True)]
    model.add_no_overlap_2d(across, along)
    assert cp_model.CpSolver().solve(model) == cp_model.INFEASIBLE


def test_a_capacity_or_no_time_ends_the_search_and_a_capacity_that_is_too_small_is_refuted() -> None:
    lower, upper, size = [0, 3, 0, 9, 5], [3, 9, 9, 12, 12], [4, 4, 4, 4, 4]
    assert place(lower, upper, size, 20).bytes <= 20
    placed = place(lower, upper, size, 8)
    assert placed.bound > 8
    assert placed.is_optimal
    lower, upper, size = random_buffers(np.random.default_rng(0), 60, 30, 40)
    placed = place(lower, upper, size, time_limit_s=1e-9)
    assert not overlapping(lower, upper, size, placed.offsets)
    assert placed.ratio < 1.5


@pytest.mark.parametrize("seed", range(3))
def test_the_local_search_alone_comes_near_the_load(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing._Placer, "greedy", lambda self: None)
    monkeypatch.setattr(placing._Exact, "can_run", lambda self: False)
    lower, upper, size = random_buffers(np.random.default_rng(seed), 80, 40, 30)
    capacity = int(1.1 * load_of(*map(np.array, (lower, upper, size))))
    placed = place(lower, upper, size, capacity, 20, seed=seed)
    assert placed.bytes <= capacity
    assert not overlapping(lower, upper, size, placed.offsets)


@pytest.mark.parametrize("function", [place, simulate_allocator])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (([0, 2], [1, 2], [1, 1]), "buffer 1 .* must end after it begins"), (([0], [1], [-1]), "size of at least 0"),
        (([0, 1], [1], [1]), "have 2, 1 and 1 entries"), (([0], [1], [0.5]), "size must be a list of integers"),
        (([0.5], [1], [1]), "must be a list of integers"),
    ],
)  # fmt: skip
def test_wrong_intervals_are_refused(function: Callable[..., Any], given: tuple[Any, ...], says: str) -> None:
    with refused(says):
        function(*given)
    with refused("seed must be an integer, not 0.5"):
        place([0], [1], [1], seed=0.5)  # pyright: ignore[reportArgumentType]


# Intervals of a plan, by hand ---------------------------------------------------------------------------------------


def lived(graph: Graph, plan: Plan, sharing: Any = ()) -> list[tuple[int, int, int]]:
    found = intervals_of(graph, plan, sharing)
    return list(zip(found.lower.tolist(), found.upper.tolist(), found.size.tolist(), strict=True))


def offsets_of(found: Any, offsets: Sequence[Sequence[int]]) -> np.ndarray:
    """[buffers] what an arena says of each call's buffers."""
    flat = np.zeros(len(found.size), dtype=int)
    for call, given in zip(found.calls, offsets, strict=True):
        flat[list(call)] = given
    return flat


def chain_of(n: int, size: Sequence[int], **more: Any) -> Graph:
    return Graph.from_nodes("chain", [[i - 1] if i else [] for i in range(n)], size, [1] * n, **more)


def test_a_value_computed_again_while_it_is_resident_is_a_second_buffer() -> None:
    operations = (
        Operation("a", "x", (), (0, 1)), Operation("b", "x", (0,), (2,)), Operation("c", "x", (1, 2), (3,)),
    )  # fmt: skip
    graph = Graph("two", operations, (Value("a0", 3), Value("a1", 5), Value("b", 1), Value("c", 1)))
    steps = [(COMPUTE, 0), (FREE, 0), (COMPUTE, 0), (COMPUTE, 1), (FREE, 0), (COMPUTE, 2)]
    plan = Plan.from_steps(graph, steps)
    # value 1 is there already: both copies are live while operation 0 runs again
    assert lived(graph, plan) == [(0, 1, 3), (0, 2, 5), (1, 3, 3), (1, 5, 5), (2, 5, 1), (3, 5, 1)]
    assert plan.arena(graph).load == simulate(graph, plan).peak_bytes == 13


def overwriting() -> tuple[Graph, Plan]:
    relu = Implementation("in_place", (0,), (1,), 1, 0, overwrites=0)
    operations = (
        Operation("a", "x", (), (0,)), Operation("relu", "x", (0,), (1,), implementations=(relu,)),
        Operation("c", "x", (1,), (2,)),
    )  # fmt: skip
    graph = Graph("over", operations, (Value("a", 4), Value("r", 4), Value("c", 1)))
    return graph, Plan.from_order(graph, [0, 1, 2], implementations=["", "in_place", ""])


def test_an_output_that_overwrites_its_input_has_its_place() -> None:
    graph, plan = overwriting()
    assert lived(graph, plan) == [(0, 3, 4), (2, 3, 1)]
    arena = plan.arena(graph)
    assert arena.offsets[0] == arena.offsets[1]
    assert arena.bytes == 5
    document = arena.document()
    document["offsets"][1] = [document["offsets"][1][0] + 1]
    with refused("not in its storage"):
        remat.arena.arena_of_document(document, graph, "it")


FORWARDING = chain_of(3, [4, 4, 2], cost_unit="ns")
SHARING = ((), ((0, 1),), ((1, 2),))  # the second pair differs in size: nothing is forwarded


def test_tensorflows_forwarding_merges_intervals_unless_the_input_lives_on() -> None:
    plan = Plan.from_order(FORWARDING, [0, 1, 2])
    assert lived(FORWARDING, plan, SHARING) == [(0, 3, 4), (2, 3, 2)]
    assert simulate(FORWARDING, plan).running_bytes.tolist() == [4, 8, 6]
    assert simulate(FORWARDING, plan, SHARING).running_bytes.tolist() == [4, 4, 6]
    arena = find_arena(FORWARDING, plan, sharing=SHARING)
    assert arena.bytes == 6
    assert remat.arena.arena_of_document(arena.document(), FORWARDING, "it").load == 6
    lives = Graph.from_nodes("lives", [[], [0], [0, 1]], [4, 4, 2], [1, 1, 1])
    assert simulate(lives, Plan.from_order(lives, [0, 1, 2]), SHARING).running_bytes.tolist() == [4, 8, 10]


def test_an_input_that_is_copied_to_the_host_is_written_over_when_the_copy_has_ended() -> None:
    first, write, copy = ("compute", 0), ("compute", 1), ("offload", 0)
    rest = [("free", 0), ("compute", 2), ("free", 1)]
    before, after = (
        Plan.from_steps(FORWARDING, [first, *order, *rest], link=remat.Link(10**9, 10**9, latency_s=0))
        for order in ((copy, write), (write, copy))
    )
    assert lived(FORWARDING, after, SHARING) == [(0, 2, 4), (1, 3, 4), (2, 4, 2)]
    assert simulate(FORWARDING, after, SHARING).peak_bytes == 8
    assert simulate(FORWARDING, before).end_cost.tolist() == [1, 2, 6]  # the copy lasts from 1 to 5
    assert simulate(FORWARDING, before, SHARING).end_cost.tolist() == [1, 6, 7]
    assert lived(FORWARDING, before, SHARING) == [(0, 3, 4), (2, 4, 2)]


def test_another_implementation_writes_over_no_input_that_it_does_not_name() -> None:
    other = Implementation("other", (), (1,), 1, 0)  # it reads nothing
    operations = (Operation("a", "x", (), (0,)), Operation("b", "x", (0,), (1,), implementations=(other,)))
    graph = Graph("other", operations, (Value("a", 4), Value("b", 4)))
    steps = [("compute", 0), ("compute", 1, "other"), ("free", 0)]
    plan = Plan.from_steps(graph, steps)
    sharing = ((), ((0, 1),))
    assert simulate(graph, plan, sharing).peak_bytes == 8
    assert find_arena(graph, plan, sharing=sharing).load == 8


def test_a_copy_from_the_host_takes_a_place() -> None:
    graph = Graph.from_nodes("step", [[], [0], [1], [0, 2]], [4, 2, 2, 1], [10, 20, 10, 10], cost_unit="ns")
    steps = [
        ("compute", 0), ("offload", 0), ("compute", 1), ("free", 0), ("compute", 2), ("free", 1), ("prefetch", 0),
        ("compute", 3),
    ]  # fmt: skip
    plan = Plan.from_steps(graph, steps, link=remat.Link("1GB/s", "1GB/s"))
    assert lived(graph, plan) == [(0, 2, 4), (1, 3, 2), (2, 6, 2), (3, 6, 4), (4, 6, 1)]
    arena = plan.arena(graph)
    assert arena.load == simulate(graph, plan).peak_bytes
    assert remat.arena.arena_of_document(arena.document(), graph, "it").bytes == arena.bytes


@pytest.mark.parametrize("seed", range(40))
def test_arenas_of_random_plans_hold_the_judges_bytes_at_every_moment_and_nothing_overlaps(seed: int) -> None:
    rng, is_joint = np.random.default_rng(seed), seed % 2 == 0
    graph = random_case(rng, is_joint, n=6)
    again = [k for k, op in enumerate(graph.operations) if not op.run_once and rng.random() < 0.4]
    plan = Plan.from_order(graph, [k for end in range(len(graph)) for k in (*(a for a in again if a < end), end)])
    if is_joint:
        names = [str(rng.choice(["", *(w.name for w in op.implementations)])) for op in graph.operations]
        chosen = Plan.from_order(graph, range(len(graph)), implementations=names)
        with contextlib.suppress(remat.InvalidPlan):  # an implementation reads what no other one made
            simulate(graph, chosen)
            plan = chosen
    trace = simulate(graph, plan)
    arena, found = plan.arena(graph, alignment=int(rng.choice([1, 4]))), intervals_of(graph, plan)
    live = [sum(s for a, b, s in lived(graph, plan) if a <= call < b) for call in range(len(plan.order))]
    assert live == (trace.running_bytes - graph.fixed_bytes).tolist()
    assert not overlapping(found.lower, found.upper, found.size, offsets_of(found, arena.offsets))
    assert (found.load, arena.is_optimal) == (trace.peak_bytes - graph.fixed_bytes, True)
    kept = remat.arena.arena_of_document(json.loads(json.dumps(arena.document())), graph, "it")
    assert (kept.bytes, kept.load) == (arena.bytes, arena.load)


# Certificates -------------------------------------------------------------------------------------------------------


@pytest.fixture
def certificate() -> tuple[Graph, dict[str, Any]]:
    graph = random_graph(np.random.default_rng(3), 6)
    plan = Plan.from_order(graph, range(6), 10**6)
    return graph, json.loads(json.dumps(plan.arena(graph).document()))


def test_a_saved_arena_is_checked_by_the_command(
    certificate: tuple[Graph, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, document = certificate
    path, graph_file = tmp_path / "a.json", tmp_path / "g.json"
    remat.save_graph(graph, graph_file)
    path.write_text(json.dumps(document))
    assert main(["check", str(path), "--graph", str(graph_file)]) == 0
    assert "nothing overlaps" in capsys.readouterr().out
    assert "give --graph" in check_file(path)[0]
    path.write_text(json.dumps(document | {"bytes": "many"}))
    assert main(["check", str(path)]) == 1
    assert "a.json: 'bytes' must be" in capsys.readouterr().err


def test_every_overlap_is_refused(certificate: tuple[Graph, dict[str, Any]]) -> None:
    graph, document = certificate
    plan = Plan.from_document(document["plan"], graph, "it")
    found = intervals_of(graph, plan)
    verdicts = set()
    for call, places in enumerate(document["offsets"]):
        for i, at in itertools.product(range(len(places)), range(document["bytes"])):
            forged = json.loads(json.dumps(document))
            forged["offsets"][call][i] = at
            offsets = offsets_of(found, forged["offsets"])
            is_within = (offsets + found.size <= document["bytes"]).all()
            is_right = bool(is_within) and not overlapping(found.lower, found.upper, found.size, offsets)
            verdicts.add(is_right)
            with contextlib.nullcontext() if is_right else refused("overlap|not within"):
                remat.arena.arena_of_document(forged, graph, "it")
    assert verdicts == {True, False}


def test_forged_arenas_are_refused(certificate: tuple[Graph, dict[str, Any]]) -> None:
    graph, document = certificate
    remat.arena.arena_of_document(document, graph, "it")
    offsets, steps = document["offsets"], document["plan"]["steps"]
    at = next(i for i, (kind, _) in enumerate(steps) if kind == "free")
    forgeries = {
        "must be 'remat-arena/1'": document | {"format": "remat-arena/2"},
        "was made for graph": document | {"graph_sha256": "0" * 64},
        "'plan_sha256' is not": document | {"plan_sha256": "0" * 64},
        "'plan_sha256' is not the": document | {"plan": document["plan"] | {"steps": steps[:at] + steps[at + 1 :]}},
        "'load' is": document | {"load": document["load"] - 1},
        "not within": document | {"bytes": document["load"] - 1},
        "has 5 entries": document | {"offsets": offsets[:-1]},
        "entry 0 of 'offsets' has 0": document | {"offsets": [[], *offsets[1:]]},
        "entry 0 of 'offsets' must hold": document | {"offsets": [[-1], *offsets[1:]]},
        "no multiple of 64": document | {"alignment": 64, "offsets": [[1], *offsets[1:]]},
        "alignment must be": document | {"alignment": 0},
        "'plan' must have 'format'": document | {"plan": document["plan"] | {"format": "x"}},
        "'sharing' must be": document | {"sharing": [[]]},
        "'plan' was made for another graph": document | {"plan": document["plan"] | {"graph_sha256": "0" * 64}},
        "'plan' says scope": document | {"plan": document["plan"] | {"scope": "free"}},
        "is no input and output": document | {"sharing": [[[5, 0]], [], [], [], [], []]},
    }
    for why, forged in forgeries.items():
        with refused(why):
            remat.arena.arena_of_document(forged, graph, "it")


# Commands -----------------------------------------------------------------------------------------------------------


def test_the_command_places_buffers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text("id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n")
    assert main(["arena", str(path), "--capacity", "12", "--out", str(tmp_path / "o.csv")]) == 0
    assert "5 buffers in 12 bytes" in capsys.readouterr().out
    assert main(["arena", str(path), "--capacity", "11"]) == 1
    lines = [line.split(",") for line in (tmp_path / "o.csv").read_text().splitlines()]
    assert lines[0] == ["id", "lower", "upper", "size", "offset"]
    columns = [[int(line[i]) for line in lines[1:]] for i in range(1, 5)]
    assert not overlapping(*columns)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("id,lower,upper,size\n" + "x" * 200_000 + ",0,3,4\n", "line 2: cannot be read as CSV"),
        ("a,b\n", "first line"),
        ("id,lower,upper,size\nb1,0,3\n", "has 3 entries, but the first line 4"),
        ("id,lower,upper,size,size\nb1,0,3,4,8\n", "names a column twice"),
        ("id,lower,upper,size,alignment\nb1,0,3,4,8\n", "has an alignment or gaps"),
        ("id,lower,upper,size,gaps\nb1,0,3,4,1-2\n", "has an alignment or gaps"),
        ("id,lower,upper,size\nb1,0,3,1_0\n", "is no id and three integers"),
        ("id,lower,upper,size\nb1,0,3,99999999999999999999\n", "is no id and three integers"),
    ],
)
def test_a_wrong_file_of_buffers_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text(text)
    assert main(["arena", str(path)]) == 1
    line = capsys.readouterr().err
    assert says in line
    assert line.count("\n") == 1


def test_minimallocs_other_forms_of_a_file_mean_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "buffers.csv"
    for text in (
        "id,lower,upper,size\r\nb1,0,3,4\r\nb2,3,9,6\r\n",
        "id,lower,upper,size\rb1,0,3,4\rb2,3,9,6\r",
        "size,upper,id,lower\n4,3,b1,0\n\n6,9,b2,3\n",
        "buffer_id,begin,end,size,alignment,gaps\nb1,0,2,4,1,\nb2,3,8,6,1,\n",
        "id,lower,upper,size,offset\nb1,0,3,4,0\nb2,3,9,6,100\n",
    ):
        path.write_bytes(text.encode())
        ids, *columns = read_buffers(path)
        assert ids == ["b1", "b2"]
        assert [each.tolist() for each in columns] == [[0, 3], [3, 9], [4, 6]]
    assert main(["arena", str(path), "--capacity", "8"]) == 0
    assert capsys.readouterr().err == f"note: {path}: the offsets in it are not read; all buffers are placed anew\n"


def test_pairs_that_share_a_storage_must_be_of_their_operation() -> None:
    graph = chain_of(3, [4, 4, 4])
    plan = Plan.from_order(graph, [0, 1, 2])
    for sharing in ([[(0, 1)]], [[], [(2, 1)], []], [[], [(0, 2)], []]):
        with pytest.raises(InvalidInput, match="'sharing'"):
            find_arena(graph, plan, sharing=sharing)
        with pytest.raises(InvalidInput, match="'sharing'"):
            simulate(graph, plan, sharing)


def test_the_command_places_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = chain_of(3, [4, 4, 4])
    remat.save_graph(graph, tmp_path / "g.json")
    Plan.from_order(graph, [0, 1, 2]).save(tmp_path / "p.json")
    given = ["arena", str(tmp_path / "p.json"), "--graph", str(tmp_path / "g.json")]
    for budget, code in ((8, 0), (7, 1)):
        assert main([*given, "--budget", str(budget), "--out", str(tmp_path / "a.json")]) == code
        assert ("within the budget" in capsys.readouterr().out) == (code == 0)
        kept = Arena.read(tmp_path / "a.json", graph)
        assert (kept.bytes, kept.budget_bytes, kept.excess_bytes) == (8, budget, 8 - budget)
    assert main(given[:2]) == 1
    assert "--graph" in capsys.readouterr().err


# Published instances ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_minimallocs_cases_are_within_their_capacity(instances: Path) -> None:
    paths = sorted((instances / "arena").glob("*.csv"))
    assert paths
    for path in paths:
        capacity = int(path.name.split(".")[1])
        _, lower, upper, size = read_buffers(path)
        placed = place(lower, upper, size, capacity, 60)
        assert placed.bytes <= capacity, path.name
        assert not overlapping(lower, upper, size, placed.offsets)


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet50_b184_5GB_p100", "unet_b11_5GB", "vgg16_b176_6GB"])
def test_plans_of_the_zoo_have_an_arena_of_their_load(name: str) -> None:
    graph, plan = remat.zoo.graph(name), remat.zoo.load(name)
    arena = plan.arena(graph, time_limit_s=60)
    assert arena.bytes == arena.load == simulate(graph, plan).peak_bytes - graph.fixed_bytes


# Solves -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_solve_with_an_arena_repairs_what_fragments(warm_search: None) -> None:
    graph = remat.zoo.graph("unet_b11_5GB_p100")
    budget = 5 * 2**30
    solution = remat.solve(graph, budget, time_limit_s=12, threads=1, arena=True)
    assert solution.arena.excess_bytes == 0
    assert solution.arena.total_bytes <= budget == solution.budget_bytes == solution.plan.budget_bytes
    remat.arena.arena_of_document(solution.arena.document(), graph, "it")


class Fragmenting:
    """Its plans need their budget, and their arenas `gap` bytes more; below the budget `least` it finds none."""

    def __init__(self, gap: int, least: int, monkeypatch: pytest.MonkeyPatch):
        self.graph = chain_of(3, [4, 4, 4], fixed_bytes=2)
        self.least, self.asked = least, list[int]()
        found = find_arena(self.graph, Plan.from_order(self.graph, range(3)))

        def arena(plan: Plan, graph: Graph, budget: int, time_limit_s: float) -> Arena:
            plan = replace(plan, budget_bytes=budget)
            return replace(found, bytes=self.asked[-1] - graph.fixed_bytes + gap, plan=plan)

        monkeypatch.setattr(Plan, "arena", arena)

    def solve(self, budget: int, *_: Any) -> remat.Solution:
        self.asked.append(budget)
        plan = Plan.from_order(self.graph, range(3), budget)
        found = remat.Solution(
            remat.Status.FEASIBLE, "test", self.graph.name, budget, plan.scope, "exact", plan, 100, budget, 0.1,
            bound=90 + len(self.asked),
        )  # fmt: skip
        return found if budget >= self.least else replace(found, plan=None, cost=None, peak_bytes=None, bound=None)


@pytest.mark.parametrize(
    ("large", "budget", "gap", "least", "asked", "total", "bound", "says"),
    [
        # The next round counts on what the arena has lost; the bound is that of the whole budget.
        (10, 50, 3, 0, [50, 47], 50, 91, "so that its arena fits"),
        # On a large graph the first plan leaves room; the second has the whole budget, which its arena misses, and the
        # bound. Without a plan for less, it is the first.
        (1, 1000, 3, 0, [980, 1000], 983, 92, ""),
        (1, 1000, 0, 1000, [980, 1000], 1000, 92, ""),
        # An arena that never fits says by how much.
        (10, 50, 3, 50, [50, 47], 53, 91, "the arena misses the budget by 3 B"),
    ],
)
def test_a_budget_is_that_of_the_arena(
    large: int, budget: int, gap: int, least: int, asked: list[int], total: int, bound: int, says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("remat.solving.arenas.LARGE", large)
    solves = Fragmenting(gap, least, monkeypatch)
    solution = solve_with_arena(solves.graph, budget, 5.0, solves.solve)
    assert solves.asked[: len(asked)] == asked
    assert (solution.budget_bytes, solution.bound) == (budget, bound)
    assert solution.plan is not None
    assert solution.arena.total_bytes == total
    assert says in solution.message


def test_no_round_begins_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    solves = Fragmenting(3, 50, monkeypatch)  # an arena never fits

    def slow(*given: Any) -> remat.Solution:
        time.sleep(0.3)
        return solves.solve(*given)

    assert solve_with_arena(solves.graph, 50, 0.5, slow).arena.excess_bytes == 3
    assert len(solves.asked) == 2


def test_what_is_saved_fits_its_schema(certificate: tuple[Graph, dict[str, Any]]) -> None:
    (graph, document), validator = certificate, schema_of("remat-arena/1")
    validator.validate(document)
    wrong = [None, -1, 1.5, True, "x", [1.5], [["a"]]]
    changed = [{k: v for k, v in document.items() if k != key} for key in document]
    changed += [document | {key: one} for key in document for one in wrong]
    taken = []
    for one in changed:
        with contextlib.suppress(InvalidInput):
            remat.arena.arena_of_document(one, graph, "it")
            taken.append(one)
    assert all(validator.is_valid(one) for one in taken)
    assert len(taken) < len(changed) / 2
