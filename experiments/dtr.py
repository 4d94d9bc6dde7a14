"""``make dtr``: DTR on its authors' operator logs beside the offline optimum, and beside its published slowdowns.

Budgets are the published shares of the program's own peak. The online method runs with each of its heuristics, and
the portfolio searches offline and proves a bound, both on plans that compute everything for the first time in the
program's order. A finished row is kept, unless ``--seconds`` or the log is another one, or ``--again`` is given.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import remat
from analysis.dtr import draw_dtr
from experiments.arguments import Parser, names_of, run, seconds
from experiments.documents import DOCS, ROOT, Document, Drawing, markdown_table
from experiments.provenance import provenance
from experiments.settings import RUNS_FOLDER
from experiments.solving import finished
from experiments.store import code_of, write_json
from remat.errors import InvalidInput
from remat.files import read_json
from remat.frontends.dtr_log import DtrLog, load_dtr_log
from remat.search.__main__ import main as compile_search
from remat.simulator import plain_peak
from remat.units import format_size

RESULTS = ROOT / "results" / "dtr.json"
SECONDS, THREADS, SCOPE = 10.0, 2, "fixed_order"
ONLINE, OFFLINE = "dtr", "portfolio"
HEURISTICS = ("exact", "union_find", "local", "lru", "size", "random")


@dataclass(frozen=True, slots=True)
class Published:
    """A network of DTR's table, measured on a Titan V.

    Attributes:
        log: the operator log that stands for it.
        plain_gb: peak of the plain step.
        slowdowns: step time over that of the plain step, for each budget in GB.
        note: how the log differs from the network.
        instead: the network of the log, if it is another one.
    """

    log: str
    plain_gb: float
    slowdowns: Mapping[int, float]
    note: str = ""
    instead: str = ""


PUBLISHED = {
    "InceptionV4": Published("inceptionv4", 11.3, {10: 1.074, 8: 1.104, 6: 1.147, 4: 1.252}),
    "LSTM": Published("lstm", 11.1, {10: 1.229, 8: 1.253, 6: 1.293, 4: 1.414}, "a smaller batch"),
    "ResNet-1202": Published(
        "resnet32", 8.9, {8: 1.282, 6: 1.348, 4: 1.420, 2: 1.473}, "another depth and batch", "ResNet-32"
    ),
    "Transformer": Published("transformer", 9.9, {8: 1.115, 6: 1.146, 4: 1.189, 2: 1.596}),
    "TreeLSTM": Published("treelstm", 8.9, {8: 1.649, 6: 1.846, 4: 2.087, 2: 3.010}, "a smaller batch"),
    "U-Net": Published("unet", 8.4, {8: 1.066, 7: 1.088, 6: 1.141, 4: 1.269}, "published at 4 GB: a peak of 6.95 GB"),
}


def logs_of(names: Sequence[str], folder: Path) -> dict[str, Path]:
    """[network] the file of its log.

    Raises:
        InvalidInput: one is missing.
    """
    found = {name: folder / f"{PUBLISHED[name].log}.log.gz" for name in names}
    missing = [path.name for path in found.values() if not path.is_file()]
    if missing:
        raise InvalidInput(
            f"{folder} lacks {', '.join(missing)}: put the logs of DTR's simulator there (logs.zip of "
            "uwsampl/dtr-prototype, each compressed with gzip), or name their folder with --logs"
        )
    return found


def facts_of(log: DtrLog) -> dict[str, Any]:
    """What is known of a log without a solve."""
    graph = log.graph
    return {
        "operations": len(graph), "total_cost": graph.total_cost, "fixed_bytes": graph.fixed_bytes,
        "program_peak_bytes": log.program_peak_bytes, "plain_peak_bytes": plain_peak(graph),
        "graph_sha256": graph.sha256(),
    }  # fmt: skip


def solved(graph: remat.Graph, budget_bytes: int, time_limit_s: float) -> dict[str, Any]:
    """Slowdowns by each heuristic (None: it thrashes, or memory does not suffice) and by the portfolio, and a bound."""

    def slowdown(cost: int | None) -> float | None:
        return None if cost is None else cost / graph.total_cost

    online = {
        name: slowdown(finished(remat.solve(graph, budget_bytes, ONLINE, SCOPE, heuristic=name)).cost)
        for name in HEURISTICS
    }
    offline = finished(remat.solve(graph, budget_bytes, OFFLINE, SCOPE, time_limit_s=time_limit_s, threads=THREADS))
    return {
        "code": code_of(ONLINE, OFFLINE),
        "online": online, "offline": slowdown(offline.cost), "bound": slowdown(offline.bound),
        "status": str(offline.status), "offline_s": round(offline.wall_s, 1),
    }  # fmt: skip


def draw(arguments: Sequence[str]) -> Drawing:
    """The tables and the figure of the page, from the stored results of ``make dtr``.

    Raises:
        InvalidInput: nothing is stored.
    """
    if not RESULTS.is_file():
        raise InvalidInput(f"nothing in {RESULTS}; run make dtr")
    stored = read_json(RESULTS)
    networks = {name: stored["networks"][name] for name in PUBLISHED if name in stored["networks"]}
    rows = [(name, row) for name, network in networks.items() for row in network["rows"]]
    limits = sorted({row["seconds"] for _, row in rows})
    graphs = markdown_table(
        [
            "network",
            "log",
            "operations",
            "step",
            "constants",
            "program's peak",
            "plain peak of the graph",
            "differs by",
        ],
        [_graph(name, network) for name, network in networks.items()],
        "llrrrrrl",
    )
    main_table = markdown_table(
        ["network", "memory", "published", "DTR, exact", "DTR, union-find", "published − exact", "portfolio", "bound",
         "gap", "DTR above the optimum"],
        [_slowdowns(name, row) for name, row in rows],
    )  # fmt: skip
    heuristics = markdown_table(["network", "memory", *HEURISTICS], [_heuristics(name, row) for name, row in rows])
    titled = {_title(name): network for name, network in networks.items()}
    drawn = next(path for path in draw_dtr(titled, RUNS_FOLDER / "dtr") if path.suffix == ".png")
    where = f"{stored['date']}, {stored['cpu']}, {THREADS} threads, {', '.join(f'{x:g}' for x in limits)} s for each"
    parts = [f"{where} search of the portfolio.", graphs, main_table, _summary([row for _, row in rows]),
             "Every heuristic (one seed of `random`); `thrashes`: more than 20 computations for each operation, or no "
             "memory for one.",
             heuristics]  # fmt: skip
    return Drawing("\n\n".join(parts), figures={"dtr": drawn})


def _title(name: str) -> str:
    instead = PUBLISHED[name].instead
    return f"{name} (log: {instead})" if instead else name


def best_of(row: Mapping[str, Any]) -> float:
    """The smallest slowdown that is known."""
    return min(x for x in (row["offline"], *row["online"].values()) if x is not None)


def _graph(name: str, network: Mapping[str, Any]) -> list[str]:
    return [
        _title(name), f"{PUBLISHED[name].log}.log.gz",
        f"{network['operations']:,}", f"{network['total_cost'] / 1e6:.1f} ms",
        *(format_size(network[key], digits=3) for key in ("fixed_bytes", "program_peak_bytes", "plain_peak_bytes")),
        PUBLISHED[name].note,
    ]  # fmt: skip


def _slowdowns(name: str, row: Mapping[str, Any]) -> list[str]:
    exact, best, bound = row["online"]["exact"], best_of(row), row["bound"]
    portfolio = row["offline"]
    return [
        _title(name), f"{row['ratio']:.2f}", f"{row['published']:.3f}", _times(exact),
        _times(row["online"]["union_find"]),
        "" if exact is None else f"{row['published'] - exact:.3f}", _times(portfolio), f"{bound:.4f}",
        "" if portfolio is None else f"{1 - bound / portfolio:.2%}",
        "" if exact is None else _between(exact / best - 1, exact / bound - 1),
    ]  # fmt: skip


def _between(least: float, most: float) -> str:
    """A share that lies between two."""
    low, high = f"{100 * least:.1f}", f"{100 * most:.1f}"
    return f"{low}%" if low == high else f"{low} to {high}%"


def _heuristics(name: str, row: Mapping[str, Any]) -> list[str]:
    return [_title(name), f"{row['ratio']:.2f}", *(_times(row["online"][heuristic]) for heuristic in HEURISTICS)]


def _times(slowdown: float | None) -> str:
    return "thrashes" if slowdown is None else f"{slowdown:.4f}"


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


DOCUMENT = Document("dtr", DOCS / "results" / "dtr.md", draw)


def main(arguments: list[str] | None = None) -> None:
    """Write each row to the file of results as it is made, and print it."""
    parser = Parser(prog="python -m experiments.dtr", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--networks", default=",".join(PUBLISHED), help=f"comma-separated, of {', '.join(PUBLISHED)}")
    parser.add_argument("--logs", type=Path, help="folder of the logs; default: dtr in REMAT_INSTANCES")
    parser.add_argument("--seconds", type=seconds, default=SECONDS, help="for each search of the portfolio")
    parser.add_argument("--again", action="store_true", help="make finished rows too")
    chosen = parser.parse_args(arguments)
    instances = os.environ.get("REMAT_INSTANCES")
    names = names_of("network", chosen.networks, PUBLISHED)
    if chosen.logs is None and not instances:
        raise InvalidInput("name the folder of the logs: --logs FOLDER (or set REMAT_INSTANCES)")
    logs = logs_of(names, chosen.logs or Path(instances or "", "dtr"))
    stored: dict[str, Any] = read_json(RESULTS) if RESULTS.is_file() else {"networks": {}}
    compile_search()
    for name, path in logs.items():
        log = load_dtr_log(path)
        facts, known = facts_of(log), stored["networks"].get(name, {})
        is_same = known.get("graph_sha256") == facts["graph_sha256"]
        rows = {row["published_gb"]: row for row in known.get("rows", []) if is_same}
        made = chosen.seconds, code_of(ONLINE, OFFLINE)
        for budget_gb, slowdown in PUBLISHED[name].slowdowns.items():
            before = rows.get(budget_gb, {})
            if (before.get("seconds"), before.get("code")) == made and not chosen.again:
                print(f"{name}, {budget_gb} GB: made before, in {RESULTS}")
                continue
            ratio = budget_gb / PUBLISHED[name].plain_gb
            budget_bytes = int(ratio * log.program_peak_bytes)
            row = {
                "published_gb": budget_gb, "published": slowdown, "ratio": ratio, "budget_bytes": budget_bytes,
                "seconds": chosen.seconds, **solved(log.graph, budget_bytes, chosen.seconds),
            }  # fmt: skip
            rows[budget_gb] = row
            in_order = sorted(rows.values(), key=lambda row: -row["ratio"])
            stored["networks"][name] = {**facts, "rows": in_order}
            stored |= {"date": datetime.date.today().isoformat(), "cpu": provenance().cpu}
            write_json(RESULTS, stored)
            print(json.dumps({"network": name, **row}), flush=True)


if __name__ == "__main__":
    run(main)
