"""``make explain``: what ``rt.explain`` says of large models on an H100, in what time, and whether it is true on a CPU.

The check: a small model is explained for this CPU and a budget. Each batch that it calls the largest is trained within
the budget, and the next one is tried too. Finished models are kept, so that the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import remat.torch as rt
from experiments.arguments import Parser, one_name, output_file, run, seconds
from experiments.documents import DOCS, ROOT, Document, Drawing, markdown_table
from experiments.provenance import of_torch, torch_and_cpu
from experiments.store import write_json
from remat.cost import gpu_names
from remat.files import read_json
from remat.frontends.spec import load_target
from remat.torch.measure import peak_of_step
from remat.torch.planner import there_before

RESULTS = ROOT / "results" / "explain.json"
GPT2, LLAMA = "remat.torch.networks.transformer:gpt2", "remat.torch.networks.llama:llama"
ON_A_GPU: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 medium": (GPT2, {"batch_size": 8, "length": 1024, "width": 1024, "n_layers": 24, "n_heads": 16}),
    "Llama 7B": (LLAMA, {"batch_size": 1, "length": 4096, "dtype": "bfloat16"}),
    "Llama 7B, one of 8 ranks": (LLAMA, {"batch_size": 1, "length": 4096, "dtype": "bfloat16", "shard": 8}),
}
SMALL = {"batch_size": 4, "length": 128, "vocabulary": 1000, "width": 128, "n_layers": 4, "n_heads": 4}
ON_A_CPU: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "GPT-2, small": (GPT2, SMALL | {"context": 128}, "80MB"),
    "Llama, small": (LLAMA, SMALL | {"hidden": 344}, "80MB"),
}


def on_a_gpu(name: str, gpu: str) -> dict[str, Any]:
    """What a process of its own says, and the seconds that it takes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "told.json")
        command = [sys.executable, "-m", "experiments.explain", "--gpu", gpu, "--one", name, "--out", str(out)]
        began = time.monotonic()
        subprocess.run(command, cwd=ROOT, check=True)
        return {"gpu": gpu, "seconds": round(time.monotonic() - began, 1), **read_json(out)}


def _told(name: str, gpu: str) -> dict[str, Any]:
    target, options = ON_A_GPU[name]
    explained = rt.explain(target, gpu=gpu, **options)
    print(explained, flush=True)
    return {
        "operations": len(explained.graph), "budget_bytes": explained.budget_bytes,
        "plain_peak_bytes": explained.plain_peak_bytes, "least_bytes": explained.least_bytes,
        "overheads": {f"{share:.0%}": overhead for share, overhead in explained.overheads.items()},
        "largest": {
            what: {f"{overhead:.0%}": size for overhead, size in sizes.items()}
            for what, sizes in explained.largest.items()
        },
        "changes": dict(explained.changes),
    }  # fmt: skip


def on_a_cpu(name: str, limit_s: float) -> list[dict[str, Any]]:
    """Rows of batches that are said to be the largest within a budget, and of the next ones, trained."""
    target, options, budget = ON_A_CPU[name]
    explained = rt.explain(target, gpu="cpu", budget=budget, time_limit_s=limit_s, **options)
    rows = list[dict[str, Any]]()
    for overhead, size in explained.largest["batch"].items():
        for batch in () if size is None else (size, size + 1):
            trained = _trained(target, {**options, "batch_size": batch}, explained.budget_bytes, limit_s)
            rows.append({"overhead": overhead, "largest": size, "batch_size": batch, **trained})
            print(json.dumps({"model": name, **rows[-1]}), flush=True)
    return rows


def _trained(target: str, options: dict[str, Any], budget_bytes: int, limit_s: float) -> dict[str, Any]:
    """The peaks of the plain step and of one under a plan within the budget, and what the plan costs."""
    model, args = load_target(target)(**options)
    for x in args:
        x.random_(options["vocabulary"])
    planned = rt.rematerialize(
        model, args, budget_bytes, optimizer="adamw", strategy="search", cost="roofline", gpu="cpu",
        time_limit_s=limit_s,
    )  # fmt: skip
    there = there_before(planned.plan)
    return {
        "budget_bytes": budget_bytes, "plain_bytes": there + peak_of_step(model, args, {}, "cpu"),
        "promised_bytes": planned.plan.peak_bytes, "measured_bytes": there + peak_of_step(planned, args, {}, "cpu"),
        "cost": planned.plan.overhead,
    }  # fmt: skip


def draw(arguments: Sequence[str]) -> Drawing:
    """The tables of the page, from the stored results of ``make explain``."""
    stored = read_json(RESULTS)
    told = [_answers(name, row) for name, row in stored["answers"].items()]
    answers = markdown_table(["", *(name for name, _ in told)], _transposed([cells for _, cells in told]))
    heads = ["model", "overhead", "largest batch", "trained batch", "plain step", "under the plan", "budget", "cost"]
    checked = markdown_table(heads, [_checked(name, row) for name, rows in stored["checks"].items() for row in rows])
    where = f"{stored['date']}, PyTorch {stored['torch']}, {stored['cpu']}."
    return Drawing(f"{where}\n\n{answers}\n\n{checked}")


def _answers(name: str, row: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    cells = {
        "seconds to answer": f"{row['seconds']:.0f}", "operations": f"{row['operations']:,}",
        "budget": _gb(row["budget_bytes"]), "plain peak": _gb(row["plain_peak_bytes"]),
        "smallest budget": _gb(row["least_bytes"]),
    }  # fmt: skip
    for share, overhead in row["overheads"].items():
        cells[f"overhead at {share} of the peak"] = "no plan" if overhead is None else f"{overhead:.1%}"
    for what, sizes in row["largest"].items():
        cells |= {f"largest {what} at {overhead}": f"{size or 'none':,}" for overhead, size in sizes.items()}
    return name, cells | {f"change by {what}": f"{n_bytes / 1e9:+.2f} GB" for what, n_bytes in row["changes"].items()}


def _transposed(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "") for column in columns)] for name in names]


def _checked(name: str, row: Mapping[str, Any]) -> list[str]:
    return [
        name, f"{row['overhead']:.0%}", str(row["largest"]), str(row["batch_size"]), _mb(row["plain_bytes"]),
        _mb(row["measured_bytes"]), _mb(row["budget_bytes"]), f"{row['cost']:.2%}",
    ]  # fmt: skip


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.3f} MB"


DOCUMENT = Document("explain", DOCS / "results" / "explain.md", draw)


def main(arguments: list[str] | None = None) -> None:
    """Write the file of results, and print what is found."""
    parser = Parser(prog="python -m experiments.explain", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--gpu", type=one_name("gpu", gpu_names), default="h100")
    parser.add_argument(
        "--time-limit", type=seconds, default=2.0, help="to search for each plan of a check on this CPU"
    )
    parser.add_argument("--again", action="store_true", help="ask and check finished models too")
    parser.add_argument("--out", type=output_file, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # this process answers for one model
    chosen = parser.parse_args(arguments)
    if chosen.one:
        write_json(chosen.out, _told(chosen.one, chosen.gpu))
        return
    stored: dict[str, Any] = {"answers": {}, "checks": {}, "made": {}}
    if chosen.out.is_file():
        stored |= read_json(chosen.out)
    made = {"answers": torch_and_cpu() | {"gpu": chosen.gpu},
            "checks": torch_and_cpu() | {"time_limit_s": chosen.time_limit}}  # fmt: skip
    works = [("answers", name, lambda name=name: on_a_gpu(name, chosen.gpu)) for name in ON_A_GPU]
    works += [("checks", name, lambda name=name: on_a_cpu(name, chosen.time_limit)) for name in ON_A_CPU]
    for where, name, work in works:
        if chosen.again or stored["made"].get(f"{where}/{name}") != made[where]:
            stored[where][name] = work()
            stored["made"][f"{where}/{name}"] = made[where]
            stored |= of_torch()
            write_json(chosen.out, stored)


if __name__ == "__main__":
    run(main)
