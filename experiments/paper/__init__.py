"""``experiment=paper``: every figure and table of Checkmate (Jain et al., MLSys 2020), beside the published numbers.

A part is a module with ``run(lab)``, which solves through the store and returns what its drawing needs; that is
written to ``<part>.json`` in the run's folder as soon as the part has finished. `analysis.paper` draws it.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from analysis.paper import draw_paper
from experiments.config import as_dict
from experiments.engines import make_engine
from experiments.paper import claims, cost_models, fig5, fig6, memory, rounding, solver_time, stages, table2, throughput
from experiments.paper.lab import Lab, Scale, instances_folder
from experiments.paper.networks import NETWORKS, Network, network
from experiments.parts import asked_parts, draw_and_say, run_parts
from experiments.progress import SolveProgress, duration
from experiments.provenance import provenance
from experiments.settings import RUNS_FOLDER, Settings, configured_model
from experiments.solving import contradictions
from experiments.store import Store, write_json
from remat.errors import InvalidInput

PARTS = {
    "fig5": fig5.run,
    "fig6": fig6.run,
    "throughput": throughput.run,
    "table2": table2.run,
    "stages": stages.run,
    "rounding": rounding.run,
    "solver_time": solver_time.run,
    "memory": memory.run,
    "cost_models": cost_models.run,
    "claims": claims.run,
}
NEEDS = {"table2": ("fig5",), "claims": ("fig5", "fig6")}
PER_SAMPLE = {"fig6", "throughput", "memory", "cost_models"}  # ask for graphs of one or two samples
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
    parts = asked_parts(cfg.parts, PARTS, NEEDS)
    if cfg.scale == "quick":
        scale = replace(
            QUICK, points=min(cfg.points, QUICK.points), time_limit_s=min(cfg.time_limit, QUICK.time_limit_s)
        )
    else:
        scale = replace(FULL, points=cfg.points, time_limit_s=cfg.time_limit)
    networks = _networks(cfg)
    settings = replace(settings, points=scale.points, time_limit_s=scale.time_limit_s)
    store = Store(RUNS_FOLDER / "store")
    folder.mkdir(parents=True, exist_ok=True)
    _write_head(cfg, scale, folder)
    engine = make_engine(settings.engine, settings.jobs, settings.threads, settings.address)
    with engine, SolveProgress(console, engine.at_once) as progress:
        lab = Lab(cfg, settings, scale, networks, instances_folder(cfg), store, engine, progress,
                  console, folder)  # fmt: skip
        if {*parts} - {"stages"}:
            lab.extract_all(per_sample=not PER_SAMPLE.isdisjoint(parts))
        documents = run_parts(PARTS, parts, lab)
    refuted = [line for document in documents for line in document.get("contradicted", [])]
    refuted += [line for bench in lab.benches for line in contradictions(list(bench.kept.values()))]
    lab.say(f"{progress.n_finished} solved now, in {duration(time.monotonic() - began)}")
    return draw_and_say(draw_paper, lab, refuted)


def _networks(cfg: DictConfig) -> tuple[Network, ...]:
    """The networks asked for, each once.

    Raises:
        InvalidInput: none, an unknown one, or one that is not built by layers.
    """
    names = list(dict.fromkeys(NETWORKS if cfg.networks is None else map(str, cfg.networks)))
    if not names:
        raise InvalidInput("networks= is empty; leave it away for the paper's")
    for name in names:
        known = network(name)
        spec = configured_model(known.name)
        if spec.framework != "synthetic" and (spec.framework, spec.granularity) != ("keras", "layer"):
            raise InvalidInput(f"networks: '{name}' is not built by Keras layers; the paper's parts need that")
    return tuple(map(network, names))


def _write_head(cfg: DictConfig, scale: Scale, folder: Path) -> None:
    head = {"experiment": "paper", "config": as_dict(cfg), "scale": asdict(scale), "provenance": asdict(provenance()),
            "cores": os.cpu_count()}  # fmt: skip
    write_json(folder / "paper.json", head)
