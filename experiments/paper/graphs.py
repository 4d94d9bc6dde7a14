"""The graphs of Checkmate's networks, published and extracted, and the run folders that figures are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import remat
from experiments.build import CACHE_FOLDER, Subject, build_quietly
from experiments.config import as_dict
from experiments.paper.networks import Network
from experiments.parts import PartContext
from experiments.row import Row
from experiments.settings import Settings, configured_model
from experiments.solving import GraphRun
from experiments.store import code_version, write_json
from remat.extraction import extract_in_child
from remat.registry import heuristics
from remat.units import format_size


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done; never which networks, batches or resolutions.

    Attributes:
        points: budgets of a sweep.
        time_limit_s: of each solve.
        samples: random roundings.
        naive_samples: random roundings without phase two, which give no plan as a rule.
        solver_points: budgets at which solver times are taken.
        unpartitioned_s: for the MILP without stages and its relaxation together.
        batches, refinements: of a throughput curve, see `experiments.throughput.grid` and `between`.
        price_limit_s: for one shadow price of memory.
        sizes: tried in a search for the largest model.
    """

    points: int
    time_limit_s: float
    samples: int
    naive_samples: int
    solver_points: int
    unpartitioned_s: float
    batches: int
    refinements: int
    price_limit_s: float
    sizes: int


Context: TypeAlias = PartContext[Network, Scale]


def extract_all(context: Context, *, per_sample: bool) -> None:
    """Extract the networks side by side: each starts a framework, which takes seconds.

    `per_sample`: those of one and of two samples too (`experiments.per_sample`).
    """
    specs = [configured_model(network.name) for network in context.networks]
    keras = [spec for spec in specs if spec.framework == "keras"]
    small = (1, 2) if per_sample else ()
    sizes = [replace(spec, batch_size=batch) for spec in keras for batch in (spec.batch_size, *small)]
    with ThreadPoolExecutor(context.engine.at_once) as pool, context.console.status("extracting the networks ..."):
        for _ in pool.map(lambda spec: extract_in_child(spec, CACHE_FOLDER / "graphs"), sizes):
            pass


def extracted(context: Context, network: Network, *, cost: str = "roofline", batch_size: int | None = None) -> Subject:
    """The network as this project extracts it, with costs for the run's GPU."""

    def make() -> Subject:
        spec = configured_model(network.name)
        spec = spec if batch_size is None else replace(spec, batch_size=batch_size)
        return _build(context, replace(context.settings, spec=spec, graph_file=None, cost=cost))

    return context.once((network.name, cost, batch_size), make)


def published(context: Context, network: Network) -> Subject | None:
    """The network's published graph and costs; None if it is not at hand."""
    file = context.published_file(network)
    if file is None:
        return None
    settings = replace(context.settings, spec=None, graph_file=file, cost="file")
    return context.once(file, lambda: _build(context, settings))


def published_or_extracted(context: Context, network: Network) -> Subject:
    """The published graph where it is at hand, else the extracted one."""
    return published(context, network) or extracted(context, network)


def own_costs(graph: remat.Graph) -> Subject:
    """A graph made here, with its own costs."""
    return Subject(graph, None, None, None, None, "file", "file")


def write_run_folder(
    context: Context, name: str, graph_run: GraphRun, rows: Iterable[Row], families: Sequence[str], title: str
) -> str:
    """A run folder below the paper's, which ``python -m analysis`` draws too; its path relative to the paper's."""
    folder = context.folder / name
    config = as_dict(context.cfg)
    head = {
        "title": title, "experiment": graph_run.experiment, "model": graph_run.subject.model, "gpu": config["gpu"],
        "config": config, "graph_sha256": graph_run.subject.graph.sha256(),
        "store": context.store_from(folder), "heuristics": heuristics(),
    }  # fmt: skip
    write_json(folder / "run.json", head | {"keys": [row.key for row in rows], "families": list(families)})
    return name


def remember(context: Context, determines: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """What `compute` returns (JSON), from the store if the same code has computed the same before.

    None means that a time limit ended it: it is not kept.
    """
    return context.store.remember("paper", {**determines, "code": code_version(whole=True)}, compute)


def _build(context: Context, settings: Settings) -> Subject:
    subject, remarks = build_quietly(settings)
    for remark in remarks:
        context.print(f"warning: {remark}")
    graph = subject.graph
    context.print(f"{graph.name}: {len(graph)} operations, fixed {format_size(graph.fixed_bytes)}")
    return subject
