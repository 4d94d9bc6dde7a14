"""The annealer on graphs so large that it is called for few moves at a time."""

from __future__ import annotations

import pytest

from remat import Graph, Plan, simulate
from remat.frontends import synthetic
from remat.search import kernel
from remat.search.anneal import Annealer


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
