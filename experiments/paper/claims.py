"""The paper's headline numbers, from the sweeps and the largest batches; this part solves nothing."""

from __future__ import annotations

from typing import Any

from experiments.paper.graphs import Context


def run(context: Context) -> dict[str, Any]:
    """Names of the parts whose rows the drawing reads."""
    return {"from": ["fig5", "fig6"]}
