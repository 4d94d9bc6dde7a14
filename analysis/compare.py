"""``python -m analysis.compare RUN_A RUN_B``: the changes between two runs that are larger than noise.

`analysis.comparison` defines a change. If a plan of one run refutes a claim of the other, that is never noise: the
report always shows it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.comparison import LEAST_S, PROBLEM, TOLERANCE, Comparison, Pair, compare, time_ratios
from analysis.results import load_run
from analysis.scales import show_count, show_percent
from analysis.style import order_of
from analysis.table import write_frame
from remat.errors import RematError
from remat.units import format_size

TIME_RATIO = 1.5


def write_csv(found: Comparison, path: Path) -> Path:
    """Write every pair, changed or not: the numbers of both runs, the tolerance and the verdict."""
    columns = ("status", "cost", "overhead", "bound", "gap", "peak_bytes", "wall_s", "time_limit_s", "seed")
    lines = []
    for pair in found.pairs:
        line = {name: pair.a[name] for name in ("graph_name", *PROBLEM, "budget_bytes")}
        for column in columns:
            line |= {f"{column}_a": pair.a.get(column), f"{column}_b": pair.b.get(column)}
        lines.append(line | {"tolerance": pair.tolerance, "verdict": pair.verdict, "changes": "; ".join(pair.changes)})
    return write_frame(pd.DataFrame(lines), path)


def report(found: Comparison, console: Console, tolerance: float, time_ratio: float) -> None:
    """Print provenance, contradictions, changes, times and the solves that only one run has."""

    def print_line(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    if found.sources:
        table = Table("what differs", "A", "B", box=box.SIMPLE_HEAD)
        for line in found.sources:
            table.add_row(*(Text(text or "–") for text in line))
        console.print(table)
    else:
        print_line("code, versions, machine and configuration: the same")
    for line in found.refuted:
        print_line(f"contradicted: {line}", "bold red")
    changed = [pair for pair in found.pairs if pair.changes]
    same = sum(pair.a["key"] == pair.b["key"] for pair in found.pairs)
    verdicts = [pair.verdict for pair in changed]
    print_line(
        f"{show_count(len(found.pairs), 'solve')} in both runs ({same} of them the very same row of one store): "
        f"{verdicts.count('better')} better in B, {verdicts.count('worse')} worse, {verdicts.count('other')} otherwise "
        f"changed, {len(found.pairs) - len(changed)} unchanged"
    )
    exact = sum(pair.tolerance == 0 for pair in found.pairs)
    loosest = max((pair.tolerance for pair in found.pairs), default=0.0)
    if exact < len(found.pairs):
        spread = f" or beyond the difference between seeds ({loosest:.3%} at most)" if loosest > tolerance else ""
        print_line(
            f"costs of {exact} compared exactly (they repeat, or both are proven); the clock ended the other "
            f"{len(found.pairs) - exact}: only a change beyond {tolerance:.3%}{spread} counts"
        )
    if changed:
        console.print(_table(changed))
    _print_times(found.pairs, time_ratio, print_line)
    for who, rows in (("A", found.only_a), ("B", found.only_b)):
        if len(rows):
            counts = rows.groupby(["graph_name", "strategy"], sort=True).size()
            named = ", ".join(f"{strategy} on {graph} ({count})" for (graph, strategy), count in counts.items())
            print_line(f"only in {who}: {show_count(len(rows), 'solve')}: {named}")
    for line in found.nearer:
        print_line(f"  {line}")


def _print_times(pairs: Sequence[Pair], time_ratio: float, print_line: Any) -> None:
    """Medians only, because the time of a single solve says little."""
    ratios = time_ratios(pairs)
    every = [ratio for values in ratios.values() for ratio in values]
    if not every:
        print_line(f"wall times: nothing to compare (no two solves of {LEAST_S:g} s or more)")
        return
    middle = statistics.median(every)
    word = "within the noise" if 1 / time_ratio <= middle <= time_ratio else "slower" if middle > 1 else "faster"
    print_line(
        f"wall times: B takes {middle:.2f} times as long as A, the median of {show_count(len(every), 'solve')}: {word}"
    )
    for strategy in sorted(ratios, key=order_of):
        middle = statistics.median(ratios[strategy])
        if not 1 / time_ratio <= middle <= time_ratio:
            print_line(f"  {strategy}: {middle:.2f} times (median of {len(ratios[strategy])})")


def _table(pairs: Sequence[Pair]) -> Table:
    several = len({pair.a["graph_sha256"] for pair in pairs}) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in (["graph"] if several else []) + ["strategy", "budget", "status"]:
        table.add_column(name, overflow="fold")
    for name in ("overhead A", "overhead B", "gap A", "gap B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("change", overflow="fold")
    for pair in pairs:
        a, b = pair.a, pair.b
        notes = [text for text in (a["options"], a["scope"] if a["scope"] != "staged" else "") if text]
        status = a["status"] if a["status"] == b["status"] else f"{a['status']} → {b['status']}"
        style = {"better": "green", "worse": "red"}.get(pair.verdict, "yellow")
        word = "" if pair.verdict == "other" else f"{pair.verdict}: "
        table.add_row(
            *([Text(str(a["graph_name"]))] if several else []),
            Text(a["strategy"] + (f" ({', '.join(notes)})" if notes else "")),
            Text(format_size(int(a["budget_bytes"]), digits=3)), Text(status),
            show_percent(a["overhead"]), show_percent(b["overhead"]), show_percent(a["gap"]), show_percent(b["gap"]),
            Text(word + ", ".join(pair.changes), style=style),
        )  # fmt: skip
    return table


def main(arguments: Sequence[str]) -> int:
    """The command line; returns 1 if a plan refutes a claim or a folder is not a run."""
    parser = argparse.ArgumentParser("python -m analysis.compare", description="Show the changes from run A to run B.")
    parser.add_argument("run_a", type=Path)
    parser.add_argument("run_b", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE,
        help="relative change of a cost that counts if the clock ended the solve (0.001: 0.1 %%)",
    )  # fmt: skip
    parser.add_argument("--time-ratio", type=float, default=TIME_RATIO, help="median ratio of wall times that counts")
    parser.add_argument("--csv", type=Path, help="write every pair of rows to this file")
    given = parser.parse_args(arguments)
    if given.tolerance < 0 or given.time_ratio < 1:
        parser.error("--tolerance must be at least 0 and --time-ratio at least 1")
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=140)
    pairs = panels_of(given.run_a, given.run_b)
    if given.csv and len(pairs) > 1:
        parser.error("--csv takes one pair of runs, e.g. the same panel of both papers")
    try:
        return max([_compare_pair(pair, given, console) for pair in pairs])
    except RematError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def panels_of(run_a: Path, run_b: Path) -> list[tuple[Path, Path]]:
    """The two runs; for two runs of the paper, the panels of Figure 5 that both have."""
    panels = [path.parent.relative_to(run_a) for path in sorted(run_a.glob("fig5/*/run.json"))]
    both = [(run_a / panel, run_b / panel) for panel in panels if (run_b / panel / "run.json").is_file()]
    return both or [(run_a, run_b)]


def _compare_pair(pair: tuple[Path, Path], given: argparse.Namespace, console: Console) -> int:
    runs = load_run(pair[0]), load_run(pair[1])
    found = compare(*runs, given.tolerance)
    for name, run in zip("AB", runs, strict=True):
        missing = f"; {show_count(len(run.missing), 'solve')} of it not in the store" if run.missing else ""
        console.print(Text(f"{name}: {run.folder} ({run.title}){missing}"), soft_wrap=True)
    report(found, console, given.tolerance, given.time_ratio)
    if given.csv:
        print(write_csv(found, given.csv))
    return 1 if found.refuted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
