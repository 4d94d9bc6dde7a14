"""Overhead against budget: the published graphs with their V100 costs, and the networks as we extract them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from experiments.budget_sweep import run_sweep
from experiments.build import Subject
from experiments.paper.lab import Lab
from experiments.paper.networks import Network
from remat.registry import get_strategy

PUBLISHED, OURS = "published", "ours"
WHOSE = {PUBLISHED: "published graph and V100 costs", OURS: "our extraction"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One network from one source."""

    name: str
    network: Network
    source: str
    subject: Subject


def panels(lab: Lab) -> Iterator[Panel]:
    """Every panel that can be had: the published graph first, where it is at hand."""
    for network in lab.networks:
        published = lab.published(network)
        if published is not None:
            yield Panel(f"fig5/{network.name}_{PUBLISHED}", network, PUBLISHED, published)
        yield Panel(f"fig5/{network.name}_{OURS}", network, OURS, lab.ours(network))


def run(lab: Lab) -> dict[str, Any]:
    """Sweep every panel; what its drawing needs."""
    done = []
    for panel in panels(lab):
        lab.say(f"{panel.network.label}, {WHOSE[panel.source]}")
        bench = lab.bench(panel.subject, "fig5", budget_bytes=None)
        rows, families = run_sweep(bench, by_factor=True, at=int(lab.settings.gpu.memory_bytes))
        batch = panel.subject.batch_size
        title = f"{panel.network.label}{f', batch {batch}' if batch else ''}: {WHOSE[panel.source]}"
        folder = lab.write_panel(panel.name, bench, rows, families, title)
        # The artifact's baselines hold their checkpoints to the end of the step: the published numbers are of those.
        artifact = lab.bench(panel.subject, "fig5", budget_bytes=None, accounting="published")
        found = artifact.run_families(
            [name for name in artifact.settings.strategies if get_strategy(name).ignores_budget]
        )
        budgets = sorted({row.budget_bytes for row in rows})
        counted = [row for family in found.values() for row in artifact.family_rows(family, budgets)]
        done.append({"artifact": lab.write_panel(f"{panel.name}_artifact", artifact, counted, [], title),
                     "folder": folder, "network": panel.network.name, "label": panel.network.label,
                     "source": panel.source})  # fmt: skip
    return {"panels": done}
