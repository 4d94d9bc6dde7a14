"""What the parts of the paper run with: one store, one engine, and folders that the figures are drawn from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

import remat
from experiments.build import CACHE_FOLDER, Subject, build_quietly
from experiments.config import as_dict
from experiments.engine import Engine
from experiments.paper.networks import Network
from experiments.progress import SolveProgress
from experiments.row import Row
from experiments.settings import Settings, configured_model
from experiments.solving import Bench
from experiments.store import Store, code_version, write_json
from remat.errors import InvalidInput
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


@dataclass(slots=True, eq=False)
class Lab:
    """One run of the paper.

    Attributes:
        networks: those of the run, in the paper's order.
        instances: folder of published graphs, or None.
        strategies: every one that is compared.
        folder: of the run; a part writes what its drawing needs below it.
    """

    cfg: DictConfig
    settings: Settings
    scale: Scale
    networks: tuple[Network, ...]
    instances: Path | None
    store: Store
    engine: Engine
    progress: SolveProgress
    console: Console
    folder: Path
    benches: list[Bench] = field(default_factory=list)
    _subjects: dict[Any, Subject] = field(default_factory=dict)

    def extract_all(self, *, per_sample: bool) -> None:
        """Extract the networks side by side: each starts a framework, which takes seconds.

        `per_sample`: those of one and of two samples too (`experiments.per_sample`).
        """
        specs = [configured_model(network.name) for network in self.networks]
        keras = [spec for spec in specs if spec.framework == "keras"]
        small = (1, 2) if per_sample else ()
        sizes = [replace(spec, batch_size=batch) for spec in keras for batch in (spec.batch_size, *small)]
        with ThreadPoolExecutor(self.engine.at_once) as pool, self.console.status("extracting the networks ..."):
            for _ in pool.map(lambda spec: extract_in_child(spec, CACHE_FOLDER / "graphs"), sizes):
                pass

    def ours(self, network: Network, *, cost: str = "roofline", batch_size: int | None = None) -> Subject:
        """The network as we extract it, with costs for the run's GPU."""
        key = (network.name, cost, batch_size)
        if key not in self._subjects:
            spec = configured_model(network.name)
            spec = spec if batch_size is None else replace(spec, batch_size=batch_size)
            self._subjects[key] = self._build(replace(self.settings, spec=spec, graph_file=None, cost=cost))
        return self._subjects[key]

    def published(self, network: Network) -> Subject | None:
        """The network's published graph and costs; None without one, or without the folder of instances."""
        file = self.instances / network.instance if self.instances and network.instance else None
        if file is None or not file.is_file():
            return None
        key = file
        if key not in self._subjects:
            self._subjects[key] = self._build(replace(self.settings, spec=None, graph_file=file, cost="file"))
        return self._subjects[key]

    def given(self, graph: remat.Graph) -> Subject:
        """A graph made here, with its own costs."""
        return Subject(graph, None, None, None, None, "file", "file")

    def bench(
        self, subject: Subject, part: str, *, strategies: Sequence[str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any,
    ) -> Bench:  # fmt: skip
        """A bench for one graph; `options` are added to those of the strategies, `changes` are of the settings."""
        names = tuple(self.settings.strategies if strategies is None else strategies)
        merged = {name: {**self.settings.options.get(name, {}), **(options or {}).get(name, {})} for name in names}
        settings = replace(self.settings, strategies=names, options=merged, **changes)
        self.store.write_graph(subject.graph)
        peak = remat.family(subject.graph, "checkpoint_all", accounting=settings.accounting)[0].peak_bytes
        bench = Bench(subject, settings, f"paper/{part}", self.store, self.engine, self.progress, peak)
        self.benches.append(bench)
        return bench

    def write_panel(self, name: str, bench: Bench, rows: Iterable[Row], families: Sequence[str], title: str) -> str:
        """A run folder of its own, which ``python -m analysis`` draws too; its path relative to the run's."""
        folder = self.folder / name
        config = as_dict(self.cfg)
        head = {
            "title": title, "experiment": bench.experiment, "model": bench.subject.model, "gpu": config["gpu"],
            "config": config, "graph_sha256": bench.subject.graph.sha256(),
            "store": os.path.relpath(self.store.folder, folder), "heuristics": heuristics(),
        }  # fmt: skip
        write_json(folder / "run.json", head | {"keys": [row.key for row in rows], "families": list(families)})
        return name

    def relative_store(self) -> str:
        """The store as seen from the run's folder."""
        return os.path.relpath(self.store.folder, self.folder)

    def remember(self, determines: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """What `compute` returns (JSON), from the store if the same has been computed by the same code.

        None is what a limit of time ended: it is not kept.
        """
        return self.store.remember("paper", {**determines, "code": code_version(whole=True)}, compute)

    def say(self, line: str) -> None:
        """A line to the user."""
        self.console.print(line, markup=False, soft_wrap=True)

    def _build(self, settings: Settings) -> Subject:
        subject, remarks = build_quietly(settings)
        for remark in remarks:
            self.say(f"warning: {remark}")
        graph = subject.graph
        self.say(f"{graph.name}: {len(graph)} operations, fixed {format_size(graph.fixed_bytes)}")
        return subject


def instances_folder(cfg: DictConfig) -> Path | None:
    """The folder of published graphs, by ``instances=`` or REMAT_INSTANCES.

    Raises:
        InvalidInput: it was named on the command line and is not there.
    """
    if cfg.instances is not None:
        folder = Path(cfg.instances)
        if not folder.is_dir():
            raise InvalidInput(f"instances={cfg.instances}: no such folder")
        return folder
    folder = Path(os.environ.get("REMAT_INSTANCES", ""))
    return folder if os.environ.get("REMAT_INSTANCES") and folder.is_dir() else None
