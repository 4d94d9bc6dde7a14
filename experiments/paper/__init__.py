"""``experiment=paper``: every figure and table of Checkmate (Jain et al., MLSys 2020), beside the published numbers.

A part is a module with ``run(lab)``, which solves through the store and returns what its drawing needs; that is
written to ``<part>.json`` in the run's folder as soon as the part has finished. `analysis.paper` draws it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from experiments.config import as_dict
from experiments.engine import make_engine
from experiments.paper.lab import Lab, Scale, instances_folder
from experiments.paper.networks import NETWORKS, Network, network
from experiments.progress import SolveProgress, duration
from experiments.provenance import provenance
from experiments.settings import RUNS_FOLDER, Settings, configured_model
from experiments.solving import contradictions
from experiments.store import Store, write_json
from remat.errors import InvalidInput, unknown_name

PARTS = ("fig5", "fig6", "throughput", "table2", "stages", "rounding", "solver_time", "memory", "cost_models", "claims")
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
    parts = _parts(cfg)
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
        refuted = []
        for part in parts:
            lab.say(f"--- {part}")
            started, before = time.monotonic(), progress.n_finished
            document = importlib.import_module(f"experiments.paper.{part}").run(lab)
            refuted += document.get("contradicted", [])
            made = made_now(folder / f"{part}.json", time.monotonic() - started, progress.n_finished - before)
            write_json(folder / f"{part}.json", document | {"made": made})
    refuted += [line for bench in lab.benches for line in contradictions(list(bench.kept.values()))]
    lab.say(f"{progress.n_finished} solved now, in {duration(time.monotonic() - began)}")
    from analysis.paper import draw_paper

    with console.status("drawing ..."):
        drawn = draw_paper(folder)
    for what, ending in (("tables", ".csv"), ("figures", ".pdf"), ("page", ".html")):
        for path in sorted({path if ending == ".html" else path.parent for path in drawn if path.suffix == ending}):
            lab.say(f"{what:<8} {path}")
    for line in dict.fromkeys(refuted):
        lab.say(f"error: contradicted: {line}")
    return 1 if refuted else 0


def made_now(path: Path, seconds: float, solved: int) -> dict[str, Any]:
    """When a part was made, by which code and in what time: what stood there if nothing had to be solved now."""
    if not solved and path.is_file():
        with contextlib.suppress(ValueError, KeyError):
            return json.loads(path.read_text())["made"]
    source = provenance()
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": seconds, "solved": solved,
            "git_commit": source.git_commit, "git_dirty": source.git_dirty}  # fmt: skip


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


def _parts(cfg: DictConfig) -> list[str]:
    """The parts asked for, each after what it needs."""
    asked = list(PARTS) if cfg.parts is None else [str(part) for part in cfg.parts]
    for part in asked:
        if part not in PARTS:
            raise unknown_name("part", part, PARTS)
    wanted = {need for part in asked for need in NEEDS.get(part, ())} | set(asked)
    return [part for part in PARTS if part in wanted]


def _write_head(cfg: DictConfig, scale: Scale, folder: Path) -> None:
    head = {"experiment": "paper", "config": as_dict(cfg), "scale": asdict(scale), "provenance": asdict(provenance()),
            "cores": os.cpu_count()}  # fmt: skip
    write_json(folder / "paper.json", head)
