"""`make models`: every configured model at each granularity, extracted now; docs/reference/models.md shows them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from experiments.config import group_options
from experiments.documents import DOCS, Document, Drawing, LongTable, link_to
from experiments.provenance import provenance
from experiments.settings import configured_model
from remat.errors import RematError, unknown_name
from remat.extraction import extract, extract_in_child
from remat.frontends.spec import ModelSpec
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate

AT_ONCE = 2
HEADS = (
    "model", "framework", "granularity", "batch", "nodes", "edges", "fixed GB", "store-all peak GB", "seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extracted:
    """What came of one spec: a graph or the reason why not, and the seconds it took."""

    spec: ModelSpec
    graph: Graph | None
    error: str
    seconds: float


def specs(names: Sequence[str]) -> Iterator[ModelSpec]:
    """Every configured model at each granularity it has; entries that need a target are left out."""
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
    """Extract the models named, or all; each failure is a line on stderr and a row."""
    known = group_options("model")
    for name in arguments:
        if name not in known:
            raise unknown_name("model", name, known)
    rows: list[list[str]] = []
    failed = False
    todo = list(specs(arguments or known))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for i, done in enumerate(pool.map(measure, todo), start=1):
            rows.append(_row(done))
            failed = failed or done.graph is None
            what = f"{done.spec.name} ({done.spec.granularity})"
            print(f"[{i}/{len(todo)}] {what}: {done.error or rows[-1][-1] + ' s'}", file=sys.stderr, flush=True)
    table = LongTable("models", HEADS, rows)
    return Drawing(summary(table), [table], commit=provenance().git_commit, whole=not arguments, failed=failed)


def _row(done: Extracted) -> list[str]:
    spec, graph = done.spec, done.graph
    cells = ["FAILED", "", "", ""]
    if graph is not None:
        peak = simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes
        cells = [str(len(graph)), str(graph.n_edges), f"{graph.fixed_bytes / 1e9:.3f}", f"{peak / 1e9:.3f}"]
    return [spec.name, spec.framework, spec.granularity, str(spec.batch_size), *cells, f"{done.seconds:.1f}"]


def summary(table: LongTable) -> str:
    """For each framework and granularity: which models there are, and how large their graphs are."""
    kinds: dict[tuple[str, str], list[Sequence[str]]] = {}
    for row in table.rows:
        kinds.setdefault((row[1], row[2]), []).append(row)
    lines = []
    for (framework, granularity), members in kinds.items():
        sizes = [int(row[4]) for row in members if row[4].isdigit()]
        operations = f"{min(sizes):,} to {max(sizes):,} operations" if sizes else "FAILED"
        lines.append(
            f"- **{framework}, by {granularity}** ({operations}): {', '.join(f'`{row[0]}`' for row in members)}"
        )
    return "\n".join([*lines, f"\nEvery graph: {link_to(table, DOCUMENT.page)}."])


DOCUMENT = Document("models", DOCS / "reference" / "models.md", draw)
