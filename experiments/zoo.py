"""The plans that come with remat, in ``remat/zoo/plans``: ``keep=true`` writes them there.

A plan is solved again if its settings, its graph or the version of PyTorch changed.
"""

import hashlib
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import remat
from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER
from experiments.solving import finished
from experiments.steps.job import share_of_activations
from experiments.steps.torch_sizes import ON_A_CPU, for_a_cpu, torch_model
from experiments.store import write_json
from remat import zoo as package
from remat.cost import CostWarning
from remat.errors import InvalidInput
from remat.execution.step_plan import StepPlan
from remat.files import write_text
from remat.frontends.json import load_graph, save_graph
from remat.frontends.monet import BATCHES, monet_graph
from remat.frontends.spec import ModelSpec, load_target
from remat.graph import Graph

FRACTIONS = (0.8, 0.6)  # of the plain step's peak
OF_ACTIVATIONS = (0.6, 0.45)  # of what the peak holds beyond the bytes that are always there
OLDER_SIZES = {  # of ON_A_CPU, whose plans still load
    "unet": {"batch_size": 2, "input_size": (3, 128, 128)}, "vgg16": {"batch_size": 32, "input_size": (3, 96, 96)},
}  # fmt: skip
PUBLISHED_OPERATORS = "exact"  # implementations with the plain model's gradients, bit for bit
GIB = 2**30
BUDGETS_GIB = {  # of MONeT's tables
    **dict.fromkeys(("resnet50", "googlenet", "unet", "mobilenet_v2"), (10, 9, 8, 7, 6, 5)),
    "vgg16": (10, 9, 8, 7, 6, 5.51),
}
P100 = "_p100"  # ends the names of plans on published costs
MODELLED = "roofline of a P100"
PUBLISHED = "published, of a P100; masks and indices by ratios measured there, others by a CPU's"
CACHE = Path(tempfile.gettempdir()) / "remat-zoo-measurements"  # kept, so that a stopped run continues


@experiment(page="how-to/zoo.md")
def zoo(only: str = "", time_limit_s: float = 30.0, threads: int = 2) -> Iterator[Case]:
    """The plans that come with remat (only=graph/vgg16: those whose names contain this)."""
    settings = {"strategy": "portfolio", "time_limit_s": time_limit_s, "threads": threads, "seed": 0}
    wanted = [each for each in [*_of_graphs(), *_of_steps()] if only in f"{each[0]}/{each[1]}"]
    if not wanted:
        raise InvalidInput(f"only={only}: no plan has '{only}' in its name, e.g. graph/vgg16_b176_10GB")
    for kind, name, made_from in wanted:
        yield Case(measure, {"kind": kind, "name": name, "made_from": settings | made_from}, name=f"{kind} {name}")


def measure(kind: str, name: str, made_from: dict[str, Any]) -> Iterator[Row]:
    """One row: a plan and its results, or why there is none."""
    warnings.simplefilter("ignore", CostWarning)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        try:
            made = _solved(name, made_from, path) if kind == "graph" else _planned(made_from, path)
        except InvalidInput as error:
            yield {"note": str(error).splitlines()[0]}
            return
        yield {"made": made, "plan": path.read_text()}


@zoo.draws
def page(rows: Sequence[Row]) -> Drawing:
    """How many plans of each kind there are; their files and the index, in the order of the cases."""
    folder, by_case = RUNS_FOLDER / "zoo" / "plans", {(row["kind"], row["name"]): row for row in rows}
    index: dict[str, Any] = {"format": package.FORMAT, **{kind: {} for kind in package.KINDS}}
    files, counts = dict[str, str](), Counter[tuple[str, bool]]()
    for kind, name, _ in [*_of_graphs(), *_of_steps()]:
        row = by_case.get((kind, name))
        if row is None:
            continue
        counts[kind, row["plan"] is None] += 1
        entry: dict[str, Any] = {"note": row["note"]}
        if row["plan"] is not None:
            file = f"{name}.json" if kind == "graph" else f"{kind}/{name}.json"
            files[file] = row["plan"]
            entry = {"file": file, "sha256": hashlib.sha256(row["plan"].encode()).hexdigest(), **row["made"]}
        index[kind][name] = entry | {
            "made_from": row["made_from"], "date": row["date"], "commit": row["git_commit"],
            "dirty": row["git_dirty"], "versions": json.loads(row["versions"]), "cpu": row["cpu"],
        }  # fmt: skip
    for file, text in files.items():
        write_text(folder / file, text)
    write_json(folder / package.INDEX, index)
    graphs = {entry["graph"]: name for name, entry in index["graph"].items() if "graph" in entry}
    for file, name in graphs.items():
        save_graph(_graph_of(name), folder / file)
    kept = {package.FOLDER / file: folder / file for file in (package.INDEX, *files, *graphs)}
    lines = [[f"`{kind}`", str(counts[kind, False]), str(counts[kind, True])] for kind in package.KINDS]
    return Drawing(markdown_table(["kind", "plans", "budgets without a plan"], lines), kept=kept)


Wanted = tuple[str, str, dict[str, Any]]  # kind, name, settings of its own that determine the plan


@cache
def _of_graphs() -> Sequence[Wanted]:
    """Plans of MONeT's graphs at the published budgets: with every implementation, and on published costs.

    Those on published costs have no Winograd, whose costs are modelled.
    """
    found = list[Wanted]()
    for ending in ("", P100):
        for network, budgets_gib in BUDGETS_GIB.items():
            if (graph := _graph(network, ending)) is None:
                continue
            for gib in budgets_gib:
                made_from = {"scope": "staged", "graph_sha256": graph.sha256(), "budget_bytes": int(gib * GIB)}
                found.append(("graph", f"{network}_b{BATCHES[network]}_{gib:g}GB{ending}", made_from))
    return found


def _graph_of(name: str) -> Graph:
    """The graph of the ``graph`` plan of that name."""
    graph = _graph(name.partition("_b")[0], P100 if name.endswith(P100) else "")
    assert graph is not None
    return graph


@cache
def _graph(network: str, ending: str) -> Graph | None:
    """The graph of a network; None where the zoo has none with published costs."""
    if not ending:
        graph = monet_graph(network, implementations="joint")
        operations = tuple(  # without the work from which the costs were derived: no plan depends on it
            replace(op, work=None, implementations=tuple(replace(one, work=None) for one in op.implementations))
            for op in graph.operations
        )
        return replace(graph, operations=operations)
    stored = package.FOLDER / "graphs" / f"{network}_b{BATCHES[network]}{ending}.json.gz"
    return load_graph(stored) if stored.is_file() else None


def _solved(name: str, made_from: dict[str, Any], path: Path) -> dict[str, Any]:
    graph = _graph_of(name)
    options = {key: value for key, value in made_from.items() if key not in ("graph_sha256", "budget_bytes")}
    solution = finished(remat.solve(graph, made_from["budget_bytes"], **options))
    if solution.plan is None:
        raise InvalidInput(f"{solution.status}: {solution.message}")
    solution.plan.save(path)
    trace = remat.simulate(graph, solution.plan)
    return {
        "graph": f"graphs/{graph.name}.json.gz", "budget_bytes": made_from["budget_bytes"],
        "peak_bytes": trace.peak_bytes, "cost": trace.cost, "cost_unit": graph.cost_unit,
        "overhead": trace.cost / graph.total_cost - 1, "bound": solution.bound, "gap": solution.gap,
        "status": str(solution.status), "costs": PUBLISHED if name.endswith(P100) else MODELLED,
    }  # fmt: skip


@cache
def _of_steps() -> Sequence[Wanted]:
    """Plans of PyTorch models: small ones at fractions with default implementations, published ones with exact ones."""
    version, found = metadata.version("torch").split("+")[0], list[Wanted]()

    def add(name: str, spec: ModelSpec, budget: float | int, **options: Any) -> None:
        made_from = {"torch": version, "device": "cpu", "scope": "free", "budget": budget, "spec": asdict(spec)}
        found.append(("torch", name, json.loads(json.dumps(made_from | options))))  # with JSON's types, as in rows

    for model in ON_A_CPU:
        today = for_a_cpu(torch_model(model))
        older = OLDER_SIZES.get(model)
        spec = today if older is None else replace(torch_model(model), **older)
        for share in FRACTIONS:
            add(f"{model}_b{spec.batch_size}_{share:g}", spec, share, cost="profile", operators="default")
        for share in OF_ACTIVATIONS if model in BATCHES else ():
            name = f"{model}_b{today.batch_size}_activations_{share:g}"
            add(name, today, share, cost="profile", operators="default", of="activations")
    for model, batch in BATCHES.items():
        spec = replace(torch_model(model), batch_size=batch)
        for gib in BUDGETS_GIB[model]:
            add(f"{model}_b{batch}_{gib:g}GB", spec, int(gib * GIB), cost="roofline", operators=PUBLISHED_OPERATORS)
    return found


def _planned(made_from: dict[str, Any], path: Path) -> dict[str, Any]:
    """Plan the model's step as a user would; a step runs only for a fraction of an LSTM."""
    import torch

    import remat.torch as rt
    from remat.torch.frontend import build
    from remat.torch.step.branches import describe_inputs

    spec = ModelSpec(**made_from["spec"])
    torch.set_num_threads(made_from["threads"])
    torch.manual_seed(made_from["seed"])
    # Models of published size have no memory for parameters; the others have contents, because the LSTM runs.
    place = "meta" if made_from["cost"] == "roofline" else "cpu"
    model, arguments, _ = build.build(spec, load_target(spec.target), place)
    options = {key: made_from[key] for key in ("strategy", "time_limit_s", "threads", "seed", "scope", "cost")}
    options["implementations"] = made_from["operators"]  # the index's first entries had this key

    def planned(budget: float | int) -> StepPlan:
        return rt.rematerialize(model.train(), arguments, budget, cache_folder=CACHE, **options).plan

    budget = made_from["budget"]
    if made_from.get("of") == "activations":
        plain = planned(1.0)
        assert plain.plain_peak_bytes is not None
        budget = share_of_activations(budget, plain.graph.fixed_bytes, plain.plain_peak_bytes)
    plan = planned(budget)
    plan.save(path)
    shown = ", ".join(f"{key}={value!r}" for key, value in spec.options.items() if key != "loss")
    return {
        "model": {"target": spec.target + (f" ({shown})" if shown else ""), "inputs": describe_inputs((arguments, {}))},
        "budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes, "plain_peak_bytes": plan.plain_peak_bytes,
        "cost": plan.trace.cost, "cost_unit": plan.graph.cost_unit, "overhead": plan.overhead,
        "bound": plan.graph.least_cost, "gap": 1 - plan.graph.least_cost / plan.trace.cost, "status": "FEASIBLE",
        "costs": f"{plan.costs} on a CPU",
    }  # fmt: skip
