"""Rows of a device as text, and as files under ``results/``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.device.folder import FORMAT, LARGEST, LARGEST_PLANNED, Case, Folder, Row
from experiments.provenance import provenance, versions
from remat.files import write_text

HEADS = ("backend", "method", "budget", "batch", "predicted MB", "measured MB", "measured / predicted", "allocated MB",
         "reserved MB", "ms", "predicted x", "measured x", "bits", "note")  # fmt: skip


def write_results(folder: Folder, cases: Iterable[Case], out: Path) -> list[Path]:
    """Write ``<gpu>/<date>_<model>.json`` of each model that has rows."""
    device, paths = folder.device(), []
    by_model: dict[str, list[Case]] = {}
    for case in cases:
        if case.rows():
            by_model.setdefault(case.model, []).append(case)
    for model, of_model in by_model.items():
        where = provenance()
        document = {
            "format": FORMAT, "device": device, "model": model, "git_commit": where.git_commit,
            "git_dirty": where.git_dirty, "versions": versions(),
            "captures": {case.backend: _without_orders(case.captured() or {}) for case in of_model},
            "rows": [{"backend": case.backend} | _known(row) for case in of_model for row in case.rows()],
        }  # fmt: skip
        paths.append(out / device["gpu"] / f"{device['date']}_{model}.json")
        write_text(paths[-1], json.dumps(document, indent=1) + "\n")
    return paths


def _without_orders(captured: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in captured.items() if key not in ("starts", "workspaces_once", "format")}


def _known(row: Row) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if value not in (None, "", [])}


def table(cases: Iterable[Case]) -> str:
    """All rows, a table for each model."""
    lines: list[str] = []
    model = ""
    for case in sorted(cases, key=lambda case: case.model):
        rows = [_cells(case.backend, row) for row in case.rows()]
        if rows and case.model != model:
            lines += ["", case.model]
            model = case.model
            lines += _aligned([HEADS, *(_cells(c.backend, r) for c in cases if c.model == model for r in c.rows())])
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    used = [i for i in range(len(HEADS)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    return ["  ".join(row[i].ljust(widths[i]) for i in used).rstrip() for row in rows]


def _cells(backend: str, row: Row) -> tuple[str, ...]:
    budget = row.share
    if row.method in (LARGEST, LARGEST_PLANNED):
        budget = f"{_mb(row.budget_bytes)} MB"
    ratio = None
    if row.predicted_peak_bytes and row.measured_peak_bytes:
        ratio = row.measured_peak_bytes / row.predicted_peak_bytes
    bits = "" if row.difference is None else "equal" if row.difference == 0 else f"{row.difference:.1e}"
    note = row.error or row.outcome or (f"{row.failed_batch} does not train" if row.failed_batch else "")
    overhead = None if row.predicted_overhead is None else 1 + row.predicted_overhead
    return (
        backend, row.method, budget, str(row.batch or ""), _mb(row.predicted_peak_bytes), _mb(row.measured_peak_bytes),
        _number(ratio, ".4f"), _mb(row.allocated_bytes), _mb(row.reserved_bytes),
        _number(row.measured_s and 1000 * row.measured_s, ".1f"), _number(overhead, ".3f"),
        _number(row.measured_ratio, ".3f"), bits, note,
    )  # fmt: skip


def _mb(size: int | None) -> str:
    return _number(size and size / 1e6, ".1f")


def _number(x: float | None, how: str) -> str:
    return "" if x is None else format(x, how)
