"""MOCCASIN by its own method on its published graphs, beside the published values and the portfolio."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.published import PUBLISHED
from experiments.documents import Column, Drawing, made, table_of
from experiments.measure_solve import graph_of, share_of_peak, solve_case
from experiments.registry import Case, Row, experiment

STRATEGIES = ("moccasin", "portfolio")
# [graph, share of the peak] limit of the solve in seconds
LIMITS_S = {
    ("layered_n100", 0.9): 60.0, ("layered_n100", 0.8): 60.0,
    ("layered_n250", 0.9): 300.0, ("layered_n250", 0.8): 900.0,
}  # fmt: skip


@experiment(page="results/leaderboard.md")
def rivals(threads: int = 2) -> Iterator[Case]:
    """MOCCASIN on its published graphs, beside the published values and the portfolio (REMAT_INSTANCES has them)."""
    for (name, share), limit_s in LIMITS_S.items():
        graph, published = graph_of(file := f"layered/{name}.json"), PUBLISHED["layered"][name][share]
        for strategy in STRATEGIES:
            yield solve_case(
                file, graph, strategy, share_of_peak(graph, share), time_limit_s=limit_s, threads=threads,
                share=share, published_percent=published["fixed_order"], published_s=published["seconds"],
            )  # fmt: skip


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """(MOCCASIN's row, the portfolio's) of each published value that has both."""
    found = {(row["graph_name"], row["share"], row["strategy"]): row for row in rows}
    both = [tuple(found.get((*case, strategy)) for strategy in STRATEGIES) for case in LIMITS_S]
    return [(theirs, ours) for theirs, ours in both if theirs is not None and ours is not None]


COLUMNS: Sequence[tuple[str, Column]] = (
    ("graph", lambda both: Path(both["theirs"]["graph"]).stem), ("budget", "{theirs[share]:.0%}"),
    ("published: overhead, seconds (16 workers)", "{theirs[published_percent]:g} %, {theirs[published_s]:g} s"),
    ("`moccasin`", lambda both: "none in {time_limit_s:g} s".format(**both["theirs"])
     if both["theirs"]["overhead"] is None else f"{both['theirs']['overhead']:.2%}"),
    ("its last plan after", "{theirs[found_s]:.1f} s"), ("portfolio", "{ours[overhead]:.2%}"),
    ("its last plan after", "{ours[found_s]:.1f} s"), ("its gap", "{ours[gap]:.2%}"),
)  # fmt: skip


@rivals.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each published value."""
    table = table_of([{"theirs": theirs, "ours": ours} for theirs, ours in pairs(rows)], COLUMNS)
    return Drawing(f"{made(rows, threads='threads')}.\n\n{table}")
