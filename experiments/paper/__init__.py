"""``experiment=paper``: every figure and table of Checkmate (Jain et al., MLSys 2020), beside the published numbers.

A part is a module with ``run(lab)``, which solves through the store and returns what its drawing needs; that is
written to ``<part>.json`` in the run's folder as soon as the part has finished. `analysis.paper` draws it.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from experiments.config import as_dict
from experiments.engine import make_engine
from experiments.paper.lab import Lab, Scale, instances_folder
from experiments.paper.networks import NETWORKS, network
from experiments.progress import SolveProgress, duration
from experiments.provenance import provenance
from experiments.settings import RUNS_FOLDER, Settings
from experiments.solving import contradictions
from experiments.store import Store, write_json
from remat.errors import unknown_name

PARTS = ("fig5", "fig6", "throughput", "table2", "stages", "rounding", "solver_time", "memory", "cost_models", "claims")
NEEDS = {"table2": ("fig5",), "claims": ("fig5", "fig6")}
QUICK = Scale(
    points=5, time_limit_s=3.0, samples=60, naive_samples=5_000, solver_points=1, unpartitioned_s=40.0, batches=2,
    refinements=0, price_limit_s=4.0, sizes=6,
)  # fmt: skip
FULL = Scale(
    points=16, time_limit_s=3600.0, samples=1000, naive_samples=50_000, solver_points=4, unpartitioned_s=7200.0,
    batches=6, refinements=2, price_limit_s=3600.0, sizes=12,
)  # fmt: skip


def run_paper(cfg: DictConfig, settings: Settings, console: Console, folder: Path) -> int:
    """Run the parts asked for, draw everything that the folder holds; the exit code: 1 if a claim was refuted."""
    began = time.monotonic()
    parts = _parts(cfg)
    if cfg.scale == "quick":
        scale = replace(
            QUICK, points=min(cfg.points, QUICK.points), time_limit_s=min(cfg.time_limit, QUICK.time_limit_s)
        )
    else:
        scale = replace(FULL, points=cfg.points, time_limit_s=cfg.time_limit)
    names = tuple(NETWORKS) if cfg.networks is None else [str(name) for name in cfg.networks]
    settings = replace(settings, points=scale.points, time_limit_s=scale.time_limit_s)
    store = Store(RUNS_FOLDER / "store")
    folder.mkdir(parents=True, exist_ok=True)
    _write_head(cfg, scale, folder)
    engine = make_engine(settings.engine, settings.jobs, settings.threads, settings.address)
    with engine, SolveProgress(console, engine.at_once) as progress:
        lab = Lab(cfg, settings, scale, tuple(map(network, names)), instances_folder(cfg), store, engine, progress,
                  console, folder)  # fmt: skip
        if {*parts} - {"stages"}:
            lab.extract_all()
        refuted = []
        for part in parts:
            lab.say(f"--- {part}")
            document = importlib.import_module(f"experiments.paper.{part}").run(lab)
            refuted += document.get("contradicted", [])
            write_json(folder / f"{part}.json", document)
    refuted += [line for bench in lab.benches for line in contradictions(list(bench.kept.values()))]
    took = f"{progress.n_finished} solved now, in {duration(time.monotonic() - began)}"
    lab.say(took)
    _write_head(cfg, scale, folder, took)
    from analysis.paper import draw_paper

    with console.status("drawing ..."):
        drawn = draw_paper(folder)
    for what, ending in (("tables", ".csv"), ("figures", ".pdf"), ("page", ".html")):
        for path in sorted({path if ending == ".html" else path.parent for path in drawn if path.suffix == ending}):
            lab.say(f"{what:<8} {path}")
    for line in dict.fromkeys(refuted):
        lab.say(f"error: contradicted: {line}")
    return 1 if refuted else 0


def _parts(cfg: DictConfig) -> list[str]:
    """The parts asked for, each after what it needs."""
    asked = list(PARTS) if cfg.parts is None else [str(part) for part in cfg.parts]
    for part in asked:
        if part not in PARTS:
            raise unknown_name("part", part, PARTS)
    wanted = {need for part in asked for need in NEEDS.get(part, ())} | set(asked)
    return [part for part in PARTS if part in wanted]


def _write_head(cfg: DictConfig, scale: Scale, folder: Path, took: str = "") -> None:
    head = {"experiment": "paper", "config": as_dict(cfg), "scale": asdict(scale), "provenance": asdict(provenance()),
            "cores": os.cpu_count(), "took": took}  # fmt: skip
    write_json(folder / "paper.json", head)
