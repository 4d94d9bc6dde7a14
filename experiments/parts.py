"""A paper's experiment: its parts run one after the other, and each part's document is written as soon as it is done.

A part is a function of the context. It solves through the store and returns its document, JSON-ready. The function
of the part's name in `analysis` draws the document.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from omegaconf import DictConfig
from rich.console import Console

import remat
from experiments.arguments import names_of
from experiments.build import Subject
from experiments.config import as_dict
from experiments.engine import Engine
from experiments.engines import make_engine
from experiments.packed import Pack
from experiments.progress import SolveProgress, duration
from experiments.provenance import provenance
from experiments.row import Row
from experiments.settings import RUNS_FOLDER, Settings
from experiments.solving import GraphRun, contradictions
from experiments.store import Store, write_json
from remat.errors import InvalidInput
from remat.files import read_json
from remat.registry import get_strategy


class HasInstance(Protocol):
    """The attributes of a network that every paper needs.

    Attributes:
        instance: the published graph with its costs, relative to the folder of instances; None if there is none.
    """

    @property
    def instance(self) -> str | None: ...


NetworkT = TypeVar("NetworkT", bound=HasInstance)
ScaleT = TypeVar("ScaleT")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PartContext(Generic[NetworkT, ScaleT]):
    """The objects that the parts of one run share.

    Attributes:
        scale: amount of work; each paper has its own class.
        networks: those of the run, in the paper's order.
        instances: folder of published graphs and records, or None.
        folder: of the run; a part writes files for its drawing below it.
        graph_runs: one for each graph and its settings.
        rows: [solve] rows for later parts; each paper has its own keys.
        counted: keys of the rows that the parts so far have used.
    """

    cfg: DictConfig
    settings: Settings
    scale: ScaleT
    networks: tuple[NetworkT, ...]
    instances: Path | None
    store: Store
    engine: Engine
    progress: SolveProgress
    console: Console
    folder: Path
    graph_runs: list[GraphRun] = field(default_factory=list)
    rows: dict[Any, Row] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, which is called only the first time for each key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def graph_run(
        self, subject: Subject, experiment: str, *, strategies: Sequence[str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any,
    ) -> GraphRun:  # fmt: skip
        """The solves of one graph, with `options` added to the strategies' and `changes` made to the settings."""
        names = tuple(self.settings.strategies if strategies is None else strategies)
        merged = {name: {**self.settings.options.get(name, {}), **(options or {}).get(name, {})} for name in names}
        settings = replace(self.settings, strategies=names, options=merged, **changes)
        self.store.write_graph(subject.graph)
        if subject.cost_source != "file":  # a published graph stays in its file
            self.store.used.add(f"graphs/{subject.graph.sha256()}.json")
        plain = remat.family(subject.graph.default(), "checkpoint_all", accounting=settings.accounting)[0]
        graph_run = GraphRun(subject, settings, experiment, self.store, self.engine, self.progress, plain.peak_bytes)
        self.graph_runs.append(graph_run)
        return graph_run

    def published_file(self, network: NetworkT) -> Path | None:
        """The file of the network's published graph; None if it or the folder of instances is missing."""
        file = self.instances / network.instance if self.instances and network.instance else None
        return file if file is not None and file.is_file() else None

    def store_from(self, folder: Path) -> str:
        """The store's path relative to `folder`, for documents."""
        return os.path.relpath(self.store.folder, folder)

    def print(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, markup=False, soft_wrap=True)


Part = Callable[[Any], dict[str, Any]]
STUDY = Path("results/study")  # where the rows of scale=study are kept, a folder for each paper


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper as an experiment.

    Attributes:
        name: of the experiment; its last component names the main file of the run's folder.
        parts: [name] its function, in the order of the page.
        needs: [part] the parts whose documents it reads.
        prepare: called with the context and the wanted parts, before the first part runs.
        draw: draws the run's folder and returns the written files.
    """

    name: str
    parts: Mapping[str, Part]
    needs: Mapping[str, Sequence[str]]
    prepare: Callable[[Any, Collection[str]], None]
    draw: Callable[[Path], list[Path]]

    def wanted_parts(self, given: Iterable[Any] | None) -> list[str]:
        """The given parts (None: all) and the parts that they need, in order.

        Raises:
            InvalidInput: there is no such part, or none is given.
        """
        asked = names_of("part", self.parts if given is None else given, self.parts)
        wanted = {need for part in asked for need in self.needs.get(part, ())} | set(asked)
        return [part for part in self.parts if part in wanted]

    def run(
        self, cfg: DictConfig, settings: Settings, scale: Any, networks: tuple[Any, ...], console: Console, folder: Path
    ) -> int:
        """Run the wanted parts and draw the folder; returns the exit code: 1 if a claim was refuted."""
        began = time.monotonic()
        parts, instances = self.wanted_parts(cfg.parts), _instances_folder(cfg)
        head = {"experiment": self.name, "config": as_dict(cfg), "scale": asdict(scale),
                "provenance": asdict(provenance()), "cores": os.cpu_count()}  # fmt: skip
        store, name = Store(RUNS_FOLDER / "store"), self.name.rpartition("/")[2]
        pack = Pack(STUDY / name, folder, store, f"{name}.json") if cfg.scale == "study" else None
        if pack is not None:
            pack.unpack()
        write_json(folder / f"{name}.json", head)
        engine = make_engine(settings.engine, settings.jobs, settings.threads, settings.address)
        with engine, SolveProgress(console, engine.at_once) as progress:
            context = PartContext(cfg, settings, scale, networks, instances, store, engine, progress, console, folder)
            self.prepare(context, parts)
            documents = []
            for part in parts:
                with nullcontext() if pack is None else pack.packing(part, whole=cfg.networks is None):
                    documents.append(_run_part(part, self.parts[part], context))
        refuted = [line for document in documents for line in document.get("contradicted", [])]
        for graph_run in context.graph_runs:
            if graph_run.cost_cap is None:  # solves with a cap end early, so that their rows cannot be compared
                refuted += contradictions(list(graph_run.kept.values()))
        context.print(f"{progress.n_finished} solved now, in {duration(time.monotonic() - began)}")
        return _draw(self.draw, context, refuted)


def has_study(name: str) -> bool:
    """Whether pieces of a paper's study are in the repository."""
    return any((STUDY / name).glob("*.parquet"))


def unpacked_study(name: str) -> Path:
    """The run's folder of a paper's study, from its pieces.

    Raises:
        InvalidInput: there are no pieces, or one of them cannot be used.
    """
    pieces, folder = STUDY / name, RUNS_FOLDER / f"study_{name}"
    if not has_study(name):
        raise InvalidInput(
            f"{pieces}: has no study; run the paper's experiment with scale=study, or name a run's folder"
        )
    shutil.rmtree(folder, ignore_errors=True)  # else older pieces would stay
    Pack(pieces, folder / "run", Store(folder / "store"), f"{name}.json").unpack()
    return folder / "run"


def _instances_folder(cfg: DictConfig) -> Path | None:
    """The folder of published graphs, from ``instances=`` or REMAT_INSTANCES."""
    if cfg.instances is not None:
        return Path(cfg.instances)
    named = os.environ.get("REMAT_INSTANCES")
    return Path(named) if named and Path(named).is_dir() else None


def _run_part(name: str, run: Part, context: PartContext[Any, Any]) -> dict[str, Any]:
    """Run one part and write its document into the folder; returns the document."""
    context.print(f"--- {name}")
    before = context.progress.n_finished
    document = run(context)
    path = context.folder / f"{name}.json"
    made = _origin(path, is_new=context.progress.n_finished > before) | _amount(context)
    write_json(path, document | {"made": made})
    return document


def _origin(path: Path, *, is_new: bool) -> dict[str, Any]:
    """Date and commit of a part's solves; the stored ones if nothing was solved now."""
    if not is_new and path.is_file():
        with suppress(InvalidInput, KeyError, TypeError):  # a damaged file is written again
            return read_json(path)["made"]
    source = provenance()
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), "git_commit": source.git_commit,
            "git_dirty": source.git_dirty}  # fmt: skip


def _amount(context: PartContext[Any, Any]) -> dict[str, Any]:
    """Number and seconds of the solves that this part used and no part before it, whenever they were made.

    A strategy that ignores the budget is not solved for each.
    """
    keys = context.store.used_rows() - context.counted
    context.counted |= keys
    rows = [row for key in keys if (row := context.store.read_row(key)) is not None]
    seconds = [row.wall_s for row in rows if not get_strategy(row.strategy).ignores_budget]
    return {"solved": len(seconds), "seconds": sum(seconds)}


def _draw(draw: Callable[[Path], list[Path]], context: PartContext[Any, Any], refuted: Iterable[str]) -> int:
    """Draw the run, print the paths and the refuted claims; returns the exit code."""
    with context.console.status("drawing ..."):
        drawn = draw(context.folder)
    for what, ending in (("tables", ".csv"), ("figures", ".pdf"), ("page", ".html")):
        for path in sorted({path if ending == ".html" else path.parent for path in drawn if path.suffix == ending}):
            context.print(f"{what:<8} {path}")
    lines = list(dict.fromkeys(refuted))
    for line in lines:
        context.print(f"error: contradicted: {line}")
    return 1 if lines else 0
