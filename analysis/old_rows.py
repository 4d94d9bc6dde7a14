"""Rows of older versions: their column ``stats`` holds what has columns of its own now."""

from __future__ import annotations

import json
from typing import Any

# [column] its value where an older row's `stats` does not name it.
MOVED: dict[str, Any] = {
    "options": {}, "ended": "", "cut_by_clock": None, "contradicted": False, "proof_from": None,
    "peak_bound_bytes": None, "cost_cap": None, "proven_by": None, "certified_bound": None,
}  # fmt: skip


def upgrade(record: dict[str, Any]) -> dict[str, Any]:
    """A stored row with the columns of this version; a row that has them is returned as it is."""
    if "stats" not in record or not MOVED.keys().isdisjoint(record):
        return record
    stats = json.loads(record["stats"] or "{}")
    moved = {name: stats.pop(name, otherwise) for name, otherwise in MOVED.items()}
    moved["options"] = json.dumps(moved["options"], sort_keys=True)
    return {**record, **moved, "stats": json.dumps(stats, sort_keys=True)}
