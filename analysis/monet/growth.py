"""How Checkmate's program with choices and MONeT's grow with the number of implementations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from analysis.parts import Part, Table, prose
from analysis.style import BLUE, FOREST

LOOKS = {"Checkmate's with choices": (BLUE, "o"), "MONeT's": (FOREST, "p")}
PANELS = (("rows", "Constraints"), ("lp_s", "Seconds of the relaxation"))
Rows = Sequence[Mapping[str, Any]]


def report(document: Mapping[str, Any], _: Path) -> Part:
    """Constraints and seconds against the number of algorithms."""
    rows = document["rows"]
    cells = [
        [row["network"], str(row["algorithms"]), row["program"], f"{row['rows']:,}", f"{row['columns']:,}",
         f"{row['entries']:,}", f"not in {document['limit_s']:g}" if row["lp_s"] is None else f"{row['lp_s']:.2f}"]
        for row in rows
    ]  # fmt: skip
    return Part(
        *prose(__file__, growth=" ".join(_words(rows)) or "Nothing was measured.",
               most=max((row["algorithms"] for row in rows), default=0)),
        [("growth", "Constraints, and seconds of the linear relaxation, against algorithms of each convolution",
          _figure(rows))] if rows else [],
        [Table("monet_growth", "Programs by the number of algorithms of each convolution", [
            "network", "algorithms", "program", "constraints", "variables", "entries", "seconds of the relaxation",
        ], cells)],
    )  # fmt: skip


def _of(rows: Rows, network: str, program: str) -> list[Mapping[str, Any]]:
    own = (row for row in rows if (row["network"], row["program"]) == (network, program))
    return sorted(own, key=lambda row: row["algorithms"])


def _words(rows: Rows) -> Iterator[str]:
    """For each network and program: how constraints and seconds grow from the fewest algorithms to the most."""
    for network, program in product(dict.fromkeys(row["network"] for row in rows), LOOKS):
        own = _of(rows, network, program)
        solved = [row for row in own if row["lp_s"] is not None]
        if len(solved) < 2:
            continue
        growth = solved[-1]["lp_s"] / solved[0]["lp_s"]
        power = math.log(growth) / math.log(solved[-1]["algorithms"] / solved[0]["algorithms"])
        yield (
            f"{network}, {program}: {own[-1]['rows'] / own[0]['rows']:.2f} times the constraints with "
            f"{own[-1]['algorithms']} algorithms, and {growth:.1f} times the seconds with {solved[-1]['algorithms']} "
            f"(their power {power:.2f})."
        )


def _figure(rows: Rows) -> Figure:
    networks = list(dict.fromkeys(row["network"] for row in rows))
    counts = sorted({row["algorithms"] for row in rows})
    figure = Figure(figsize=(7.8, 2.7 * len(networks) + 0.5), layout="constrained")
    grid = figure.subplots(len(networks), len(PANELS), squeeze=False)
    for (i, network), (j, (key, words)) in product(enumerate(networks), enumerate(PANELS)):
        axes = grid[i, j]
        for program, (colour, marker) in LOOKS.items():
            own = [(row["algorithms"], row[key]) for row in _of(rows, network, program) if row[key] is not None]
            axes.plot([x for x, _ in own], [y for _, y in own], color=colour, marker=marker, label=program)
        axes.set(xscale="log", yscale="log", xlabel="Algorithms of each convolution", ylabel=words)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(network, loc="left")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
