"""The annealer on graphs so large that it is called for few moves at a time."""

from __future__ import annotations

import itertools

import pytest

from remat import Graph, Plan, simulate
from remat.frontends import synthetic
from remat.search import kernel
from remat.search.anneal import Annealer, Best


@pytest.fixture(scope="module")
def graph() -> Graph:
    return synthetic.layered(n=1200)


def peak(graph: Graph) -> int:
    return simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes


def test_the_price_rises_over_calls_that_are_shorter_than_its_window(graph: Graph) -> None:
    annealer = Annealer(graph, peak(graph) // 20, seed=0)  # no plan fits
    annealer.load(Plan.from_order(graph, range(len(graph))).order)
    price = first = annealer.price
    for _ in range(400):
        *_, price = kernel.anneal(annealer.state, 40, 1.0, 1.0, price, 1 << 60, 1 << 60)
    assert price > 2 * first


@pytest.mark.parametrize("chunks", [1, 2, 100], ids="stopped after {}".format)
def test_a_round_that_aimed_below_the_budget_ends_with_the_excess_over_the_budget(graph: Graph, chunks: int) -> None:
    budget = int(0.9 * peak(graph))
    annealer = Annealer(graph, budget, seed=1)
    annealer.load(Plan.from_order(graph, range(len(graph))).order)
    best, count = Best(), itertools.count()
    finished = annealer.round(100_000, 0.1, 0.003, best, lambda: next(count) >= chunks, lambda: None, fixed=True)
    assert finished == (chunks == 100)
    again = Annealer(graph, budget, seed=0)
    again.load(annealer.order())
    assert (annealer.cost, annealer.excess) == (again.cost, again.excess)
    assert best.order is not None
    trace = simulate(graph, Plan.from_order(graph, best.order.tolist()))
    assert trace.cost == best.cost
    assert (trace.peak_bytes <= budget) == (best.excess == 0)
    assert (best.excess == 0) == (chunks == 100)
