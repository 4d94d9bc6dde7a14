"""``experiment=throughput``: the batch and plan with the most samples per second, and the value of another GiB there.

A larger batch fills the device better, but it needs more memory and therefore more recomputation. For each batch the
portfolio looks for the fastest plan. The batches are a coarse grid, from the largest that plain training fits to the
largest that the working set allows, then a finer one around the best. The configuration's costs (roofline by default)
apply to graphs that `experiments.batch_search.of_batch` derives from one and two samples.

Document (a row): network, gpu, memory_bytes, points: [{batch, status, cost_ns, bound_ns, samples_per_s,
most_per_s (proven: no staged plan of this batch is faster), overhead}], best (the batch), prices: [{batch,
ms_per_gib, bound_ns}] of the best batch and of the largest with a plan (`remat.bounds.price`: by how much the
bound of a step falls for each further GiB).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from analysis.batches import SPEED_HEADS, curves, speed_rows
from experiments.batch_search import RULES, of_batch, pair, per_sample
from experiments.build import CACHE_FOLDER, Subject
from experiments.documents import Drawing, long_table, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.settings import Settings
from experiments.solving import GraphRun, Solves, solve_each
from experiments.store import Row as Solved
from experiments.store import Store, code_of, code_version
from remat.bounds.price import shadow_price
from remat.cost import apply_cost
from remat.errors import InvalidInput, RematError
from remat.graph import Graph
from remat.simulator import plain_peak

STRATEGY = "portfolio"
COARSE, QUICK_COARSE = 6, 3  # batches of the grid above the largest that plain training fits
PRICE_LIMITS = 4  # time limits for one price: its relaxation must be solved to the end
ROUNDS, QUICK_ROUNDS = 2, 0  # how often the distance from the best batch to its neighbours is halved


@experiment()
def throughput(
    settings: Settings, scale: str = "full", time_limit: float = 20.0, batch_size: int | None = None
) -> Iterator[Case]:
    """The batch and plan with the highest throughput on a 16 GB card (roofline), and the price of memory there."""
    if settings.spec is None or settings.spec.framework == "synthetic":
        raise InvalidInput("experiment=throughput needs a Keras model with layer granularity")
    if batch_size is not None:
        raise InvalidInput("experiment=throughput finds the batch size; leave batch_size out")
    if settings.cost != "roofline":
        raise InvalidInput("experiment=throughput scales the costs of one sample to any batch: keep cost=roofline")
    coarse, rounds = (QUICK_COARSE, QUICK_ROUNDS) if scale == "quick" else (COARSE, ROUNDS)
    what = {"settings": settings.determining(), "coarse": coarse, "rounds": rounds}
    yield Case(measure, what, code_of(STRATEGY), name=f"{settings.spec.name}, {settings.gpu.name}", solves=settings)


def measure(run: Solves, coarse: int, rounds: int, **_settings: Any) -> Iterator[Row]:
    """The document of one network.

    Raises:
        InvalidInput: no batch has a plan.
    """
    limit_s = PRICE_LIMITS * run.settings.time_limit_s
    document = best_batch(run, run.settings, coarse=coarse, rounds=rounds, price_limit_s=limit_s)
    if document["best"] is None:
        raise InvalidInput("no batch has a plan")
    yield document


def best_batch(
    run: Solves, settings: Settings, *, coarse: int = COARSE, rounds: int = ROUNDS, price_limit_s: float = 60.0
) -> dict[str, Any]:
    """The document of one network (see the module); `price_limit_s` limits the relaxation of one price."""
    spec = settings.spec
    assert spec is not None
    one, two = pair(spec)
    network = per_sample(spec)
    memory_bytes = int(settings.gpu.memory_bytes)
    rule = RULES[0]
    plain = rule.batch(plain_peak(network.graph), network, memory_bytes)
    most = rule.batch(network.graph.largest_working_set()[0], network, memory_bytes)

    def graph_run(batch: int) -> GraphRun:
        costed = apply_cost(of_batch(one, two, batch), settings.cost, settings.gpu, cache_folder=CACHE_FOLDER / "costs")
        subject = Subject(costed, spec.name, spec.framework, spec.granularity, batch, settings.cost, "modelled")
        return run.graph_run(subject, "throughput", settings)

    graph_runs: dict[int, GraphRun] = {}
    rows: dict[int, Solved] = {}

    def solve(batches: Sequence[int]) -> None:
        new = [batch for batch in batches if batch not in rows]
        graph_runs.update((batch, graph_run(batch)) for batch in new)
        found = solve_each([(graph_runs[batch], STRATEGY, memory_bytes) for batch in new])
        rows.update(zip(new, found, strict=True))

    solve(grid(max(1, plain), max(1, most), coarse))
    for _ in range(rounds):
        if (best := _best(rows)) is not None:
            solve(between(sorted(rows), best))
    best = _best(rows)
    largest = max((batch for batch, row in rows.items() if row.cost), default=None)
    prices = [
        _price(graph_runs[batch].subject.graph, batch, memory_bytes, settings, run.store, price_limit_s)
        for batch in dict.fromkeys((best, largest)) if batch is not None
    ]  # fmt: skip
    return {
        "network": spec.name, "gpu": settings.gpu.name, "memory_bytes": memory_bytes, "plain_batch": plain,
        "points": [_point(batch, rows[batch]) for batch in sorted(rows)], "best": best,
        "prices": prices,
    }  # fmt: skip


def grid(plain: int, most: int, points: int) -> list[int]:
    """Half of `plain`, `plain` itself, and `points` more batches up to `most`, evenly spaced by factor."""
    ratio = max(1.0, most / plain) ** (1 / points)
    return sorted({max(1, plain // 2), plain, *(min(most, round(plain * ratio**i)) for i in range(1, points + 1))})


def between(batches: Sequence[int], best: int) -> list[int]:
    """Batches halfway between the best of `batches` (ascending) and its neighbours, without those already in it."""
    at = list(batches).index(best)
    near = [*batches[max(0, at - 1) : at], *batches[at + 1 : at + 2]]
    return sorted({(best + other) // 2 for other in near} - set(batches))


def _best(rows: dict[int, Solved]) -> int | None:
    with_plan = [batch for batch, row in rows.items() if row.cost]
    return max(with_plan, key=lambda batch: batch / (rows[batch].cost or 1), default=None)


def _point(batch: int, row: Solved) -> dict[str, Any]:
    bound = row.bound if row.bound is not None else row.total_cost
    return {
        "batch": batch, "status": row.status, "cost_ns": row.cost, "bound_ns": bound, "overhead": row.overhead,
        "samples_per_s": None if row.cost is None else batch * 1e9 / row.cost,
        "most_per_s": 0.0 if row.status == "INFEASIBLE" else batch * 1e9 / bound, "key": row.key,
    }  # fmt: skip


def _price(
    graph: Graph, batch: int, memory_bytes: int, settings: Settings, store: Store, limit_s: float
) -> dict[str, Any]:
    """Milliseconds that a further GiB saves at this batch, kept in the store; None if its LP is not solved in time."""
    asked = {"price": graph.sha256(), "budget": memory_bytes, "scope": settings.scope, "code": code_version()}

    def compute() -> dict[str, Any] | None:
        try:
            price = shadow_price(graph, memory_bytes, scope=settings.scope, time_limit_s=limit_s)
        except RematError:
            return None
        return {"batch": batch, "ms_per_gib": price.per_gib / 1e6, "bound_ns": price.bound}

    return store.remember("prices", asked, compute) or {"batch": batch, "ms_per_gib": None, "bound_ns": None}


@throughput.draws
def page(rows: Sequence[Row]) -> Drawing:
    """For each network the batches, the price of memory and the figure."""
    parts, tables, networks = [], [], [*{row["network"]: row for row in rows}.values()]
    for row in networks:
        parts.append(markdown_table(SPEED_HEADS, speed_rows(row, row["network"])))
        for price in row["prices"]:
            known = price["ms_per_gib"]
            worth = "not known: the relaxation was not solved" if known is None else f"{known:.3f} ms a step (bound)"
            parts.append(f"One more GiB at batch {price['batch']}: {worth}.")
        tables.append(long_table(f"throughput_{row['network']}", row["points"]))
    return Drawing("\n\n".join(parts), tables, {"throughput": curves(networks)})
