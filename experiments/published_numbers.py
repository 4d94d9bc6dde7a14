"""Published values beside ours, for docs/results/checkmate.md.

The worked example of Checkmate (Jain et al., MLSys 2020): VGG19, layer granularity, FLOP costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import remat
from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, Row, experiment
from remat.cost import apply_cost
from remat.errors import RematError
from remat.extraction import extract_in_child
from remat.frontends.spec import ModelSpec
from remat.graph import Graph
from remat.registry import get_strategy

ACCOUNTINGS = ("published", "exact")
OPTIMUM_BYTES = 51_380_224  # activations of the published optimum: VGG19's largest working set


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the artifact's notebook: cost in GFLOP and activations in MB."""

    label: str
    strategy: str
    gflop: float
    megabytes: float
    slots: int | None = None


# Table 1 of the paper: (general graphs, cost-aware, memory-aware), as our strategies behave; a test for each cell.
TABLE_1 = {
    "checkpoint_all": ("yes", "no", "no"), "griewank": ("partly", "no", "no"), "chen_sqrtn": ("yes", "no", "no"),
    "chen_greedy": ("yes", "no", "partly"), "ap_sqrtn": ("partly", "no", "no"),
    "ap_greedy": ("partly", "no", "partly"), "checkmate_milp": ("yes", "yes", "yes"),
    "lp_rounding": ("yes", "yes", "yes"),
}  # fmt: skip
NOTEBOOK = (
    Published("checkpoint all", "checkpoint_all", 58.896, 81.72),
    Published("Chen sqrt(n)", "chen_sqrtn", 72.513, 69.45),
    Published("Griewank, 5 slots", "griewank", 108.267, 51.38, slots=5),
    Published("optimal", "checkmate_milp", 58.983, 51.38),
)


def vgg19(accounting: str) -> Graph:
    """VGG19, one sample, FLOP costs as the artifact counts them."""
    spec = ModelSpec("vgg19", "keras", "keras.applications:VGG19", 1, (224, 224, 3), "layer", accounting=accounting)
    return apply_cost(extract_in_child(spec, None), "flops", None)


def notebook_rows(graph: Graph) -> list[list[str]]:
    """Published values, and ours under both accountings; activations are the peak without fixed bytes."""
    rows = []
    for row in NOTEBOOK:
        cells = [row.label, f"{row.gflop:.3f} / {row.megabytes:.2f}"]
        for accounting in ACCOUNTINGS:
            if not get_strategy(row.strategy).ignores_budget:  # the MILP frees at last use under either accounting
                budget = OPTIMUM_BYTES + graph.fixed_bytes
                solution = remat.solve(graph, budget, row.strategy, time_limit_s=120, accounting=accounting)
                if solution.cost is None or solution.peak_bytes is None:
                    raise RematError(f"no optimum for the notebook's case: {solution.message}")
                cost, peak = solution.cost, solution.peak_bytes
            else:
                members = remat.family(graph, row.strategy, accounting=accounting)
                member = next(m for m in members if row.slots in (None, m.parameters.get("slots")))
                cost, peak = member.cost, member.peak_bytes
            cells.append(f"{cost / 1e9:.3f} / {(peak - graph.fixed_bytes) / 1e6:.2f}")
        rows.append(cells)
    return rows


@experiment(page="results/checkmate.md", measures=False)
def published_numbers() -> Iterator[Case]:
    """Page: the worked example of Checkmate's artifact, published and ours, and the paper's Table 1."""
    yield from ()


@published_numbers.draws
def page(_: Sequence[Row]) -> Drawing:
    """Compute the worked example; Table 1 stands in the code."""
    graph = vgg19("published")
    notebook = markdown_table(
        ["GFLOP / activation MB", "published", "ours, published accounting", "ours, exact accounting"],
        notebook_rows(graph),
    )
    abilities = markdown_table(["Table 1 [mem]", "general graphs", "cost-aware", "memory-aware"],
                               [[f"`{name}`", *cells] for name, cells in TABLE_1.items()], "llll")  # fmt: skip
    return Drawing(f"{notebook}\n\n{abilities}")
