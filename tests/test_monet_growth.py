"""Checkmate's program with a choice of implementations: its optimum is that of brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brute_force import optimum, random_graph

from experiments.monet.growth import PROGRAMS, checkmate_program, measured, with_algorithms
from remat import Graph, Operation, Plan, simulate
from remat.programs.highs import solve_program
from remat.programs.program import scale_of
from remat.programs.published import build


def joint(seed: int) -> Graph:
    """A random graph in which half of the operations have two algorithms; the faster one needs workspace."""
    graph = random_graph(np.random.default_rng(seed), 6, min_bytes=1, min_cost=2)
    half = [replace(op, kind="convolution") if k % 2 else op for k, op in enumerate(graph.operations)]
    made = with_algorithms(replace(graph, operations=tuple(half)), 2)
    return replace(made, operations=tuple(map(_faster, made.operations)))


def _faster(op: Operation) -> Operation:
    others = tuple(replace(one, cost=op.cost - 1, workspace_bytes=2) for one in op.implementations)
    return replace(op, implementations=others)


@pytest.mark.parametrize("seed", range(8))
def test_its_optimum_is_that_of_brute_force(seed: int) -> None:
    graph = joint(seed)
    peak = simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes
    for budget in range(graph.largest_working_set()[0], peak + 3):
        best = optimum(graph, budget, "staged")
        program = checkmate_program(graph, budget)
        found = solve_program(program, {"time_limit": 60, "threads": 1}).x
        assert best == (None if found is None else round(float(program.cost @ found) / scale_of(graph.total_cost)))


def test_without_a_choice_it_has_the_relaxation_of_the_published_program() -> None:
    graph = joint(3).default()
    budget = simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes - 1
    equations = build(graph)
    published = replace(equations.program((budget - graph.fixed_bytes) // equations.unit_bytes + 0.5), is_integer=None)
    ours = replace(checkmate_program(graph, budget), is_integer=None)
    values = [solve_program(program, {"threads": 1}) for program in (published, ours)]
    costs = [float(program.cost @ found.x) for program, found in zip((published, ours), values, strict=True)]
    unit = equations.cost_scale / equations.cost_unit, scale_of(graph.total_cost)
    assert costs[0] / unit[0] == pytest.approx(costs[1] / unit[1], rel=1e-5)


def test_both_programs_are_measured() -> None:
    graph = with_algorithms(joint(1), 1)
    for build_program in PROGRAMS.values():
        flags = [replace(op, is_backward=k > 3) for k, op in enumerate(graph.operations)]
        sizes = measured(build_program, replace(graph, operations=tuple(flags)), 1000, 10.0)
        assert sizes["rows"] > 0
        assert sizes["lp_s"] is not None
