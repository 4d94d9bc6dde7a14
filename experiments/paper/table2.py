"""Cost over the optimum, from the sweeps of Figure 5: nothing is solved here."""

from __future__ import annotations

from typing import Any

from experiments.paper.graphs import Context


def run(context: Context) -> dict[str, Any]:
    """The table is made from the rows of this part when it is drawn."""
    return {"from": "fig5"}
