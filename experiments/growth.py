"""How the first plan, overhead and memory of the search grow with the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis import figures
from analysis.charts import save_in_run
from experiments.documents import Drawing, markdown_table
from experiments.measure_solve import graph_of, share_of_peak, solve_case
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER

SHARE = 0.9


@experiment()
def growth(
    layered: Sequence[int] = (250, 1000, 4000, 16_000), chains: Sequence[int] = (100, 1000, 10_000),
    strategies: Sequence[str] = ("search",), time_limit: float = 20.0, threads: int = 2,
) -> Iterator[Case]:  # fmt: skip
    """A strategy against the size of the graph: seconds to a plan, quality, memory."""
    sources = [{"function": "layered", "n": n, "name": f"layered_n{n}"} for n in layered]
    sources += [{"function": "chain", "n": n // 2, "name": f"chain_n{n}"} for n in chains]
    for source in sources:
        graph = graph_of(source)
        for strategy in strategies:
            yield solve_case(source, graph, strategy, share_of_peak(graph, SHARE), time_limit_s=time_limit,
                             threads=threads, kind=source["function"])  # fmt: skip


@growth.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each graph, and the figure of the last time limit."""
    latest = [row for row in rows if row["time_limit_s"] == rows[-1]["time_limit_s"]]
    quality = f"overhead after {latest[-1]['time_limit_s']:g} s"
    heads = ["graph", "strategy", "operations", "edges", "first plan, s", quality, "MiB"]
    lines = [
        [
            row["kind"], row["strategy"], f"{row['n_operations']:,}", f"{row['n_edges']:,}",
            "" if row["first_plan_s"] is None else f"{row['first_plan_s']:.1f}",
            "no plan" if row["overhead"] is None else f"{row['overhead']:.2%}",
            "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**20:.0f}",
        ]
        for row in latest
    ]  # fmt: skip
    drawn = save_in_run(RUNS_FOLDER / "growth", "growth", figures.growth, latest)
    return Drawing(markdown_table(heads, lines, "llrrrrr"), figures={"growth": drawn[0]})
