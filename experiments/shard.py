"""Promised and measured peaks of the ranks of a sharded step, see docs/results/shard.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.table import made


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


@shard.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each rank and budget."""
    heads = ["ranks", "rank", "budget MB", "promised MB", "measured: bytes below", "plain: promised MB",
             "plain, measured: bytes below", "overhead", "gathered", "gradients"]  # fmt: skip
    in_order = sorted(rows, key=lambda row: (row["ranks"], row["rank"], -row["share"]))
    return Drawing(f"{made(rows, 'torch')}.\n\n{markdown_table(heads, map(_cells, in_order))}")


def _cells(row: Row) -> list[str]:
    differ = row["gradients_differ"]
    below, plain_below = (
        f"{row[f'{which}predicted_bytes'] - row[f'{which}measured_bytes']:,}" for which in ("", "plain_")
    )
    return [
        str(row["ranks"]), str(row["rank"]), _mb(row["budget_bytes"]), _mb(row["predicted_bytes"]), below,
        _mb(row["plain_predicted_bytes"]), plain_below, f"{row['overhead']:.1%}", str(row["gathered"]),
        f"{differ:.0e}" if differ else "same bits",
    ]  # fmt: skip


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.3f}"
