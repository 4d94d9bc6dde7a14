"""The paper's headline numbers, from the sweeps and the largest batches: nothing is solved here."""

from __future__ import annotations

from typing import Any

from experiments.paper.graphs import Context


def run(context: Context) -> dict[str, Any]:
    """The table is made from the rows of these parts when it is drawn."""
    return {"from": ["fig5", "fig6"]}
