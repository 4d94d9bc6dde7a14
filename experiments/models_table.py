"""`make models`: every configured model at each granularity, extracted now; non-zero if any fails.

python -m experiments.models_table [--write] [MODEL ...]; --write puts the table into docs/reference/models.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from experiments.config import group_options
from experiments.documents import DOCS, markdown_table, write_between_marks
from experiments.progress import make_console
from experiments.settings import configured_model
from remat.errors import RematError, unknown_name
from remat.extraction import extract, extract_in_child
from remat.frontends.spec import ModelSpec
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate

AT_ONCE = 2
COMMAND = "python -m experiments.models_table --write"
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


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 if any model fails."""
    write = "--write" in arguments
    arguments = [argument for argument in arguments if argument != "--write"]
    known = group_options("model")
    for name in arguments:
        if name not in known:
            print(f"error: {unknown_name('model', name, known)}", file=sys.stderr)
            return 1
    console = make_console()
    table = Table(box=box.SIMPLE_HEAD)
    for column in HEADS:
        table.add_column(column, no_wrap=True, justify="left" if column in HEADS[:3] else "right")
    rows: list[list[str]] = []
    failures: list[Extracted] = []
    todo = list(specs(arguments or known))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for i, done in enumerate(pool.map(measure, todo), start=1):
            spec, graph = done.spec, done.graph
            what = f"{spec.name} ({spec.granularity})"
            if graph is None:
                failures.append(done)
                cells = ["FAILED", "", "", ""]
            else:
                peak = simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes
                cells = [str(len(graph)), str(graph.n_edges), f"{graph.fixed_bytes / 1e9:.3f}", f"{peak / 1e9:.3f}"]
            seconds = f"{done.seconds:.1f}"
            rows.append([spec.name, spec.framework, spec.granularity, str(spec.batch_size), *cells, seconds])
            table.add_row(*rows[-1])
            print(f"[{i}/{len(todo)}] {what}: {done.error or f'{seconds} s'}", file=sys.stderr, flush=True)
    console.print(table)
    for failed in failures:
        line = f"{failed.spec.name} ({failed.spec.granularity}) failed: {failed.error}"
        console.print(line, markup=False, soft_wrap=True)
    if write:
        write_between_marks(DOCS / "reference" / "models.md", COMMAND, markdown_table(HEADS, rows))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
