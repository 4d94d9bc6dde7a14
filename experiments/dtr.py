"""DTR on its authors' operator logs beside the offline optimum, and beside its published slowdowns.

Budgets are the published shares of the program's own peak. The online method runs with each of its heuristics, and
the portfolio searches offline and proves a bound, both on plans that compute everything for the first time in the
program's order.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import figures
from analysis.published import PUBLISHED
from experiments.arguments import names_of
from experiments.documents import Column, Drawing, made, table_of
from experiments.measure_solve import published_folder, solve_case
from experiments.registry import Case, Row, experiment
from remat.frontends.dtr_log import load_dtr_log
from remat.units import format_size

SCOPE, ONLINE, OFFLINE = "fixed_order", "dtr", "portfolio"
HEURISTICS = ("exact", "union_find", "local", "lru", "size", "random")


@dataclass(frozen=True, slots=True)
class Network:
    """A network of DTR's table; ``conf/published.yaml`` describes the attributes."""

    log: str
    plain_gb: float
    slowdowns: Mapping[int, float]
    note: str = ""
    instead: str = ""


NETWORKS = {name: Network(**of) for name, of in PUBLISHED["dtr"].items()}


@experiment(page="results/dtr.md")
def dtr(networks: Sequence[str] = (), time_limit: float = 10.0, threads: int = 2) -> Iterator[Case]:
    """DTR and the offline optimum on the operator logs of DTR's authors (REMAT_INSTANCES has the folder dtr/)."""
    for name in names_of("network", networks or NETWORKS, NETWORKS):
        published = NETWORKS[name]
        source = f"dtr/{published.log}.log.gz"
        log = load_dtr_log(published_folder("dtr") / source)
        for budget_gb, slowdown in published.slowdowns.items():
            ratio = budget_gb / published.plain_gb
            for strategy, options in ((OFFLINE, {}), *((ONLINE, {"heuristic": each}) for each in HEURISTICS)):
                yield solve_case(
                    source, log.graph, strategy, int(ratio * log.program_peak_bytes), scope=SCOPE,
                    time_limit_s=time_limit, threads=threads, options=options, network=name, published_gb=budget_gb,
                    published=slowdown, ratio=ratio, program_peak_bytes=log.program_peak_bytes,
                )  # fmt: skip


def networks_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """[network] what is known of its log, and ``rows``: for each budget the slowdown of every method and the bound.

    A slowdown is None if a method thrashes, or if its memory does not suffice.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in NETWORKS:
        solves: dict[float, dict[str, Row]] = {}
        for row in rows:
            if row["network"] == name:
                solves.setdefault(row["ratio"], {})[row["options"].get("heuristic", OFFLINE)] = row
        whole = [of for _, of in sorted(solves.items(), reverse=True) if len(of) == len(HEURISTICS) + 1]
        if whole:
            found[name] = {**whole[0][OFFLINE], "rows": [_budget(of) for of in whole]}
    return found


def _budget(of: Mapping[str, Row]) -> dict[str, Any]:
    offline = of[OFFLINE]

    def slowdown(cost: int | None) -> float | None:
        return None if cost is None else cost / offline["total_cost"]

    return {
        "ratio": offline["ratio"], "published": offline["published"],
        "online": {name: slowdown(of[name]["cost"]) for name in HEURISTICS},
        "offline": slowdown(offline["cost"]), "bound": slowdown(offline["bound"]),
    }  # fmt: skip


def _title(name: str) -> str:
    instead = NETWORKS[name].instead
    return f"{name} (log: {instead})" if instead else name


def best_of(row: Mapping[str, Any]) -> float:
    """The smallest slowdown that is known."""
    return min(x for x in (row["offline"], *row["online"].values()) if x is not None)


def _times(slowdown: float | None) -> str:
    return "thrashes" if slowdown is None else f"{slowdown:.4f}"


def _above_optimum(row: Mapping[str, Any]) -> str:
    """The share by which DTR is slower than the optimum, which lies between the bound and the best known plan."""
    if (exact := row["online"]["exact"]) is None:
        return ""
    low, high = (f"{100 * (exact / of - 1):.1f}" for of in (best_of(row), row["bound"]))
    return f"{low}%" if low == high else f"{low} to {high}%"


LOGS: Mapping[str, Column] = {
    "network": lambda row: _title(row["network"]), "log": lambda row: f"{NETWORKS[row['network']].log}.log.gz",
    "operations": "{n_operations:,}", "step": lambda row: f"{row['total_cost'] / 1e6:.1f} ms",
    "constants": lambda row: format_size(row["fixed_bytes"], digits=3),
    "program's peak": lambda row: format_size(row["program_peak_bytes"], digits=3),
    "plain peak of the graph": lambda row: format_size(row["plain_peak_bytes"], digits=3),
    "differs by": lambda row: NETWORKS[row["network"]].note,
}  # fmt: skip
BUDGETS: Mapping[str, Column] = {"network": lambda row: _title(row["network"]), "memory": "{ratio:.2f}"}
SLOWDOWNS: Mapping[str, Column] = {
    **BUDGETS, "published": "{published:.3f}", "DTR, exact": lambda row: _times(row["online"]["exact"]),
    "DTR, union-find": lambda row: _times(row["online"]["union_find"]),
    "published − exact": lambda row: f"{row['published'] - x:.3f}" if (x := row["online"]["exact"]) else "",
    "portfolio": lambda row: _times(row["offline"]), "bound": "{bound:.4f}",
    "gap": lambda row: f"{1 - row['bound'] / row['offline']:.2%}" if row["offline"] else "",
    "DTR above the optimum": _above_optimum,
}  # fmt: skip


@dtr.draws
def page(stored: Sequence[Row]) -> Drawing:
    """The tables and the figure."""
    networks = networks_of(stored)
    rows = [{**row, "network": name} for name, network in networks.items() for row in network["rows"]]
    heuristics: dict[str, Column] = {name: lambda row, name=name: _times(row["online"][name]) for name in HEURISTICS}
    titled = {_title(name): network for name, network in networks.items()}
    where = made(stored, threads="threads", time_limit_s="s for each search of the portfolio")
    parts = [f"{where}.", table_of(networks.values(), LOGS, "llrrrrrl"),
             table_of(rows, SLOWDOWNS), _summary(rows), table_of(rows, {**BUDGETS, **heuristics})]  # fmt: skip
    return Drawing("\n\n".join(parts), figures={"dtr": figures.dtr(titled)})


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How far the online method is from the optimum, over the rows in which something has to be computed again."""
    tight = [row for row in rows if row["bound"] > 1 and row["online"]["exact"] is not None]
    if not tight:
        return ""
    far = [(row["online"]["exact"] / best_of(row) - 1, row["online"]["exact"] / row["bound"] - 1) for row in tight]
    least, most = (statistics.median(column) for column in zip(*far, strict=True))
    ahead = sum(best_of(row) < (row["offline"] or float("inf")) for row in rows)
    return (
        f"In the {len(tight)} rows in which something has to be computed again, DTR with its exact heuristic is "
        f"{least:.1%} slower than the best known plan and {most:.1%} above the bound (medians); at most "
        f"{max(x for x, _ in far):.1%} and {max(x for _, x in far):.1%}. "
        f"In {ahead} rows a heuristic of DTR is faster than the portfolio's plan."
    )
