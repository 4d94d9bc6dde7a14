"""The headline numbers of the paper beside ours, each with its denominator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.max_batch_size import LABELS, load
from analysis.paper.fig6 import max_found
from analysis.paper.part import Part, Table
from analysis.paper.sweeps import HEURISTICS, Sweep, largest_gain, sweeps
from analysis.results import read_json
from analysis.style import style_of

LARGER = (
    ("a larger batch than checkpoint-all", "5.1x [code]", ("checkpoint_all",)),
    ("a larger batch than the best heuristic", "1.73x [code]", HEURISTICS),
)


def report(_: Mapping[str, Any], folder: Path) -> Part:
    """A row for each claim that the folder's results speak of."""
    rows = []
    if (folder / "fig5.json").is_file():
        all_sweeps = list(sweeps(read_json(folder / "fig5.json"), folder))
        for source, words in (("published", "published graphs and V100 costs"), ("ours", "our extraction, roofline")):
            row = _speedup([sweep for sweep in all_sweeps if sweep.source == source], words)
            if row is not None:
                rows.append(row)
    if (folder / "fig6.json").is_file():
        rows += _batches(load(folder / read_json(folder / "fig6.json")["folder"]))
    return Part(
        "Claims",
        "The abstract: up to 5.1x larger inputs than checkpoint-all, 1.73x the best heuristic's batch; up to 1.2x "
        "faster than the best heuristic at an equal budget, 4.8x in an early abstract.",
        "Each with the denominator that we could make out, from the rows of the other parts.",
        "A speedup here is a ratio of modelled step costs at one budget at which the heuristic has a plan too; a "
        "budget at which no heuristic fits has none.",
        tables=[Table("claims", "Published and ours", ["claim", "published", "ours", "where", "denominator"], rows)],
    )  # fmt: skip


def _batches(documents: list[dict[str, Any]]) -> list[list[str]]:
    """The largest batch over checkpoint-all's and over the best heuristic's; the network where the ratio is largest.

    Under the artifact's counting and under exact accounting.
    """
    rows = []
    for claim, published, names in LARGER:
        for rule in documents[0]["rules"] if documents else ():
            found = []
            for document in documents:
                of = {r["strategy"]: r["found"][rule["name"]] or 0 for r in document["records"]}
                name = max(names, key=lambda name, of=of: of.get(name, 0))
                if of.get(name):
                    found.append((max_found(document, rule["name"]) / of[name], document["network"], of[name], name))
            if found:
                ratio, network, batch, name = max(found)
                rows.append([claim, published, f"{ratio:.2f}x", f"{LABELS[network]}, {rule['label']}",
                             f"{style_of(name).label}: batch {batch}"])  # fmt: skip
    return rows


def _speedup(group: list[Sweep], words: str) -> list[str] | None:
    """The largest cost of the best heuristic over the cheapest plan's, over networks and budgets."""
    gain = largest_gain(group)
    if gain is None:
        return None
    where = f"{gain.sweep.label} at {gain.budget_bytes / 1e9:.2f} GB, {words}"
    name = style_of(gain.heuristic).label
    return [
        "faster than the best heuristic at an equal budget",
        "1.2x [code] (U-Net)",
        f"{gain.ratio:.2f}x",
        where,
        name,
    ]
