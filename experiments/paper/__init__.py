"""``experiment=paper``: every figure and table of Checkmate (Jain et al., MLSys 2020), beside the published numbers.

See `experiments.parts` for the meaning of a part; `analysis.paper` draws the parts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from experiments.arguments import names_of
from experiments.config import group_options
from experiments.paper import cost_models, fig5, fig6, memory, rounding, solver_time, stages, throughput
from experiments.paper.graphs import Context, Scale, extract_all
from experiments.paper.networks import NETWORKS, Network, network
from experiments.parts import Paper, Part
from experiments.settings import Settings, configured_model
from remat.errors import InvalidInput

PARTS: dict[str, Part] = {  # table2 and claims solve nothing: their pages read the rows of other parts
    "fig5": fig5.run, "fig6": fig6.run, "throughput": throughput.run, "table2": lambda _: {"from": "fig5"},
    "stages": stages.run, "rounding": rounding.run, "solver_time": solver_time.run, "memory": memory.run,
    "cost_models": cost_models.run, "claims": lambda _: {"from": ["fig5", "fig6"]},
}  # fmt: skip
NEEDS = {"table2": ("fig5",), "claims": ("fig5", "fig6")}
PER_SAMPLE = {"fig6", "throughput", "memory", "cost_models"}  # these parts need graphs of one and two samples
QUICK = Scale(
    points=5, time_limit_s=3.0, rounding_s=3.0, samples=60, naive_samples=5_000, solver_points=1,
    unpartitioned_s=40.0, batches=2, refinements=0, price_limit_s=4.0, sizes=6,
)  # fmt: skip
STUDY = Scale(
    points=10, time_limit_s=30.0, rounding_s=300.0, samples=1000, naive_samples=50_000, solver_points=3,
    unpartitioned_s=600.0, batches=4, refinements=1, price_limit_s=60.0, sizes=10,
)  # fmt: skip
FULL = Scale(
    points=16, time_limit_s=3600.0, rounding_s=3600.0, samples=1000, naive_samples=50_000, solver_points=4,
    unpartitioned_s=7200.0, batches=6, refinements=2, price_limit_s=3600.0, sizes=12,
)  # fmt: skip


def run_paper(cfg: DictConfig, settings: Settings, console: Console, folder: Path) -> int:
    """Run and draw the parts that the configuration names; the exit code, see `experiments.parts.Paper.run`."""
    names = names_of("network", NETWORKS if cfg.networks is None else cfg.networks, group_options("model"))
    networks = tuple(map(_keras_network, names))
    scale = replace(FULL, points=cfg.points, time_limit_s=cfg.time_limit, rounding_s=cfg.time_limit)
    less = {"study": STUDY, "quick": QUICK}.get(cfg.scale)
    if less is not None:
        scale = replace(
            less, points=min(cfg.points, less.points), time_limit_s=min(cfg.time_limit, less.time_limit_s),
            rounding_s=min(cfg.time_limit, less.rounding_s),
        )  # fmt: skip
    settings = replace(settings, points=scale.points, time_limit_s=scale.time_limit_s)
    paper = Paper("paper", PARTS, NEEDS, _extract, _draw)
    return paper.run(cfg, settings, scale, networks, console, folder)


def _draw(folder: Path) -> list[Path]:
    from analysis.paper import draw_paper  # late, because seaborn takes a second that would delay error messages

    return draw_paper(folder)


def _extract(context: Context, parts: Collection[str]) -> None:
    if {*parts} - {"stages"}:
        extract_all(context, per_sample=not PER_SAMPLE.isdisjoint(parts))


def _keras_network(name: str) -> Network:
    """The network of that name.

    Raises:
        InvalidInput: it is not built by Keras layers.
    """
    known = network(name)
    spec = configured_model(known.name)
    if spec.framework != "synthetic" and (spec.framework, spec.granularity) != ("keras", "layer"):
        raise InvalidInput(f"networks: '{name}' is not built by Keras layers; the paper's parts need that")
    return known
