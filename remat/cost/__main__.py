"""``python -m remat.cost``: the known devices; with ``--measure-cpu`` the rates of the CPU at hand."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from remat.cost.gpu import Gpu, gpus, load_gpu


def measure_cpu(threads: int | None = None) -> Gpu:
    """This machine's CPU: matrix product, triad over arrays far larger than the caches, smallest call.

    The rates are achieved ones, so every efficiency but normalization's and pooling's is 1 by construction.
    """
    import torch

    torch.set_num_threads(threads or os.cpu_count() or 1)
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
    """Shortest of several runs after one warm-up: a rate is what the machine can do undisturbed."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m remat.cost", description=__doc__)
    parser.add_argument("--measure-cpu", action="store_true", help="measure this CPU and print its conf/gpu entry")
    if not parser.parse_args().measure_cpu:
        for name in gpus():
            print(load_gpu(name))
        return
    gpu = measure_cpu()
    print(f"name: {gpu.name}\nmemory_bytes: {gpu.memory_bytes}")
    print(f"bandwidth_bytes_per_s: {gpu.bandwidth_bytes_per_s:.3g}\nlaunch_overhead_s: {gpu.launch_overhead_s:.2g}")
    print("peak_flops:", *(f"  {dtype}: {rate:.3g}" for dtype, rate in gpu.peak_flops.items()), sep="\n")


if __name__ == "__main__":
    main()
