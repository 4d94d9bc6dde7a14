"""The last part of the page: how to repeat a run, and where its numbers come from."""

from __future__ import annotations

import json
import shlex
from html import escape
from typing import Any

from analysis import html_page
from analysis.results import Frame, Run, distinct
from analysis.scales import show_mapping
from remat.incumbent import GAP_TOLERANCE
from remat.units import format_size

COMMAND_KEYS = (  # the keys of the configuration that a command gives
    "graph", "model", "gpu", "cost", "experiment", "budget", "strategies", "points", "time_limit", "seed", "threads",
    "scope", "accounting", "batch_size", "granularity", "input_size", "target", "dtype", "device", "work_limit",
    "deterministic", "solver", "formulation", "target_gap",
)  # fmt: skip
USUAL = {"deterministic": False, "target_gap": GAP_TOLERANCE}  # values that a command leaves out


def how_to_repeat(run: Run) -> str:
    """The commands that repeat and redraw the run."""
    return (
        f"<pre>{escape(command_of(run.info))}</pre>"
        "<p>Finished solves are not repeated. To redraw from the store:</p>"
        f"<pre>{escape('python -m analysis ' + shlex.quote('runs/' + run.folder.name))}</pre>"
    )


def command_of(info: dict[str, Any]) -> str:
    """The command that repeats a run, made from its configuration."""
    words = ["python", "run.py"]
    config = info.get("config") or {}
    for key in COMMAND_KEYS:
        value = config.get(key)
        if key == "model" and config.get("graph"):
            continue
        if isinstance(value, dict):
            value = value.get("name")
        if isinstance(value, list):
            value = f"[{','.join(map(str, value))}]" if value else None
        if value not in (None, "") and value != USUAL.get(key):
            words.append(f"{key}={value}")
    for strategy, options in (config.get("options") or {}).items():
        words += [f"options.{strategy}.{name}={value}" for name, value in options.items()]
    return shlex.join(words)


def provenance(run: Run) -> str:
    """Where the numbers come from: code, versions, machine, cost model, GPU figures."""
    rows = run.rows
    facts: list[tuple[str, str]] = []
    if run.graph is not None:
        facts += [("Graph", run.graph.name), ("Graph SHA-256", run.graph.sha256()), ("Graph source", run.graph.source)]

    def column(name: str) -> str:
        return ", ".join(distinct(rows, name))

    dirty = "git_dirty" in rows and rows["git_dirty"].fillna(False).astype(bool).any()
    facts.append(("Code", column("git_commit") + (" with uncommitted changes" if dirty else "")))
    facts += [("Versions", show_mapping(versions, " ")) for versions in distinct(rows, "versions")]
    costs = f"{column('cost_model')} ({column('cost_source')}), unit {run.cost_unit}" if len(rows) else ""
    facts += [
        ("CPU", column("cpu")), ("Costs", costs),
        ("Solver builds", column("solver_build")), ("Time limit per solve", _seconds_list(rows)),
        ("Seeds", column("seed")), ("Threads", column("threads")),
        ("Last result", column("finished_at").split(", ")[-1]),
    ]  # fmt: skip
    for key, value in (run.info.get("gpu") or {}).items():
        if key == "memory_bytes" and isinstance(value, int):
            value = format_size(value)
        facts.append(
            (f"GPU {str(key).replace('_', ' ')}", json.dumps(value) if isinstance(value, dict) else str(value))
        )
    config = json.dumps(run.info.get("config") or {}, indent=2, sort_keys=True, default=str)
    return (
        f"{html_page.facts(facts)}<details><summary>Whole configuration</summary><pre>{escape(config)}</pre></details>"
    )


def _seconds_list(rows: Frame) -> str:
    return ", ".join(f"{v:g} s" for v in sorted(set(rows["time_limit_s"].dropna()))) if "time_limit_s" in rows else ""
