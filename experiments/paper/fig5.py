"""Overhead against budget: the published graphs with V100 costs, and the networks that this project extracts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.budget_sweep import run_sweep
from experiments.build import Subject
from experiments.paper.graphs import Context, extracted, panel_of, published
from experiments.paper.networks import Network
from remat.registry import get_strategy

PUBLISHED, OURS = "published", "ours"
ROUNDINGS = ("lp_rounding", "lp_rounding_random")
WHOSE = {PUBLISHED: "published graph and V100 costs", OURS: "our extraction"}


def run(context: Context) -> dict[str, Any]:
    """Sweep every network from every source: first its published graph, if there is one."""
    return {"panels": [_sweep(context, *case) for case in _cases(context)]}


def _cases(context: Context) -> Iterator[tuple[Network, str, Subject]]:
    for network in context.networks:
        known = published(context, network)
        if known is not None:
            yield network, PUBLISHED, known
        yield network, OURS, extracted(context, network)


def _sweep(context: Context, network: Network, source: str, subject: Subject) -> dict[str, Any]:
    """Sweep one graph; returns its panels."""
    context.print(f"{network.label}, {WHOSE[source]}")
    limits = dict.fromkeys(ROUNDINGS, context.scale.rounding_s) if network.has_slow_lp else {}
    graph_run = context.graph_run(subject, "paper/fig5", budget_bytes=None, time_limits=limits)
    rows, families = run_sweep(graph_run, by_factor=True, at=int(context.settings.gpu.memory_bytes))
    title = f"{network.label}{f', batch {subject.batch_size}' if subject.batch_size else ''}: {WHOSE[source]}"
    panel = panel_of(graph_run, rows, families, title)
    # The published numbers come from the artifact's baselines, which hold their checkpoints to the end of the step.
    artifact = context.graph_run(subject, "paper/fig5", budget_bytes=None, accounting="published")
    found = artifact.run_families([name for name in artifact.settings.strategies if get_strategy(name).ignores_budget])
    budgets = sorted({row.budget_bytes for row in rows})
    counted = [row for family in found.values() for row in artifact.family_rows(family, budgets)]
    held = panel_of(artifact, counted, [], title)
    return {"artifact": held, "panel": panel, "network": network.name, "label": network.label, "source": source}
