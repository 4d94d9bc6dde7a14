"""``make rivals``: MOCCASIN by its own method on its published graphs, beside the published values and the portfolio.

A finished solve is kept in results/rivals.json, so that the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import remat
from experiments.arguments import Parser, run
from experiments.bench_cases import share_of_peak
from experiments.documents import DOCS, ROOT, Document, Drawing, markdown_table
from experiments.provenance import provenance
from experiments.settings import find_graph
from experiments.solving import finished
from experiments.store import code_of, write_json
from remat.files import read_json
from remat.search.__main__ import main as compile_search

RESULTS = ROOT / "results" / "rivals.json"
STRATEGIES, THREADS = ("moccasin", "portfolio"), 2


@dataclass(frozen=True, slots=True)
class Published:
    """A row of MOCCASIN's table (16 workers): overhead in percent and seconds, and the limit of the solve here."""

    file: str
    share: float
    overhead_percent: float
    seconds: float
    limit_s: float


ROWS = (
    Published("layered/layered_n100.json", 0.9, 0.8, 9.3, 60),
    Published("layered/layered_n100.json", 0.8, 2.3, 9.5, 60),
    Published("layered/layered_n250.json", 0.9, 0.9, 55, 300),
    Published("layered/layered_n250.json", 0.8, 4.9, 640, 900),
)


def solved(row: Published, graph: remat.Graph) -> dict[str, Any]:
    """MOCCASIN's result, with the moment of its last plan, and the portfolio's in the same time."""
    found = {}
    for name in STRATEGIES:
        (solution,) = remat.solve_sweep(
            graph, [share_of_peak(graph, row.share)], name, time_limit_s=row.limit_s, threads=THREADS, isolate=True
        )
        finished(solution)
        steps = solution.stats.get("trajectory", [])
        found[name] = {
            "overhead": solution.overhead, "status": str(solution.status), "gap": solution.gap,
            "found_s": steps[-1][0] - solution.stats["start_s"] if steps else None, "message": solution.message,
        }  # fmt: skip
    return asdict(row) | {"code": code_of(*STRATEGIES)} | found


def draw(_arguments: Sequence[str]) -> Drawing:
    """The table, from the stored results."""
    stored = read_json(RESULTS)
    heads = ["graph", "budget", "published: overhead, seconds (16 workers)", "`moccasin`", "its last plan after",
             "portfolio", "its last plan after", "its gap"]  # fmt: skip
    where = f"{stored['date']}, {stored['cpu']}, {THREADS} threads."
    return Drawing(f"{where}\n\n{markdown_table(heads, _lines(stored['rows']))}")


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for row in sorted(rows, key=lambda row: (row["file"], -row["share"])):
        theirs, ours = row["moccasin"], row["portfolio"]
        yield [
            Path(row["file"]).stem, f"{row['share']:.0%}", f"{row['overhead_percent']:g} %, {row['seconds']:g} s",
            f"none in {row['limit_s']:g} s" if theirs["overhead"] is None else f"{theirs['overhead']:.2%}",
            "" if theirs["found_s"] is None else f"{theirs['found_s']:.1f} s",
            f"{ours['overhead']:.2%}", f"{ours['found_s']:.1f} s", f"{ours['gap']:.2%}",
        ]  # fmt: skip


DOCUMENT = Document("rivals", DOCS / "results" / "leaderboard.md", draw)


def main(arguments: list[str] | None = None) -> None:
    """Solve what is missing, write each row as it is made, and print it."""
    parser = Parser(prog="python -m experiments.rivals", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--instances", help="folder of the published graphs; default: REMAT_INSTANCES")
    chosen = parser.parse_args(arguments)
    graphs = {row.file: remat.load_graph(find_graph(row.file, chosen.instances)) for row in ROWS}
    stored: dict[str, Any] = read_json(RESULTS) if RESULTS.is_file() else {"rows": []}
    compile_search()
    for row in ROWS:
        asked = asdict(row).items()
        before = next((r for r in stored["rows"] if all(r[key] == value for key, value in asked)), {})
        if before.get("code") != code_of(*STRATEGIES):
            known = solved(row, graphs[row.file])
            stored["rows"] = [r for r in stored["rows"] if r is not before] + [known]
            stored |= {"date": datetime.date.today().isoformat(), "cpu": provenance().cpu}
            write_json(RESULTS, stored)
            print(json.dumps(known), flush=True)


if __name__ == "__main__":
    run(main)
