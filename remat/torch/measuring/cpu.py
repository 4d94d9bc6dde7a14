"""This CPU's rates, in the form of ``remat/cost/gpus/cpu.json``: ``python -m remat.torch.measuring.cpu``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from remat.cost.gpu import Gpu


def measure_cpu() -> Gpu:
    """This machine's CPU: matrix product, triad over arrays far larger than the caches, smallest call.

    The rates are achieved ones, so that every efficiency but normalization's and pooling's is 1 by construction.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    peak = {}
    for dtype in (torch.float32, torch.float64):
        n = 2048
        a, b = torch.rand(n, n, dtype=dtype), torch.rand(n, n, dtype=dtype)
        peak[str(dtype).removeprefix("torch.")] = 2 * n**3 / _best_s(lambda a=a, b=b: torch.mm(a, b))
    x, y, out = (torch.ones(2**25) for _ in range(3))  # 128 MiB each
    moved = 3 * x.numel() * x.element_size()
    bandwidth = moved / _best_s(lambda: torch.add(x, y, out=out))
    one = torch.ones(1)
    launch = _best_s(lambda: [torch.add(one, one) for _ in range(1000)]) / 1000
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpu("cpu", memory, bandwidth, launch, peak)


def _best_s(run: Callable[[], object], repeats: int = 7) -> float:
    """Shortest time of several runs after one warm-up, because rates are those of the undisturbed machine."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    measured = {name: value for name, value in asdict(measure_cpu()).items() if name != "efficiency"}
    print(json.dumps(measured, indent=2))
