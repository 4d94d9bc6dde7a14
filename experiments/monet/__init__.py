"""``experiment=paper/monet``: MONeT (Shah et al., ICLR 2021) reproduced, beside the published numbers.

A part is a module with ``run(desk)``, which solves through the store and returns what its drawing needs; that is
written to ``<part>.json`` in the run's folder as soon as the part has finished. `analysis.monet` draws it.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from analysis.monet import draw_monet
from experiments.config import as_dict
from experiments.engines import make_engine
from experiments.monet import ablation, implementations, overhead, records, solver_time, ten_percent
from experiments.monet.desk import Desk, Scale
from experiments.monet.published import NETWORKS, Network, network
from experiments.paper.lab import instances_folder
from experiments.parts import asked_parts, draw_and_say, run_parts
from experiments.progress import SolveProgress, duration
from experiments.provenance import provenance
from experiments.settings import RUNS_FOLDER, Settings, for_implementations
from experiments.solving import contradictions
from experiments.store import Store, write_json
from remat.errors import InvalidInput, unknown_name
from remat.frontends.monet import LEVELS

PARTS = {
    "overhead": overhead.run,
    "ablation": ablation.run,
    "ten_percent": ten_percent.run,
    "solver_time": solver_time.run,
    "records": records.run,
    "implementations": implementations.run,
}
NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("ten_percent", "solver_time", "implementations"), ("overhead",))
QUICK = Scale(time_limit_s=5.0, joint_factor=1.6, all_budgets=False, ablation_budgets=1, monet_columns=10_000,
              halvings=3)  # fmt: skip
FULL = Scale(time_limit_s=300.0, joint_factor=1.0, all_budgets=True, ablation_budgets=6, monet_columns=1_000_000,
             halvings=6)  # fmt: skip


def run_monet(cfg: DictConfig, settings: Settings, console: Console, folder: Path) -> int:
    """Run the parts asked for, draw everything that the folder holds; the exit code: 1 if a claim was refuted."""
    began = time.monotonic()
    parts, networks, levels = asked_parts(cfg.parts, PARTS, NEEDS), _networks(cfg), _levels(cfg)
    _refuse_what_is_not_read(cfg, settings)
    settings = for_implementations(cfg, settings)
    scale = QUICK if cfg.scale == "quick" else FULL
    limit = min(cfg.time_limit, QUICK.time_limit_s) if cfg.scale == "quick" else cfg.time_limit
    scale = replace(scale, time_limit_s=limit)
    folder = folder.with_name(f"monet_{cfg.scale}_{folder.name.rpartition('_')[2]}")
    folder.mkdir(parents=True, exist_ok=True)
    head = {"experiment": "paper/monet", "config": as_dict(cfg), "scale": asdict(scale),
            "provenance": asdict(provenance()), "cores": os.cpu_count()}  # fmt: skip
    write_json(folder / "monet.json", head)
    engine = make_engine(settings.engine, settings.jobs, settings.threads, settings.address)
    with engine, SolveProgress(console, engine.at_once) as progress:
        desk = Desk(
            replace(settings, time_limit_s=limit), scale, networks, levels, instances_folder(cfg),
            Store(RUNS_FOLDER / "store"), engine, progress, console, folder,
        )  # fmt: skip
        _introduce(desk)
        run_parts(PARTS, parts, desk)
    benches = [bench for bench in desk.benches.values() if bench.cost_cap is None]
    refuted = [line for bench in benches for line in contradictions(list(bench.kept.values()))]
    desk.say(f"{progress.n_finished} solved now, in {duration(time.monotonic() - began)}")
    return draw_and_say(draw_monet, desk, refuted)


def _introduce(desk: Desk) -> None:
    for one in desk.networks:
        published = desk.published_graph(one) is not None
        costs = "published P100 costs" if published else f"roofline of {desk.settings.gpu.name}"
        desk.say(f"{one.label}, batch {one.batch}: {costs}")


def _networks(cfg: DictConfig) -> tuple[Network, ...]:
    names = list(dict.fromkeys(NETWORKS if cfg.networks is None else map(str, cfg.networks)))
    if not names:
        raise InvalidInput("networks= is empty; leave it away for the five of MONeT")
    return tuple(map(network, names))


def _levels(cfg: DictConfig) -> tuple[str, ...]:
    """Levels of the ablation, each once, in their order."""
    asked = list(LEVELS) if cfg.levels is None else list(map(str, cfg.levels))
    for level in asked:
        if level not in LEVELS:
            raise unknown_name("level of implementations", level, LEVELS)
    if not asked:
        raise InvalidInput("levels= is empty; leave it away for all of them")
    return tuple(level for level in LEVELS if level in asked)


def _refuse_what_is_not_read(cfg: DictConfig, settings: Settings) -> None:
    for key in ("graph", "batch_size", "input_size", "granularity"):
        if cfg[key] is not None:
            raise InvalidInput(f"experiment=paper/monet has networks and batches of its own; leave {key} away")
    if settings.cost != "roofline":
        raise InvalidInput("experiment=paper/monet has published P100 costs or the roofline's; leave cost away")
    if (settings.scope, settings.accounting) != ("staged", "exact"):
        raise InvalidInput("experiment=paper/monet compares staged plans, counted exactly; leave scope and accounting")
