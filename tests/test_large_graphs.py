"""On graphs of thousands of operations the promised time limits hold and the portfolio has a plan."""

from __future__ import annotations

import time

import pytest

import remat
from remat import Graph, Status


def chain(layers: int) -> Graph:
    """Forward 0..n-1, loss n, backward n+1..2n; each gradient reads its layer's output."""
    n = 2 * layers + 1
    deps = [[k - 1] if k else [] for k in range(layers + 1)] + [[k - 1, n - 1 - k] for k in range(layers + 1, n)]
    return Graph.from_nodes("long", deps, [1000] * n, [1] * n, backward=[k > layers for k in range(n)], loss=layers)


@pytest.mark.parametrize("name", ["checkpoint_last", "griewank", "portfolio"])
def test_quadratic_plans_do_not_break_the_time_limit(name: str) -> None:
    graph = chain(2000)
    limit_s = 5.0
    started = time.monotonic()
    solution = remat.solve(graph, 600_000, name, time_limit_s=limit_s, threads=1)
    assert time.monotonic() - started <= 1.05 * limit_s + 2
    if name == "checkpoint_last":  # 2000 + 2000 * 1999 / 2 forward computations and more
        assert solution.status is Status.SKIPPED
        assert "computations; the limit is" in solution.message
    else:
        assert solution.status in (Status.FEASIBLE, Status.OPTIMAL), solution.message
