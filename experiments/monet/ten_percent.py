"""Memory at 10 % over PyTorch's own step: the smallest budget with such a plan, for each set of implementations.

Bisection. The lower end is the largest budget without a plan found within the overhead, or the largest working set; the
upper end is the smallest peak of a plan found. A search that finds no plan in time proves nothing.
"""

from __future__ import annotations

from typing import Any

import remat
from experiments.monet.cases import CPU, NO_WINOGRAD, NONE, OURS, Case, Context, graph_of, pytorch_trace, solve
from experiments.monet.published import Network
from experiments.row import Row
from remat.frontends.monet import plain_pytorch

OVERHEAD = 0.10
WIDER = (NONE, CPU, NO_WINOGRAD)  # each contains every plan of those before it, at the same cost or less
NEAR = 1.01  # bisection stops when the ratio of the ends is below it


def run(context: Context) -> dict[str, Any]:
    """The final bracket of each network and level, and every row behind it."""
    caps = {n.name: int((1 + OVERHEAD) * pytorch_trace(context, n).cost) for n in context.networks}
    brackets = {(n.name, level): _begin(context, n, level, caps[n.name]) for n in context.networks for level in WIDER}
    rows: list[dict[str, Any]] = []
    for _ in range(context.scale.halvings):
        _carry(brackets)
        cases = [
            Case(name, level, OURS, round((low * high) ** 0.5), cost_cap=caps[name])
            for (name, level), (low, high) in brackets.items() if high > NEAR * low
        ]  # fmt: skip
        rows += solve(context, cases)
        for case in cases:
            row = context.rows.get(case)
            if row is None:  # the command line leaves the portfolio out
                continue
            low, high = brackets[case.network, case.level]
            if _is_enough(row, caps[case.network]):
                high = min(high, row.peak_bytes or high)
            else:
                low = case.budget_bytes
            brackets[case.network, case.level] = low, max(low, high)
    _carry(brackets)
    found = [{"network": name, "level": level, "not_found_bytes": low, "found_bytes": high}
             for (name, level), (low, high) in brackets.items()]  # fmt: skip
    return {"overhead": OVERHEAD, "found": found, "rows": rows}


def _carry(brackets: dict[tuple[str, str], tuple[int, int]]) -> None:
    """Narrow the brackets, because a plan with fewer implementations is also one with more."""
    for (name, level), (low, high) in brackets.items():
        least = min(brackets[name, inner][1] for inner in WIDER[: WIDER.index(level) + 1])
        brackets[name, level] = min(low, least), min(high, least)


def _begin(context: Context, network: Network, level: str, cap: int) -> tuple[int, int]:
    """The first bracket, from the rows of earlier parts."""
    graph = graph_of(context, network, level)
    plain = remat.Plan.from_order(graph, range(len(graph))) if level == NONE else plain_pytorch(graph)
    known = [(case, row) for case, row in context.rows.items() if (case.network, case.level) == (network.name, level)]
    peaks = [row.peak_bytes for _, row in known if _is_enough(row, cap) and row.peak_bytes is not None]
    high = min([remat.simulate(graph, plain).peak_bytes, *peaks])
    tried = {case.budget_bytes for case, _ in known if case.strategy == OURS and case.budget_bytes < high}
    return max([graph.largest_working_set()[0], *tried]), high


def _is_enough(row: Row, cap: int) -> bool:
    """Whether the row has a plan that costs at most `cap`."""
    return row.cost is not None and row.cost <= cap
