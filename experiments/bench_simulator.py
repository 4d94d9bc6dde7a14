"""``python -m experiments.bench_simulator``: seconds that the simulator needs for a plan of 100 000 steps."""

from __future__ import annotations

import time
import timeit
from collections.abc import Sequence

from experiments.arguments import Parser, count, run, seconds
from remat import Graph, Plan, simulate


def deep_plan(n_operations: int, n_steps: int) -> tuple[Graph, Plan]:
    """A chain with shortcuts, and a plan of about `n_steps` steps that recomputes a window before each operation."""
    deps = [sorted({max(i - 1, 0), max(i - 7, 0)} - {i}) for i in range(n_operations)]
    graph = Graph.from_nodes(
        "bench", deps, [1 + i % 97 for i in range(n_operations)], [1 + i % 13 for i in range(n_operations)]
    )
    window = max(0, (n_steps // 2 - n_operations) // n_operations)
    order = [j for i in range(n_operations) for j in range(max(0, i - window), i + 1)]
    return graph, Plan.from_order(graph, order)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the fastest of five runs; exit status 1 if it is slower than ``--limit-s``."""
    parser = Parser(prog="python -m experiments.bench_simulator", description=__doc__)
    parser.add_argument("--steps", type=count, default=100_000)
    parser.add_argument("--operations", type=count, default=1000)
    parser.add_argument("--limit-s", type=seconds, default=1.0, help="fail if the fastest run takes longer")
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    graph, plan = deep_plan(given.operations, given.steps)
    built_s = time.perf_counter() - began
    trace = simulate(graph, plan)
    best_s = min(timeit.repeat(lambda: simulate(graph, plan), number=1, repeat=5))
    print(
        f"{len(plan.ids):,} steps ({plan.n_computations:,} computations) on {len(graph):,} operations: simulate "
        f"{best_s:.3f} s (best of 5), made in {built_s:.2f} s; cost {trace.cost}, peak {trace.peak_bytes} B"
    )
    if best_s > given.limit_s:
        raise SystemExit(f"slower than {given.limit_s} s")


if __name__ == "__main__":
    run(main)
