"""Builds a run folder and its store as the harness writes them, with real plans of a small chain."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sweep_helpers import make_row

from experiments.store import Row, Store, write_json
from remat import Graph, Plan, simulate
from remat.search.greedy import greedy_eviction
from remat.simulator import plain_peak
from remat.solution import Family, Member

KB = 1000


def chain(length: int = 12, *, cost_unit: str = "ns") -> Graph:
    """A training step of a linear chain: forward 0..L-1, loss L, backward L+1..2L."""
    n = 2 * length + 1
    deps = [[k - 1, n - 1 - k] if k > length else [k - 1] if k else [] for k in range(n)]
    names = [f"layer{k}" if k < length else "loss" if k == length else f"grad{n - 1 - k}" for k in range(n)]
    return Graph.from_nodes(
        f"chain{length}_b1", deps, [(40 + 10 * (k % 3)) * KB for k in range(n)],
        [1_000_000 + 200_000 * (k % 4) for k in range(n)], names=names, backward=[k > length for k in range(n)],
        loss=length, fixed_bytes=100 * KB, cost_unit=cost_unit,
    )  # fmt: skip


def row(graph: Graph, strategy: str, budget: int, status: str, plan: Plan | None = None, **more: Any) -> Row:
    """One row of the store; numbers come from the simulator."""
    trace = None if plan is None else simulate(graph, plan)
    cost = None if trace is None else trace.cost
    bound = more.pop("bound", graph.total_cost if status in ("OPTIMAL", "FEASIBLE") else None)
    key, total = f"{strategy}-{budget}", graph.total_cost
    own = {
        "framework": "synthetic", "granularity": "operation", "batch_size": 1, "graph_name": graph.name,
        "graph_sha256": graph.sha256(), "cost_model": "roofline", "cost_source": "modelled",
        "cost_unit": graph.cost_unit, "strategy": strategy, "parameters": "{}", "budget_bytes": budget,
        "status": status, "cost": cost, "bound": bound,
        "gap": None if cost is None or bound is None else (cost - bound) / cost,
        "overhead": None if cost is None else cost / total - 1,
        "peak_bytes": None if trace is None else trace.peak_bytes,
        "plan_file": None if plan is None else f"plans/{key}.json", "message": "", "total_cost": total,
        "store_all_peak_bytes": plain_peak(graph), "fixed_bytes": graph.fixed_bytes, "n_operations": len(graph),
        "n_edges": graph.n_edges, "git_commit": "0123456789abcdef", "git_dirty": False,
        "versions": '{"remat": "0.1.0"}',
    }  # fmt: skip
    return make_row(key, **own | more)


def write_run(
    root: Path, graph: Graph, solved: Iterable[tuple[Row, Plan | None]], families: Sequence[Family] = ()
) -> Path:
    """Write rows, plans, families, graph and run.json; returns the run folder."""
    store, folder, keys = Store(root / "store"), root / "a run", []
    store.write_graph(graph)
    for one, plan in solved:
        if plan is not None:
            plan.save(store.folder / str(one.plan_file))
        store.write_row(one)
        keys.append(one.key)
    for family in families:
        store.write_family(family.strategy, family, graph, "exact")
    info = {
        "title": f"{graph.name}: overhead against budget", "experiment": "budget_sweep", "model": "chain",
        "gpu": {"name": "v100", "memory_bytes": 16_000_000_000},
        "config": {"model": {"name": "chain"}, "budget": "sweep"}, "keys": keys,
        "families": [family.strategy for family in families], "graph_sha256": graph.sha256(), "store": "../store",
    }  # fmt: skip
    write_json(folder / "run.json", info)
    return folder


def full_run(root: Path) -> Path:
    """Solvers with and without proof, a family, a newcomer, and every kind of failure."""
    graph = chain()
    peak, least = plain_peak(graph), graph.largest_working_set()[0]
    budgets = [least + (peak - least) * i // 4 for i in range(5)]
    everything = Plan.from_order(graph, range(len(graph)), peak)
    solved, members, cheapest = list[tuple[Row, Plan | None]](), list[Member](), dict[int, Plan]()

    def add(strategy: str, budget: int, status: str, plan: Plan | None = None, **more: Any) -> None:
        solved.append((row(graph, strategy, budget, status, plan, **more), plan))

    for power, tenth in itertools.product((0.0, 0.5, 1.0), range(2, 10)):
        limit = least + (peak - least) * tenth // 10
        plan = greedy_eviction(graph, limit, cost_power=power)
        if plan is None:
            continue
        trace = simulate(graph, plan)
        members.append(Member(plan, trace.cost, trace.peak_bytes, {"power": power, "limit": limit}))
        for budget in budgets:
            known = cheapest.get(budget)
            if trace.peak_bytes <= budget and (known is None or simulate(graph, known).cost > trace.cost):
                cheapest[budget] = plan
    for i, budget in enumerate(budgets):
        fits = budget >= peak
        plain, chosen = everything if fits else None, cheapest.get(budget)
        add("checkpoint_all", budget, "OPTIMAL" if plain else "NO_PLAN", plain, message="" if plain else "none fits")
        add("chen_greedy", budget, "FEASIBLE" if chosen else "NO_PLAN", chosen, message="" if chosen else "none fits")
        # The best plan known plays the optimum: nothing else in this run is cheaper at this budget.
        plan = (plain or chosen) if i else None
        if plan is None:
            add("checkmate_milp", budget, "INFEASIBLE", message="proven: no staged plan fits </script><b>")
        else:
            cost, proven = simulate(graph, plan).cost, i % 2 == 0
            bound = cost if proven else (cost + graph.total_cost) // 2
            add("checkmate_milp", budget, "OPTIMAL" if proven else "FEASIBLE", plan, bound=bound)
        newcomer = greedy_eviction(graph, budget, cost_power=0.0) if i > 1 else None
        status = "FEASIBLE" if newcomer else "TIMEOUT" if i else "FAILED"
        message = "" if newcomer else "no plan found within the time limit" if i else "the solver process died"
        add("my_newcomer", budget, status, newcomer, message=message)
        add("griewank", budget, "SKIPPED", message="needs a chain")
    return write_run(root, graph, solved, [Family("chen_greedy", tuple(members))])


def failed_run(root: Path) -> Path:
    """A run in which no strategy has a plan."""
    graph = chain()
    budget = graph.largest_working_set()[0] - 1
    return write_run(root, graph, [
        (row(graph, "checkmate_milp", budget, "INFEASIBLE", message="operation 3 alone needs more"), None),
        (row(graph, "griewank", budget, "SKIPPED", message="needs a chain"), None),
    ])  # fmt: skip
