"""MOCCASIN by its own method on its published graphs, beside the published values and the portfolio."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.documents import Drawing, made, markdown_table
from experiments.measure_solve import graph_of, share_of_peak, solve_case
from experiments.registry import Case, Row, experiment
from experiments.solver_cases import PUBLISHED

STRATEGIES = ("moccasin", "portfolio")
# [graph, share of the peak] seconds as published, limit of the solve here in seconds
SECONDS = {
    ("layered_n100", 0.9): (9.3, 60.0), ("layered_n100", 0.8): (9.5, 60.0), ("layered_n250", 0.9): (55.0, 300.0),
    ("layered_n250", 0.8): (640.0, 900.0),
}  # fmt: skip


@experiment(page="results/leaderboard.md")
def rivals(threads: int = 2) -> Iterator[Case]:
    """MOCCASIN on its published graphs, beside the published values and the portfolio (REMAT_INSTANCES has them)."""
    for (name, share), (seconds, limit_s) in SECONDS.items():
        graph = graph_of(file := f"layered/{name}.json")
        for strategy in STRATEGIES:
            yield solve_case(
                file, graph, strategy, share_of_peak(graph, share), time_limit_s=limit_s, threads=threads,
                share=share, published_percent=PUBLISHED[name, share][0], published_s=seconds,
            )  # fmt: skip


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """(MOCCASIN's row, the portfolio's) of each published value that has both."""
    found = {(row["graph_name"], row["share"], row["strategy"]): row for row in rows}
    both = [tuple(found.get((*case, strategy)) for strategy in STRATEGIES) for case in SECONDS]
    return [(theirs, ours) for theirs, ours in both if theirs is not None and ours is not None]


@rivals.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each published value."""
    heads = ["graph", "budget", "published: overhead, seconds (16 workers)", "`moccasin`", "its last plan after",
             "portfolio", "its last plan after", "its gap"]  # fmt: skip
    lines = [
        [
            Path(theirs["graph"]).stem, f"{theirs['share']:.0%}",
            f"{theirs['published_percent']:g} %, {theirs['published_s']:g} s",
            f"none in {theirs['time_limit_s']:g} s" if theirs["overhead"] is None else f"{theirs['overhead']:.2%}",
            "" if theirs["found_s"] is None else f"{theirs['found_s']:.1f} s",
            f"{ours['overhead']:.2%}", f"{ours['found_s']:.1f} s", f"{ours['gap']:.2%}",
        ]
        for theirs, ours in pairs(rows)
    ]  # fmt: skip
    return Drawing(f"{made(rows, threads='threads')}.\n\n{markdown_table(heads, lines)}")
