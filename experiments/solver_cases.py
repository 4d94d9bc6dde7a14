"""What the solvers are asked: published instances with recorded results, and graphs of the same kinds and larger."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.published import PUBLISHED
from experiments.config import read_conf
from experiments.measure_solve import Source, graph_of, share_of_peak
from remat import Graph, load_graph
from remat.files import read_json
from remat.simulator import plain_peak

SHARES = {"v100": (0.9, 0.75, 0.6), "layered": (0.9, 0.8), "generated": (0.9, 0.75, 0.6)}
# Layers as wide, and edges as many, as those of layered_n250; the largest graph has the generator's own.
LAYER, DENSITY, SEEDS = 11.3, 0.29, (0, 1, 2)
# Graphs in results/graphs, as `model=torch_llama gpu=h100` stores them, without the work behind their costs: with
# batch_size=4 and n_layers=32, and with batch_size=8, n_layers=80, width=8192, hidden=28672, n_heads=64, n_groups=8.
LLAMAS = ("llama_32", "llama_80")
ACTIVATIONS = (0.7, 0.5, 0.3)  # budgets of the Llamas: parameters, gradients, and a share of what is beside them

GOALS = read_conf("goals")


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph, a budget (`budget` is its text) and a scope, with recorded results to compare with.

    Attributes:
        source: of the graph, see `experiments.measure_solve.graph_of`.
        record: columns of the row: the recorded or published result, if there is one.
    """

    name: str
    source: Source
    graph: Graph
    budget_bytes: int
    budget: str
    scope: str = "staged"
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def certificate_name(self) -> str:
        """The name of the file of its certificate, without ``.json.gz``."""
        return "_".join((*self.name.split("/"), self.scope, *self.budget.replace("%", "_percent").split()))


def goals(instance: str, budget: str, scope: str, time_limit_s: float) -> tuple[float | None, float | None]:
    """(gap, bound above the cost of running everything once) asked for in so many seconds; None without a goal."""
    late, is_asked = int(time_limit_s >= 600), scope != "free" and time_limit_s >= 60
    gap, bound = (GOALS[kind].get(instance, {}).get(budget) for kind in ("gaps", "bounds"))
    return (gap[late] if is_asked and gap else None), (bound[late] if is_asked and bound else None)


def asked_for(row: Mapping[str, Any]) -> tuple[str, bool | None]:
    """(the goal for the gap or the bound of a case and its row, whether it is met); ('', None) if there is none."""
    gap, above = goals(row["instance"], row["budget"], row["scope"], row["time_limit_s"])
    if gap is not None and row["status"] != "INFEASIBLE":
        return f"{100 * gap:g} %", row["gap"] is not None and row["gap"] <= gap
    if above is not None:
        return f"bound {100 * above:g} % above once", above_once(row) >= above
    return "", None


def above_once(row: Mapping[str, Any]) -> float:
    """By which share the bound exceeds the cost of running everything once."""
    return max(0.0, (row["bound"] or 0) / max(1, row["total_cost"]) - 1)


def instances(folder: Path | None) -> Iterator[Instance]:
    """Those of a folder of published graphs, or the generated ones if it is None; then the large ones."""
    yield from generated() if folder is None else published(folder)
    yield from large()


def published(folder: Path) -> Iterator[Instance]:
    """The graphs of a folder, with the results of its records.json."""
    file = folder / "records.json"
    records = read_json(file) if file.exists() else []
    for path in graph_files(folder):
        graph, kind = load_graph(path), path.parent.name
        name, source = f"{kind}/{path.stem}", f"{kind}/{path.name}"
        mine = sorted((r for r in records if r["instance"] == name and r["cost_ns"]), key=lambda r: r["budget_bytes"])
        for r in mine:
            gap = None if r.get("bound_ns") is None else 1 - r["bound_ns"] / r["cost_ns"]
            record = {"record_cost": r["cost_ns"], "record_proven": r["status"].startswith("optimal"),
                      "record_s": r["solve_s"], "record_gap": gap}  # fmt: skip
            yield Instance(name, source, graph, r["budget_bytes"], f"{r['budget_gib']:g} GiB", record=record)
        for share in () if mine else SHARES.get(kind, SHARES["generated"]):
            known = PUBLISHED["layered"].get(path.stem, {}).get(share, {})
            for scope in ("fixed_order", "free") if kind == "layered" else ("staged",):
                record = {"published_overhead": known[scope]} if scope in known else {}
                yield Instance(name, source, graph, share_of_peak(graph, share), f"{share:.0%}", scope, record)


def graph_files(folder: Path) -> list[Path]:
    """The graphs of a folder of instances; other documents may stand beside them."""
    paths = sorted(folder.glob("*/*.json"))
    return [path for path in paths if str(read_json(path).get("format")).startswith("remat-graph/")]


def generated() -> Iterator[Instance]:
    """Generated graphs of the same kinds as the published ones."""
    for function, arguments in (
        ("chain", {"n": 48, "varied": True, "name": "chain_n48"}),
        ("chain", {"n": 160, "varied": True, "name": "chain_n160"}),
        ("skip", {"depth": 32, "name": "skip_d32"}),
        ("layered", {"n": 100, "name": "layered_n100"}),
        ("layered", {"n": 250, "name": "layered_n250"}),
    ):
        yield from _at_shares("generated", {"function": function, **arguments}, SHARES["generated"])


def large() -> Iterator[Instance]:
    """Graphs of 500 to 16,000 operations."""
    for n in (500, 1000):
        for seed in SEEDS:
            source = {"function": "layered", "n": n, "width": LAYER**2 / (n - 2), "density": DENSITY, "seed": seed,
                      "name": f"layered_n{n}_s{seed}"}  # fmt: skip
            yield from _at_shares("large", source, SHARES["layered"], "fixed_order")
    for name in LLAMAS:
        source = f"results/graphs/{name}.json.gz"
        graph = graph_of(source)
        activations = plain_peak(graph) - graph.final_bytes
        for share in ACTIVATIONS:
            budget = graph.final_bytes + int(share * activations)
            yield Instance(f"large/{name}", source, graph, budget, f"{share:.0%} of activations")
    largest = {"function": "layered", "n": 16_000, "name": "layered_n16000"}
    yield from _at_shares("large", largest, (0.9,), "fixed_order")


def _at_shares(kind: str, source: Source, shares: Sequence[float], scope: str = "staged") -> Iterator[Instance]:
    graph = graph_of(source)
    for share in shares:
        yield Instance(f"{kind}/{graph.name}", source, graph, share_of_peak(graph, share), f"{share:.0%}", scope)
