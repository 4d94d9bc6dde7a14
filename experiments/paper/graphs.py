"""Checkmate's networks, their graphs, published and extracted, and their solves as the figures read them."""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import remat
from analysis.batches import ENCODERS
from analysis.published import PUBLISHED
from analysis.style import label_of
from experiments.budget_sweep import sweep_budgets
from experiments.build import CACHE_FOLDER, Subject, build_quietly
from experiments.settings import Settings, configured_model
from experiments.solving import GraphRun, Solves
from experiments.store import Row as Solved
from remat.extraction import extract_in_child
from remat.files import read_table
from remat.units import format_size


@dataclass(frozen=True, slots=True)
class Network:
    """A network of the paper.

    Attributes:
        name: of conf/model.
        instance: the published graph with its V100 costs, relative to the folder of instances; None if there is none.
        has_slow_lp: the linear relaxation takes minutes.
    """

    name: str
    instance: str | None = None
    has_slow_lp: bool = False

    @property
    def label(self) -> str:
        return label_of(self.name)


NETWORKS = {
    network.name: network
    for network in (
        Network("vgg16", "v100/vgg16_b256.json"), Network("mobilenet", "v100/mobilenet_b512.json", has_slow_lp=True),
        Network("unet", "v100/unet_b32.json"), Network("resnet50", has_slow_lp=True), Network("fcn8"),
        Network("segnet"), Network("vgg19"),
    )
}  # fmt: skip


def in_figure_6(network: Network) -> bool:
    """Whether it has a bar in Figure 6. A network from outside the paper gets one, because the user named it."""
    return network.name in {*PUBLISHED["checkmate"]["batches"], *ENCODERS} or network.name not in NETWORKS


def network(name: str) -> Network:
    """The network of that name in conf/model."""
    return NETWORKS.get(name) or Network(name)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done; never which networks, batches or resolutions.

    Attributes:
        points: number of budgets of a sweep.
        as_artifact: take the artifact's budgets: `points` over the range, as many about the least memory of any plan,
            and twice as many for VGG.
        time_limit_s: of each solve.
        rounding_s: of a solve that rounds the LP of a network whose LP is slow.
        samples: number of random roundings.
        naive_samples: number of random roundings without phase two, which usually give no plan.
        solver_points: number of budgets at which solver times are taken.
        unpartitioned_s: time limit for the MILP without stages and its relaxation together.
        batches, refinements: of a throughput curve, see `experiments.throughput.grid` and `between`.
        price_limit_s: time limit for one shadow price of memory.
        sizes: number of sizes to try in a search for the largest model.
    """

    points: int
    time_limit_s: float
    rounding_s: float
    samples: int
    naive_samples: int
    solver_points: int
    unpartitioned_s: float
    batches: int
    refinements: int
    price_limit_s: float
    sizes: int
    as_artifact: bool = False


@dataclass(slots=True, eq=False)
class Context:
    """What the parts of the paper share.

    Attributes:
        run: where solves run and are kept.
        scale: amount of work.
        networks: those of the run, in the paper's order.
        graph_runs: one for each graph and its settings.
    """

    run: Solves
    scale: Scale
    networks: tuple[Network, ...]
    graph_runs: list[GraphRun] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        return self.run.settings

    def graph_run(
        self, subject: Subject, experiment: str, *, strategies: Sequence[str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any,
    ) -> GraphRun:  # fmt: skip
        """The solves of one graph, with `options` added to the strategies' and `changes` made to the settings."""
        names = tuple(self.settings.strategies if strategies is None else strategies)
        merged = {name: {**self.settings.options.get(name, {}), **(options or {}).get(name, {})} for name in names}
        settings = replace(self.settings, strategies=names, options=merged, **changes)
        graph_run = self.run.graph_run(subject, experiment, settings)
        self.graph_runs.append(graph_run)
        return graph_run

    def print(self, line: str) -> None:
        """Print a line."""
        self.run.console.print(line, markup=False, soft_wrap=True)


def instances_folder(settings: Settings) -> Path | None:
    """The folder of published graphs, from ``instances=`` or REMAT_INSTANCES."""
    named = settings.instances or os.environ.get("REMAT_INSTANCES")
    return Path(named) if named and Path(named).is_dir() else None


def extract_all(context: Context, *, per_sample: bool) -> None:
    """Extract the networks in parallel, because each starts a framework, which takes seconds.

    `per_sample`: extract them with one and with two samples too (`experiments.batch_search`).
    """
    specs = [configured_model(network.name) for network in context.networks]
    keras = [spec for spec in specs if spec.framework == "keras"]
    small = (1, 2) if per_sample else ()
    sizes = [replace(spec, batch_size=batch) for spec in keras for batch in (spec.batch_size, *small)]
    with (
        ThreadPoolExecutor(context.run.engine.at_once) as pool,
        context.run.console.status("extracting the networks ..."),
    ):
        for _ in pool.map(lambda spec: extract_in_child(spec, CACHE_FOLDER / "graphs"), sizes):
            pass


def extracted(context: Context, network: Network, *, cost: str = "roofline", batch_size: int | None = None) -> Subject:
    """The network as this project extracts it, with costs for the run's GPU."""
    spec = configured_model(network.name)
    spec = spec if batch_size is None else replace(spec, batch_size=batch_size)
    return _build(context, replace(context.settings, spec=spec, graph_file=None, cost=cost))


def published(context: Context, network: Network) -> Subject | None:
    """The network's published graph and costs; None if its file is not there."""
    folder = instances_folder(context.settings)
    file = folder / network.instance if folder and network.instance else None
    if file is None or not file.is_file():
        return None
    return _build(context, replace(context.settings, spec=None, graph_file=file, cost="file"))


def subject_of(context: Context, network: Network) -> Subject:
    """The published graph if its file is there, else the extracted one."""
    return published(context, network) or extracted(context, network)


def budgets_at(graph_run: GraphRun, tenths: Iterable[int], least_bytes: int | None = None) -> list[int]:
    """Budgets at these tenths of the way from the smallest budget, or `least_bytes`, to checkpoint-all's peak."""
    if least_bytes is None:
        least_bytes = remat.min_budget(graph_run.subject.graph, graph_run.settings.scope).bytes
    steps = sweep_budgets(least_bytes, graph_run.store_all_peak_bytes, 11)
    return [steps[min(tenth, len(steps) - 1)] for tenth in tenths]


def panel_of(graph_run: GraphRun, rows: Iterable[Solved], families: Sequence[str], title: str) -> dict[str, Any]:
    """The solves of one graph for a document: keys of rows, and the members of families."""
    graph, folder = graph_run.subject.graph, graph_run.store.folder / "families"
    gpu = graph_run.settings.gpu
    tables = [read_table(folder / f"{key}.parquet").drop_columns(["plan"]) for key in families]
    return {
        "title": title, "gpu": {"name": gpu.name, "memory_bytes": gpu.memory_bytes},
        "graph_sha256": graph.sha256(), "working_set_bytes": graph.largest_working_set()[0],
        "keys": [row.key for row in rows], "members": [member for table in tables for member in table.to_pylist()],
    }  # fmt: skip


def _build(context: Context, settings: Settings) -> Subject:
    subject, remarks = build_quietly(settings)
    for remark in remarks:
        context.print(f"warning: {remark}")
    graph = subject.graph
    context.print(f"{graph.name}: {len(graph)} operations, fixed {format_size(graph.fixed_bytes)}")
    return subject
