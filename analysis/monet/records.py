"""Checkpointing only, on the published graphs: recorded results beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.marks import write_beyond
from analysis.monet.points import GIB, MILP, NONE, OURS, PROGRAM, Point, gib, read_points
from analysis.monet.solver_time import NEAR
from analysis.parts import Part, Table, prose
from analysis.solver_seconds import reached
from analysis.style import BLACK, BLUE, FOREST, WINE

COMPARED = (
    (OURS, "Portfolio", WINE, "*"), (MILP, "Checkmate MILP (HiGHS)", BLUE, "s"),
    (PROGRAM, "MONeT's program (HiGHS)", FOREST, "p"),
)  # fmt: skip
TOP = 20.0


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """A row for each record."""
    records = document["records"]
    if not records:
        title, published, *_ = prose(__file__, ours="")
        return Part(title, published, f"Skipped: {document['absent']}.", "Nothing was compared.")
    facts, points = read_points(folder, document)
    label = {net["name"]: net["label"] for net in facts}
    total = {net["name"]: net["total_cost"] for net in facts}
    return Part(
        *prose(__file__, ours=_outcome(records, points)),
        [("records", "Cost above the recorded one at the recorded budgets; values beyond the frame stand at its top",
          _figure(records, points, label))],
        [_table(records, points, label, total)],
    )  # fmt: skip


def _own(points: Sequence[Point], record: Mapping[str, Any]) -> dict[str, Point]:
    """[strategy] its solve of the recorded problem."""
    place = record["network"], NONE, record["budget_bytes"]
    return {p.strategy: p for p in points if (p.network, p.level, p.budget_bytes) == place}


def _outcome(records: Sequence[Mapping[str, Any]], points: Sequence[Point]) -> str:
    pairs = [(r, p) for r in records if (p := _own(points, r).get(OURS))]
    known = [(r["cost_ns"], p.cost) for r, p in pairs if r["cost_ns"] is not None and p.cost is not None]
    agree = sum(r["cost_ns"] is None and p.status == "INFEASIBLE" for r, p in pairs)
    impossible = sum(r["cost_ns"] is None for r, _ in pairs)
    if not known:
        return "The portfolio has no plan where one is recorded."
    ratios = [ours / theirs - 1 for theirs, ours in known]
    cheaper = sum(ratio < -1e-4 for ratio in ratios)
    equal = sum(abs(ratio) <= 1e-4 for ratio in ratios)
    return (
        f"The portfolio's plan is cheaper than the recorded one in {cheaper} of {len(known)} cases, equal (to 1e-4) in "
        f"{equal} and more expensive in {len(known) - cheaper - equal}. At worst it costs {100 * max(ratios):.2f} % "
        f"more, at best {-100 * min(ratios):.2f} % less. Of {impossible} budgets recorded as infeasible {agree} were "
        "proven so."
    )


def _table(
    records: Sequence[Mapping[str, Any]], points: Sequence[Point], label: Mapping[str, str], total: Mapping[str, int]
) -> Table:
    rows = []
    for record in records:
        cost, bound = record["cost_ns"], record["bound_ns"]
        cells = [
            label[record["network"]], gib(record["budget_bytes"]), record["status"], _ms(cost), _ms(bound),
            f"{record['solve_s']:.0f}", "" if record["t_within_5pct_s"] is None else f"{record['t_within_5pct_s']:.0f}",
        ]  # fmt: skip
        own = _own(points, record)
        best = min([c for c in (cost, *(p.cost for p in own.values())) if c is not None], default=None)
        for strategy, *_ in COMPARED:
            p = own.get(strategy)
            if p is None:
                cells += ["", "", ""]
                continue
            change = "" if p.cost is None or cost is None else f" ({100 * (p.cost / cost - 1):+.2f} %)"
            near = None if best is None else reached(p.trajectory, p.cost, p.wall_s, NEAR * best)
            words = p.status if p.cost is None else _ms(p.cost) + change
            has_bound = p.bound is not None and p.bound > total[record["network"]] and p.status != "INFEASIBLE"
            cells += [words, _ms(p.bound) if has_bound else "", "" if near is None else f"{near:.1f}"]
        rows.append(cells)
    heads = ["network", "GiB", "recorded status", "recorded ms", "recorded bound", "recorded s", "recorded s to 5 %"]
    for _, name, _, _ in COMPARED:
        heads += [f"{name} ms", "bound", "s to 5 %"]
    return Table(
        "monet_records", "Recorded results and ours (change against the recorded cost); empty: none", heads, rows
    )


def _ms(cost: float | None) -> str:
    return "" if cost is None else f"{cost / 1e6:.2f}"


def _figure(records: Sequence[Mapping[str, Any]], points: Sequence[Point], label: Mapping[str, str]) -> Figure:
    names = [name for name in label if any(r["network"] == name for r in records)]
    figure = Figure(figsize=(3.1 * len(names) + 0.4, 3.2), layout="constrained")
    all_axes = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(all_axes, names, strict=True):
        own = [r for r in records if r["network"] == name and r["cost_ns"] is not None]
        axes.axhline(0, color=BLACK, lw=0.9, label="Recorded cost")
        beyond = list[tuple[str, dict[float, float]]]()
        bounds = [(r["budget_bytes"] / GIB, 100 * (r["bound_ns"] / r["cost_ns"] - 1)) for r in own if r["bound_ns"]]
        axes.plot([x for x, _ in bounds], [y for _, y in bounds], color=BLACK, ls="", marker="_", ms=9,
                  label="Recorded bound")  # fmt: skip
        for i, (strategy, words, colour, marker) in enumerate(COMPARED):
            above = {r["budget_bytes"] / GIB: 100 * (p.cost / r["cost_ns"] - 1) for r in own
                     if (p := _own(points, r).get(strategy)) and p.cost is not None}  # fmt: skip
            axes.plot([x + 0.1 * (i - 1) for x in above], [min(y, TOP) for y in above.values()], color=colour, ls="",
                      marker=marker, ms=9 if marker == "*" else 5, label=words)  # fmt: skip
            beyond.append((colour, above))
        write_beyond(axes, TOP, beyond)
        axes.set_title(label[name], loc="left", pad=18)
        axes.set_xlabel("Memory budget (GiB)")
        axes.margins(x=0.12)
        axes.set_ylim(-10, TOP)
    all_axes[0].set_ylabel("Cost above the recorded (%)")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure
