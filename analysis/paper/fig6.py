"""The largest batches (Figure 6): a panel and a table for each rule of counting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.max_batch_size import (
    ENCODERS,
    continuous_limit,
    draw,
    found_rows,
    limit_rows,
    load,
    network_label,
)
from analysis.parts import Part, Table, prose
from analysis.style import style_of

OPTIMUM = "checkmate_milp"  # its published batches are the paper's own
CAPTION = "Largest batch as a share of its proven limit"


def report(document: Mapping[str, Any], folder: Path) -> Part:
    """The bars, and found and proven batches as tables."""
    documents = load(folder / document["folder"])
    others = {ENCODERS[d["network"]]: d["network"] for d in documents if d["network"] in ENCODERS}
    networks = {others.get(d["network"], d["network"]) for d in documents}  # one with two encoders counts once
    open_ = {
        others.get(d["network"], d["network"]) for d in documents
        if any(max_found(d, rule["name"]) != d["proven"][rule["name"]] for rule in d["rules"])
    }  # fmt: skip
    missed = [
        f"{network_label(d)}'s {p['batch']} (at most {d['proven'][p['rule']]} whole samples; one operation allows "
        f"{continuous_limit(d):.2f})"
        for d in documents for p in d["published"]
        if p["strategy"] == OPTIMUM and max_found(d, p["rule"]) < p["batch"]
    ]  # fmt: skip
    missed_words = f"Below a published batch: {'; '.join(missed)}." if missed else "No published batch is larger."
    return Part(
        *prose(__file__, closed=len(networks - open_), networks=len(networks), missed=missed_words),
        [("fig6", CAPTION, draw(documents))] if documents else [],
        [_table(documents, rule) for rule in documents[0]["rules"]] if documents else [],
    )  # fmt: skip


def max_found(document: Mapping[str, Any], rule: str) -> int:
    """The largest batch of any strategy; 0 if none found any."""
    return max((record["found"][rule] or 0 for record in document["records"]), default=0)


def _table(documents: list[dict[str, Any]], rule: Mapping[str, str]) -> Table:
    def label(strategy: str) -> str:
        return style_of(strategy).label

    rows = [row for row in found_rows(documents, rule["name"], label) if any(row[1:])]
    rows += limit_rows(documents, rule["name"], label)
    return Table(f"fig6_{rule['name']}", rule["label"], ["strategy", *map(network_label, documents)], rows)
