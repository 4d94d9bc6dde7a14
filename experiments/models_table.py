"""Tables of the reference: every configured model at each granularity (`make models`), every strategy."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from experiments.arguments import names_of
from experiments.config import group_options
from experiments.documents import DOCS, Document, Drawing, LongTable, link_to, markdown_table
from experiments.provenance import provenance
from experiments.settings import configured_model
from remat.errors import InvalidInput, RematError
from remat.extraction import extract, extract_in_child
from remat.frontends.spec import ModelSpec
from remat.graph import Graph
from remat.registry import Strategy, get_strategy, strategies
from remat.simulator import plain_peak

AT_ONCE = 2
FAILED = "FAILED"
HEADS = (
    "model", "framework", "granularity", "batch", "nodes", "edges", "fixed GB", "store-all peak GB", "seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extracted:
    """The result of one extraction: a graph or the error, and the seconds that it took."""

    spec: ModelSpec
    graph: Graph | None
    error: str
    seconds: float


def specs(names: Sequence[str]) -> Iterator[ModelSpec]:
    """Every configured model at each of its granularities, except those that need a target."""
    for name in names:
        spec = configured_model(name)
        if spec.target:
            for granularity in ("layer", "operation") if spec.framework == "keras" else (spec.granularity,):
                yield replace(spec, granularity=granularity)


def measure(spec: ModelSpec) -> Extracted:
    """Extract without a cache, in a child process where a framework is needed."""
    start = time.monotonic()
    try:
        graph = extract(spec) if spec.framework == "synthetic" else extract_in_child(spec, None)
    except RematError as error:
        return Extracted(spec, None, str(error), time.monotonic() - start)
    return Extracted(spec, graph, "", time.monotonic() - start)


def draw(arguments: Sequence[str]) -> Drawing:
    """Extract the named models, or all; each failure is a line on stderr and a row."""
    known = group_options("model")
    chosen = names_of("model", arguments or known, known)
    rows: list[list[str]] = []
    todo = list(specs(chosen))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for i, done in enumerate(pool.map(measure, todo), start=1):
            rows.append(_row(done))
            what = f"{done.spec.name} ({done.spec.granularity})"
            print(f"[{i}/{len(todo)}] {what}: {done.error or rows[-1][-1] + ' s'}", file=sys.stderr, flush=True)
    table = LongTable("models", HEADS, rows)
    failed = any(row[4] == FAILED for row in rows)
    return Drawing(summary(table), [table], commit=provenance().git_commit, whole=not arguments, failed=failed)


def _row(done: Extracted) -> list[str]:
    spec, graph = done.spec, done.graph
    cells = [FAILED, "", "", ""]
    if graph is not None:
        gigabytes = (f"{size / 1e9:.3f}" for size in (graph.fixed_bytes, plain_peak(graph)))
        cells = [str(len(graph)), str(graph.n_edges), *gigabytes]
    return [spec.name, spec.framework, spec.granularity, str(spec.batch_size), *cells, f"{done.seconds:.1f}"]


def summary(table: LongTable) -> str:
    """For each framework and granularity, the models and the range of their graphs' sizes."""
    kinds: dict[tuple[str, str], list[Sequence[str]]] = {}
    for row in table.rows:
        kinds.setdefault((row[1], row[2]), []).append(row)
    lines = []
    for (framework, granularity), members in kinds.items():
        sizes = [int(row[4]) for row in members if row[4] != FAILED]
        operations = f"{min(sizes):,} to {max(sizes):,} operations" if sizes else FAILED
        lines.append(
            f"- **{framework}, by {granularity}** ({operations}): {', '.join(f'`{row[0]}`' for row in members)}"
        )
    return "\n".join([*lines, f"\nEvery graph: {link_to(table, DOCUMENT.page)}."])


DOCUMENT = Document("models", DOCS / "reference" / "models.md", draw)

STRATEGY_HEADS = ("strategy", "what it does", "options, with their defaults")


def draw_strategies(arguments: Sequence[str]) -> Drawing:
    """A line for each strategy, from the registry.

    Raises:
        InvalidInput: an argument is given.
    """
    if arguments:
        raise InvalidInput("'strategies' takes no arguments")
    rows = [[f"`{one.name}`", one.summary, "<br>".join(_options(one))] for one in map(get_strategy, strategies())]
    return Drawing(markdown_table(STRATEGY_HEADS, rows, "lll"))


def _options(chosen: Strategy) -> list[str]:
    """Each option with its default, and what its docstring says of it."""
    said = meanings(inspect.getdoc(chosen.run) or "")
    return [f"`{name}={default}`: {said[name]}" for name, default in chosen.options.items()]


def meanings(docstring: str) -> dict[str, str]:
    """[argument] its text in the section ``Args`` of a docstring, in one line of Markdown."""
    section = re.search(r"^Args:\n((?: {4}.*\n?)+)", docstring, re.MULTILINE)
    entries = re.split(r"^ {4}(?=\w+: )", section[1] if section else "", flags=re.MULTILINE)[1:]
    pairs = (" ".join(entry.split()).replace("``", "`").partition(": ") for entry in entries)
    return {name: text for name, _, text in pairs}


STRATEGIES = Document("strategies", DOCS / "reference" / "strategies.md", draw_strategies)
