"""The tables of docs/results/any-model.md: which architectures train, and what other sequence lengths cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.documents import DOCS, ROOT, Document, Drawing, LongTable, link_to, markdown_table
from experiments.pieces import read_pieces
from remat.units import format_size

COVERAGE, LENGTHS = ROOT / "results" / "coverage.json", ROOT / "results" / "lengths.json"
COLUMNS = ("name", "group", "trains", "budget", "seconds", "operations", "recomputed", "difference", "masks", "message")


def draw(arguments: Sequence[str]) -> Drawing:
    """Both tables, from the stored results of ``make coverage`` and ``make lengths``."""
    coverage, lengths = read_pieces(COVERAGE, "make coverage"), read_pieces(LENGTHS, "make lengths")
    rows = coverage["rows"]
    every = LongTable("coverage", COLUMNS, [[_text(row.get(name)) for name in COLUMNS] for row in rows])
    refused = [row for row in rows if not row["trains"]]
    text = "\n\n".join([
        f"{coverage['date']}, PyTorch {coverage['torch']}, transformers {coverage['transformers']}, {coverage['cpu']}: "
        f"**{len(rows) - len(refused)} of {len(rows)} architectures train**, {_same(rows)} of them with the plain "
        f"model's bits ({coverage['cost']} costs, {coverage['time_limit_s']:g} s of search). "
        f"With the plain model's bits under a mask: {under_masks(rows)}.",
        markdown_table(["group", "architectures", "train", "the plain model's bits", "seconds to plan, median"],
                       [_group(rows, name) for name in dict.fromkeys(row["group"] for row in rows)]),
        "\n".join(f"- **{row['name']}** is refused: {row['message']}" for row in refused) or "None is refused.",
        f"Every architecture: {link_to(every, DOCUMENT.page)}.",
        f"Lengths: {lengths['date']}, PyTorch {lengths['torch']}, {lengths['cpu']}, {lengths['threads']} threads.",
        markdown_table(["length", "padded", "plan", "seconds added", "repeats", "overhead", "measured of budget",
                        "the plain model's bits"], map(_length, lengths["rows"])),
    ])  # fmt: skip
    return Drawing(text, [every], columns=sorted(COLUMNS))


def under_masks(rows: Sequence[dict[str, Any]]) -> str:
    """How many architectures have the plain model's bits with each kind of mask."""
    masks = [row["masks"] for row in rows if row.get("masks")]
    kinds = masks[0] if masks else ()
    return ", ".join(f"{kind} {sum(mask[kind] == 0 for mask in masks)} of {len(masks)}" for kind in kinds)


def _same(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row["trains"] and row["difference"] == 0 for row in rows)


def _group(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    own = [row for row in rows if row["group"] == name]
    trained = [row for row in own if row["trains"]]
    median = statistics.median(row["seconds"] for row in trained)
    return [name, str(len(own)), str(len(trained)), str(_same(own)), f"{median:.1f}"]


def _length(row: dict[str, Any]) -> list[str]:
    share = f"{format_size(row['measured_bytes'], digits=3)}, {row['measured_bytes'] / row['budget_bytes']:.1%}"
    return [
        str(row["length"]), "yes" if row["padded"] else "no", row["plan"], f"{row['added_s']:.2f}",
        str(row["recomputed"]), f"{row['overhead']:.2%}", share, "yes" if row["same_bits"] else "no",
    ]  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(each)}" for name, each in value.items())
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


DOCUMENT = Document("training", DOCS / "results" / "any-model.md", draw)
