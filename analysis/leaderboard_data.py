"""The rows of a leaderboard as JSON for its page: problems, entrants, solves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from analysis.ranking import BOARD, PROBLEM, best_costs
from analysis.results import Frame, as_objects
from analysis.style import order_of, style_of
from remat.units import format_size


def payload(rows: Frame, families: Sequence[str]) -> dict[str, Any]:
    """What the page's script reads.

    ``problems`` hold the cheapest known cost and the best proven bound; ``solves`` are lists in the order of
    ``columns``, with the places of their problem and entrant.

    Args:
        rows: from `ranking.count_rows`; those of a benchmark also have its columns.
        families: strategies that ignore the budget; they have no time limit.
    """
    rows = rows.assign(entrant=list(_entrants(rows)), planned=rows["status"].isin(("OPTIMAL", "FEASIBLE")))
    problems = list(_problems(rows))
    places = {tuple(problem.pop("key")): i for i, problem in enumerate(problems)}
    entrants = sorted(
        {(row.strategy, row.entrant) for row in rows.itertuples()}, key=lambda pair: (order_of(pair[0]), pair[1])
    )
    names = [name for _, name in entrants]
    columns = ("problem", "entrant", "limit", "status", "cost", "bound", "peak", "wall", "steps", "memory", "message")
    return {
        "problems": problems,
        "entrants": [_entrant(strategy, name, strategy in families) for strategy, name in entrants],
        "columns": columns,
        "solves": [
            [places[_key(row)], names.index(row.entrant), row.time_limit_s, row.status, row.cost, row.bound,
             row.peak_bytes, round(row.wall_s, 3), _steps(row), getattr(row, "memory", None), row.message]
            for row in as_objects(rows)
        ],
    }  # fmt: skip


def _entrants(rows: Frame) -> Iterator[str]:
    """Each row's strategy, with its options."""
    for row in rows.itertuples():
        yield f"{row.strategy} ({row.options})" if row.options else row.strategy


def _entrant(strategy: str, name: str, is_family: bool) -> dict[str, Any]:
    style = style_of(strategy)
    label = style.label + name.removeprefix(strategy)
    return {"name": name, "label": label, "colour": style.colour, "dash": style.dash, "family": is_family}


def _key(row: Any) -> tuple[Any, ...]:
    return row.scope, row.accounting, row.graph_sha256, int(row.budget_bytes)


def _problems(rows: Frame) -> Iterator[dict[str, Any]]:
    """Each graph at each budget of a scope and an accounting."""
    for _, board in rows.groupby(list(BOARD), sort=True):
        best = best_costs(board).set_index(list(PROBLEM))["best"].to_dict()
        for _, problem in board.groupby(list(PROBLEM), sort=True):
            row = next(as_objects(problem))
            proofs = board[
                (board["graph_sha256"] == row.graph_sha256) & (board["budget_bytes"] >= row.budget_bytes)
                & (board["status"] != "FAILED") & board["bound"].notna()
            ]["bound"]  # fmt: skip
            yield {
                "key": _key(row),
                "name": getattr(row, "instance", None) or row.graph_name,
                "family": getattr(row, "family", None) or "",
                "board": f"{row.scope}, {row.accounting}",
                "budget": int(row.budget_bytes),
                "text": format_size(int(row.budget_bytes), digits=3),
                "operations": row.n_operations,
                "total": row.total_cost,
                "plain": row.store_all_peak_bytes,
                "best": best.get((row.graph_sha256, row.budget_bytes)),
                "bound": max([row.total_cost, *map(int, proofs)]),
            }


def _steps(row: Any) -> list[list[float]]:
    """[seconds after its process was ready, cost] of each improvement; without any record, the end of the solve."""
    stats = json.loads(getattr(row, "stats", None) or "{}")
    steps = json.loads(getattr(row, "trajectory", None) or "[]") or stats.get("trajectory", [])
    start = getattr(row, "start_s", None) or stats.get("start_s") or 0.0
    if not steps:
        return [] if row.cost is None else [[round(row.wall_s, 3), row.cost]]
    return [[round(max(0.0, step[0] - start), 3), step[1]] for step in steps]
