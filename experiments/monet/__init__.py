"""``experiment=paper/monet``: MONeT (Shah et al., ICLR 2021) reproduced, beside the published numbers.

See `experiments.parts` for the meaning of a part; `analysis.monet` draws the parts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from experiments.arguments import names_of
from experiments.monet import ablation, implementations, overhead, records, ten_percent
from experiments.monet.cases import Context, Scale, published_graph
from experiments.monet.published import NETWORKS
from experiments.parts import Paper, Part
from experiments.settings import Settings, for_implementations
from remat.errors import InvalidInput

PARTS: dict[str, Part] = {
    "overhead": overhead.run, "ablation": ablation.run, "ten_percent": ten_percent.run,
    "solver_time": overhead.solver_times, "records": records.run, "implementations": implementations.run,
}  # fmt: skip
NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("ten_percent", "solver_time", "implementations"), ("overhead",))
QUICK = Scale(time_limit_s=5.0, joint_factor=1.6, all_budgets=False, ablation_budgets=1, monet_columns=10_000,
              halvings=3)  # fmt: skip
STUDY = Scale(time_limit_s=30.0, joint_factor=1.0, all_budgets=True, ablation_budgets=3, monet_columns=100_000,
              halvings=4)  # fmt: skip
FULL = Scale(time_limit_s=300.0, joint_factor=1.0, all_budgets=True, ablation_budgets=6, monet_columns=1_000_000,
             halvings=6)  # fmt: skip


def run_monet(cfg: DictConfig, settings: Settings, console: Console, folder: Path) -> int:
    """Run and draw the parts that the configuration names; the exit code, see `experiments.parts.Paper.run`."""
    _refuse_unused_settings(settings)
    ablation.levels_of(cfg)  # refuses a mistyped level before anything runs
    names = names_of("network", NETWORKS if cfg.networks is None else cfg.networks, NETWORKS)
    networks = tuple(NETWORKS[name] for name in names)
    less = {"study": STUDY, "quick": QUICK}.get(cfg.scale)
    limit = cfg.time_limit if less is None else min(cfg.time_limit, less.time_limit_s)
    scale = replace(less or FULL, time_limit_s=limit)
    settings = replace(for_implementations(cfg, settings), time_limit_s=limit)
    folder = folder.with_name(f"monet_{cfg.scale}_{folder.name.rpartition('_')[2]}")
    paper = Paper("paper/monet", PARTS, NEEDS, _introduce, _draw)
    return paper.run(cfg, settings, scale, networks, console, folder)


def _draw(folder: Path) -> list[Path]:
    from analysis.monet import draw_monet  # late, because seaborn takes a second that would delay error messages

    return draw_monet(folder)


def _introduce(context: Context, _: Collection[str]) -> None:
    for one in context.networks:
        published = published_graph(context, one) is not None
        costs = "published P100 costs" if published else f"roofline of {context.settings.gpu.name}"
        context.print(f"{one.label}, batch {one.batch}: {costs}")


def _refuse_unused_settings(settings: Settings) -> None:
    if settings.cost != "roofline":
        raise InvalidInput("experiment=paper/monet takes published P100 costs or the roofline's; leave out cost")
    if (settings.scope, settings.accounting) != ("staged", "exact"):
        raise InvalidInput("experiment=paper/monet compares staged plans, counted exactly; leave out scope, accounting")
