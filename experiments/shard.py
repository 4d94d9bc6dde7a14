"""Promised and measured peaks of the ranks of a sharded step, see docs/results/shard.md."""

from collections.abc import Iterator, Mapping, Sequence

from experiments.documents import Column, Drawing, made, table_of
from experiments.registry import Case, Row, experiment


@experiment(page="results/shard.md")
def shard(
    ranks: Sequence[int] = (2, 3), shares: Sequence[float] = (0.95, 0.8, 0.65), layers: int = 4,
    time_limit_s: float = 4.0,
) -> Iterator[Case]:  # fmt: skip
    """A model divided over ranks by FSDP2 on this CPU: promised and measured peak of each rank."""
    for n in ranks:
        for share in shares:
            what = {"ranks": n, "share": share, "layers": layers, "time_limit_s": time_limit_s}
            yield Case("experiments.steps.shard_ranks.rows_of_ranks", what, on_this_machine=True)


COLUMNS: Mapping[str, Column] = {
    "ranks": "{ranks}", "rank": "{rank}", "budget MB": "{budget_bytes:.3f/MB}",
    "promised MB": "{predicted_bytes:.3f/MB}",
    "measured: bytes below": lambda row: f"{row['predicted_bytes'] - row['measured_bytes']:,}",
    "plain: promised MB": "{plain_predicted_bytes:.3f/MB}",
    "plain, measured: bytes below": lambda row: f"{row['plain_predicted_bytes'] - row['plain_measured_bytes']:,}",
    "overhead": "{overhead:.1%}", "gathered": "{gathered}",
    "gradients": lambda row: f"{row['gradients_differ']:.0e}" if row["gradients_differ"] else "same bits",
}  # fmt: skip


@shard.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each rank and budget."""
    in_order = sorted(rows, key=lambda row: (row["ranks"], row["rank"], -row["share"]))
    return Drawing(f"{made(rows, 'torch')}.\n\n{table_of(in_order, COLUMNS)}")
