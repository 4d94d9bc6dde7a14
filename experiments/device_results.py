"""``python -m experiments.device_results --device cuda``: every result that this project shows for a device.

For each network the figure with other methods (`experiments.execution`) and the largest trainable batch, plain and
rematerialized; then the measured costs of all operations, so that ``cost=profile gpu=<device>`` works on machines
without the device. Results go to ``results/<device>/``. Rows are stored as they come, so that an interrupted run
continues when it is started again.
"""

from __future__ import annotations

import datetime
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from analysis.execution import draw_execution
from experiments.arguments import Parser, argument, names, one_of, run, seconds
from experiments.execution import execute, job_of
from experiments.settings import RUNS_FOLDER
from experiments.steps.launch import COST_CACHE, measured
from experiments.steps.row import as_json
from experiments.steps.table import REMARK, terminal_table
from experiments.steps.torch_sizes import ON_A_CPU, ON_A_GPU, devices_here, resized, torch_model, torch_names
from experiments.store import write_json
from remat.cost.profile import DEVICES, provenance_of
from remat.cost.stored import RESULTS_FOLDER, store
from remat.errors import InvalidInput
from remat.torch.planner import default_gpu
from remat.units import parse_size

COLUMNS = ("method", "batch", "predicted MB", "measured MB", "samples/s", REMARK)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m experiments.device_results", description="every result shown for a device")
    parser.add_argument("--device", type=argument(_device), default="cuda", help="cpu or cuda (default: cuda)")
    parser.add_argument("--models", type=names("model", torch_names), default=tuple(ON_A_GPU), help="comma-separated")
    parser.add_argument(
        "--memory", type=argument(parse_size),
        help="limit for the largest batches, e.g. 8GB; the device's memory by default",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds")
    parser.add_argument("--time-limit", type=seconds, default=30.0, help="seconds per plan")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder of the devices' folders")
    given = parser.parse_args(arguments)
    if given.device == "cpu" and not given.memory:
        raise InvalidInput("--device cpu needs --memory, e.g. 500MB: to fill the machine's memory would take a day")
    gpu = default_gpu(given.device).name
    console, out = Console(), given.out / gpu
    for name in given.models:
        spec = resized(torch_model(name), ON_A_CPU if given.device == "cpu" else ON_A_GPU)
        job = job_of(spec, given.device, quick=given.quick, time_limit_s=given.time_limit)
        torch.set_num_threads(job.threads)  # costs on a CPU are stored with the number of threads
        folder = RUNS_FOLDER / f"device_{gpu}_{name}"
        run = execute(job, folder, console)
        batches = replace(job, peers=False, fractions=(), largest_batches=True, capacity_bytes=given.memory)
        rows = measured(batches, folder / "batches", console)
        console.print(terminal_table(rows, COLUMNS))
        run["largest_batches"] = as_json(rows)
        date = datetime.date.today().isoformat()
        write_json(out / f"{date}_{name}.json", run | {"date": date})
        for path in draw_execution(folder):
            if path.suffix == ".png":
                shutil.copy(path, out / f"{date}_{name}.png")
    console.print(f"costs    {store(COST_CACHE, gpu, provenance_of(given.device), given.out)}", markup=False)


def _device(given: str) -> str:
    (device,) = devices_here(one_of("device", given, DEVICES))
    return device


if __name__ == "__main__":
    run(main)
