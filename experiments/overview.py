"""The first page of the results: recorded solves beside ours; what was claimed, reproduced, modelled and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis import figures
from analysis.charts import save_in_run
from analysis.figures import LABELS
from analysis.style import OURS
from experiments.compiled import steps_of
from experiments.documents import markdown_table
from experiments.dtr import networks_of
from experiments.registry import Row
from experiments.rivals import pairs
from experiments.settings import RUNS_FOLDER
from experiments.table import Table, made

HEADS = ("by", "what", "claimed", "reproduced", "modelled", "measured")
RECORDED = (("resnet50_b184", "5 GiB"), ("unet_b11", "5 GiB"), ("unet_b11", "6 GiB"))
FIGURE = "resnet50_records"


def claims(of_papers: Sequence[Sequence[str]]) -> str:
    """One table of what others claim, and of what is reproduced, modelled and measured here.

    Args:
        of_papers: more lines, of `HEADS`.
    """
    return markdown_table(HEADS, [*_recorded(), *of_papers, *_rivals(), *_online(), *_executed()], "llrrrr")


def figure() -> Path:
    """ResNet50 on the P100: recorded solves and ours."""
    return save_in_run(RUNS_FOLDER / "peers", FIGURE, figures.records, solves("resnet50_b184"))[0]


def solves(network: str) -> list[Row]:
    """The portfolio's shortest solve at each budget with a record, on a graph of the P100."""
    rows = [row for row in Table("solvers").rows() if row["instance"] == f"p100/{network}" and row["strategy"] == OURS]
    first = min(row["time_limit_s"] for row in rows)
    return [row for row in rows if row["time_limit_s"] == first]


def _recorded() -> Iterator[list[str]]:
    for network, budget in RECORDED:
        for row in solves(network):
            if row["budget"] == budget:
                model, _, batch = network.partition("_b")
                what = f"{LABELS[model]}, batch {batch}, {budget} of a P100: overhead, gap, seconds"
                yield ["Checkmate's MILP in Gurobi, 12 threads", what,
                       _solved(row["record_cost"], row["total_cost"], row["record_gap"], row["record_s"]), "",
                       _solved(row["cost"], row["total_cost"], row["gap"], row["wall_s"]), ""]  # fmt: skip


def _solved(cost: int, total: int, gap: float, seconds: float) -> str:
    return f"{cost / total - 1:.2%}, {gap:.3%}, {seconds:,.0f} s"


def _rivals() -> Iterator[list[str]]:
    for theirs, ours in pairs(Table("rivals").rows())[-1:]:
        what = f"{Path(theirs['graph']).stem}, {theirs['share']:.0%} of the peak: overhead, seconds to the plan"
        here = [f"{row['overhead']:.2%}, {row['found_s']:,.0f} s" for row in (theirs, ours)]
        yield [
            "MOCCASIN, 16 threads",
            what,
            f"{theirs['published_percent']:g}%, {theirs['published_s']:g} s",
            *here,
            "",
        ]


def _online() -> Iterator[list[str]]:
    name, network = next(iter(networks_of(Table("dtr").rows()).items()))
    row = network["rows"][-1]
    what = f"{name}, {row['ratio']:.0%} of its memory: step time / plain's"
    numbers = [f"{number:.3f}" for number in (row["online"]["exact"], row["offline"])]
    yield ["DTR, measured on a Titan V", what, f"{row['published']:g}", *numbers, ""]


def _executed() -> Iterator[list[str]]:
    """GPT-2 at the peak of checkpoints on every block, and the lowest peak of a compiled one."""
    rows = [row for row in Table("executed_steps").rows() if (row["steps"], row["model"]) == ("peers", "gpt2")]
    every = next(row for row in rows if row["method"] == "checkpoint_blocks")
    plain = next(row for row in rows if row["method"] == "plain")
    own = [row for row in rows if row["method"] == OURS and row["measured_peak_bytes"] <= every["measured_peak_bytes"]]
    best = min(own, key=lambda row: row["predicted_ns"])
    what = f"GPT-2 at {every['measured_peak_bytes'] / 1e6:.0f} MB: step time / plain's"
    yield ["PyTorch's checkpoints", what, "", "",
           f"{best['predicted_ns'] / plain['predicted_ns']:.3f}",
           f"{best['measured_ratio']:.3f}, theirs {every['measured_ratio']:.3f} ({made([best])})"]  # fmt: skip
    rows = steps_of(Table("compiled").rows())["gpt2"]
    lowest = {is_ours: min((row for row in rows if (row["variant"] == "remat") is is_ours),
                           key=lambda row: row["measured_bytes"]) for is_ours in (True, False)}  # fmt: skip
    theirs, ours = lowest[False], lowest[True]
    sizes = (ours["predicted_bytes"], ours["measured_bytes"], theirs["measured_bytes"])
    promised, mine, other = (f"{size / 1e6:.1f} MB" for size in sizes)
    yield ["PyTorch's memory budget", "GPT-2, compiled: lowest peak", "", "", promised,
           f"{mine}, theirs {other} ({made([ours])})"]  # fmt: skip
