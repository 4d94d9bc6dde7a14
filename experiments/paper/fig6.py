"""The largest batch of every strategy, found and proven (Figure 6): `experiments.max_batch_size` on each network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.cli import check
from experiments.max_batch_size import PUBLISHED, max_batches, write_run
from experiments.paper.lab import Lab

SHARE = 0.5  # of the scale's time limit for one solve: a strategy has several for each network


def run(lab: Lab) -> dict[str, Any]:
    """Solve the networks that the paper has a batch for; what the drawing needs is a run of its own."""
    chosen = []
    for network in lab.networks:
        if network.name in PUBLISHED:
            (settings,) = check(["experiment=max_batch_size", f"model={network.name}"], multirun=False)
            limit = SHARE * lab.scale.time_limit_s
            given = lab.settings
            chosen.append(replace(settings, strategies=given.strategies, options=given.options, time_limit_s=limit,
                                  seed=given.seed, threads=given.threads))  # fmt: skip
    documents = max_batches(chosen, lab.store, lab.engine, lab.progress, console=lab.console)
    write_run(lab.folder / "fig6", documents)
    return {"folder": "fig6"}
