"""A paper's experiment: each part is a case that sends its solves to the engine, and yields a document and the solves.

A part is a function of the context that returns its document, JSON-ready. The function of the part's name in
`analysis` draws the document.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import remat
from analysis.parts import DOCUMENT, SOLVE, Part, Study
from experiments.arguments import names_of
from experiments.build import Subject
from experiments.documents import DOCS, Drawing, LongTable, link_to
from experiments.registry import Row
from experiments.row import Row as Solved
from experiments.settings import Settings
from experiments.solving import GraphRun, Solves, contradictions
from remat.errors import RematError
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
    """What the parts of a paper share.

    Attributes:
        run: where solves run and are kept.
        scale: amount of work; each paper has its own class.
        networks: those of the run, in the paper's order.
        graph_runs: one for each graph and its settings.
        rows: [solve] rows for later parts; each paper has its own keys.
    """

    run: Solves
    scale: ScaleT
    networks: tuple[NetworkT, ...]
    graph_runs: list[GraphRun] = field(default_factory=list)
    rows: dict[Any, Solved] = field(default_factory=dict)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        return self.run.settings

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
        self.run.store.write_graph(subject.graph)
        plain = remat.family(subject.graph.default(), "checkpoint_all", accounting=settings.accounting)[0]
        where = self.run.store, self.run.engine, self.run.progress
        graph_run = GraphRun(subject, settings, experiment, *where, plain.peak_bytes)
        self.graph_runs.append(graph_run)
        return graph_run

    def published_file(self, network: NetworkT) -> Path | None:
        """The file of the network's published graph; None if it or the folder of instances is missing."""
        folder = instances_folder(self.settings)
        file = folder / network.instance if folder and network.instance else None
        return file if file is not None and file.is_file() else None

    def print(self, line: str) -> None:
        """Print a line."""
        self.run.console.print(line, markup=False, soft_wrap=True)


RunPart = Callable[[Any], dict[str, Any]]


def instances_folder(settings: Settings) -> Path | None:
    """The folder of published graphs, from ``instances=`` or REMAT_INSTANCES."""
    named = settings.instances or os.environ.get("REMAT_INSTANCES")
    return Path(named) if named and Path(named).is_dir() else None


def wanted_parts(given: Iterable[Any] | None, known: Collection[str]) -> list[str]:
    """The given parts (None: all), in order.

    Raises:
        InvalidInput: there is no such part, or none is given.
    """
    asked = names_of("part", known if given is None else given, known)
    return [part for part in known if part in asked]


def measured(context: PartContext[Any, Any], run_part: RunPart, needs: Sequence[RunPart] = ()) -> Iterator[Row]:
    """The row of a part's document, then a row for each solve that it used and that no part before it used.

    Args:
        needs: parts whose rows it reads; they run first, from the store.

    Raises:
        RematError: a plan refutes a claim.
    """
    for need in needs:
        need(context)
    before = context.run.store.used_rows()
    document = run_part(context)
    refuted = list(document.get("contradicted", []))
    for graph_run in context.graph_runs:
        if graph_run.cost_cap is None:  # solves with a cap end early, so that their rows cannot be compared
            refuted += contradictions(list(graph_run.kept.values()))
    if refuted:
        raise RematError("; ".join(["contradicted", *dict.fromkeys(refuted)]))
    yield {"kind": DOCUMENT, "document": document, "cores": os.cpu_count()}
    store = context.run.store
    for key in sorted(store.used_rows() - before):
        row = store.read_row(key)
        if row is not None:
            plan = None if row.plan_file is None else (store.folder / row.plan_file).read_text()
            yield {"kind": SOLVE, **asdict(row), "plan": plan}


def drawing_of_parts(
    study: Study, parts: Mapping[str, Part], drawn: Mapping[str, Path], lead: str, prefix: str, page: str,
    shown: Collection[str],
) -> Drawing:  # fmt: skip
    """A paper's page: below `lead` each part, folded.

    Args:
        prefix: of the names of this paper's figures and tables.
        shown: figures on the page.
    """
    texts, tables = [f"{lead} {made(study)}"], list[LongTable]()
    for part in parts.values():
        own = [
            LongTable(f"{prefix}_{table.name.removeprefix(f'{prefix}_')}", table.heads, table.rows)
            for table in part.tables
        ]
        tables += own
        lines = [f'<details markdown="1"><summary>{part.title}</summary>', f"**Published.** {part.published}",
                 f"**Ours.** {part.ours}", f"**Why they differ.** {part.why}"]  # fmt: skip
        lines += [f"![{caption}](../figures/{prefix}_{file}.png)" for file, caption, _ in part.figures if file in shown]
        if own:
            lines.append(f"Tables: {', '.join(link_to(table, DOCS / page) for table in own)}.")
        texts.append("\n\n".join([*lines, "</details>"]))
    figures = {f"{prefix}_{file}": path for file, path in drawn.items() if file in shown}
    return Drawing("\n\n".join(texts), tables, figures)


def made(study: Study, part: str = "") -> str:
    """Dates of a study's parts, or of one, number of their solves, and the sum of their minutes.

    A strategy that ignores the budget is not solved for each.
    """
    dates = sorted({row["date"] for name, row in study.heads.items() if part in ("", name)})
    seconds = [row["wall_s"] for row in study.solves.values()
               if part in ("", row["part"]) and not get_strategy(row["strategy"]).ignores_budget]  # fmt: skip
    return f"{', '.join(dates)}; {len(seconds):,} solves, which take {sum(seconds) / 60:.0f} minutes one after another."
