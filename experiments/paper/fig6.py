"""The largest batch of every strategy, found and proven (Figure 6): `experiments.max_batch_size` on each network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analysis.max_batch_size import ENCODERS
from experiments.max_batch_size import max_batches
from experiments.paper.graphs import Context
from experiments.paper.networks import in_figure_6
from experiments.settings import configured_model

SHARE = 2 / 3  # of the scale's time limit for one solve, because a strategy has several for each network


def run(context: Context) -> dict[str, Any]:
    """Solve the networks of the figure; a document for each."""
    limit = SHARE * context.scale.time_limit_s
    names = [network.name for network in context.networks if in_figure_6(network)]
    names += [ENCODERS[name] for name in names if name in ENCODERS]
    chosen = [
        replace(context.settings, spec=configured_model(name), graph_file=None, cost="flops", budget_bytes=None,
                time_limit_s=limit)
        for name in dict.fromkeys(names)
    ]  # fmt: skip
    run = context.run
    documents = max_batches(chosen, run.store, run.engine, run.progress, console=run.console)
    claims = [claim for document in documents for claim in document["contradicted"]]
    return {"documents": documents, "contradicted": claims}
