"""Cost over the optimum, from the sweeps of Figure 5; this part solves nothing."""

from __future__ import annotations

from typing import Any

from experiments.paper.graphs import Context


def run(context: Context) -> dict[str, Any]:
    """Name of the part whose rows the drawing reads."""
    return {"from": "fig5"}
