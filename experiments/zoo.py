"""``python -m experiments.zoo``: solve the plans that come with remat, and write them under ``remat/zoo/plans``.

Finished plans are kept, so that a stopped run continues and a finished one changes nothing. A plan is solved again if
its settings, its graph or the version of PyTorch changed, if it had less time, or if ``--again`` names it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import remat
from experiments.arguments import Parser, names_of, run, seconds, stop_if_interrupted
from experiments.provenance import provenance
from experiments.solving import finished
from experiments.steps.job import share_of_activations
from experiments.steps.torch_sizes import ON_A_CPU, for_a_cpu, torch_model
from experiments.store import write_json
from remat import zoo
from remat.cost import CostWarning
from remat.errors import InvalidInput, RematError
from remat.execution.step_plan import StepPlan
from remat.files import read_json
from remat.frontends.json import load_graph, save_graph
from remat.frontends.monet import BATCHES, monet_graph
from remat.frontends.spec import ModelSpec, load_target
from remat.graph import Graph
from remat.units import format_size

FRACTIONS = (0.8, 0.6)  # of the plain step's peak
OF_ACTIVATIONS = (0.6, 0.45)  # of what the peak holds beyond the bytes that are always there
OLDER_SIZES = {  # of ON_A_CPU, whose plans still load
    "unet": {"batch_size": 2, "input_size": (3, 128, 128)}, "vgg16": {"batch_size": 32, "input_size": (3, 96, 96)},
}  # fmt: skip
PUBLISHED_OPERATORS = "exact"  # implementations with the plain model's gradients, bit for bit
GIB = 2**30
SETTINGS = {"strategy": "portfolio", "time_limit_s": 30.0, "threads": 2, "seed": 0}


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan of the zoo, made or not.

    Attributes:
        made_from: the settings that determine the plan, as in the index.
        make: writes the plan to a file and returns its results for the index.
    """

    kind: zoo.Kind
    name: str
    made_from: dict[str, Any]
    make: Callable[[Path], dict[str, Any]]

    @property
    def file(self) -> str:
        return f"{self.name}.json" if self.kind == "graph" else f"{self.kind}/{self.name}.json"


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m experiments.zoo", description="the plans that come with remat")
    parser.add_argument("--only", default="", metavar="TEXT", help="only names, or kinds, that contain this")
    parser.add_argument("--again", nargs="*", default=[], metavar="NAME", help="solve these again")
    parser.add_argument("--list", action="store_true", help="only list the plans that would be made")
    parser.add_argument("--time-limit", type=seconds, default=SETTINGS["time_limit_s"], help="seconds per plan")
    parser.add_argument("--out", type=Path, default=zoo.FOLDER, help="folder (default: the package's)")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore", CostWarning)
    settings = SETTINGS | {"time_limit_s": given.time_limit}
    cache = Path(tempfile.gettempdir()) / "remat-zoo-measurements"  # kept, so that a stopped run continues
    wanted = [*graph_entries(settings), *torch_entries(settings, cache)]
    again = names_of("plan", given.again, [entry.name for entry in wanted]) if given.again else []
    chosen = [entry for entry in wanted if given.only in f"{entry.kind}/{entry.name}"]
    if not chosen:
        raise InvalidInput(f"no plan has '{given.only}' in its name; --list without --only shows all names")
    index = _Index(given.out, wanted)
    for entry in chosen:
        if entry.name not in again and index.has(entry):
            continue
        print(f"{entry.kind} {entry.name} ...", flush=True)
        if not given.list:
            print(f"  {index.make(entry)}", flush=True)
    if not given.list:
        index.write({})


class _Index:
    """The index file, in the order of `wanted`; other entries are dropped. Several processes may write it."""

    def __init__(self, folder: Path, wanted: list[Entry]):
        self.folder, self.wanted = folder, wanted

    def has(self, entry: Entry) -> bool:
        found = self._known().get((entry.kind, entry.name))
        if found is None or found["made_from"]["time_limit_s"] < entry.made_from["time_limit_s"]:
            return False
        if found["made_from"] | {"time_limit_s": entry.made_from["time_limit_s"]} != entry.made_from:
            return False
        file = self.folder / found["file"] if "file" in found else None
        return file is None or (file.exists() and _sha256(file.read_bytes()) == found["sha256"])

    def make(self, entry: Entry) -> str:
        """Make one plan and write the index; returns a line about the plan."""
        source = provenance()
        head = {
            "made_from": entry.made_from, "date": datetime.date.today().isoformat(), "commit": source.git_commit,
            "dirty": source.git_dirty, "versions": json.loads(source.versions), "cpu": source.cpu,
        }  # fmt: skip
        path = self.folder / entry.file
        try:
            made = entry.make(path)
        except InvalidInput as error:
            note = str(error).splitlines()[0]
            path.unlink(missing_ok=True)
            self.write({(entry.kind, entry.name): {"note": note} | head})
            return f"no plan: {note}"
        except RematError as error:
            return f"crashed, not entered: {error}"
        file = {"file": entry.file, "sha256": _sha256(path.read_bytes())}
        self.write({(entry.kind, entry.name): file | made | head})
        return f"{format_size(made['peak_bytes'])}, overhead {made['overhead']:.2%}, {path.stat().st_size / 1e3:.0f} kB"

    def write(self, made: dict[tuple[str, str], Any]) -> None:
        """Add entries and write the file."""
        entries = self._known() | made
        kinds: dict[str, dict[str, Any]] = {kind: {} for kind in zoo.KINDS}
        for entry in self.wanted:
            if (entry.kind, entry.name) in entries:
                kinds[entry.kind][entry.name] = entries[entry.kind, entry.name]
        write_json(self.folder / zoo.INDEX, {"format": zoo.FORMAT, **kinds})

    def _known(self) -> dict[tuple[str, str], Any]:
        path = self.folder / zoo.INDEX
        known = read_json(path) if path.exists() else {}
        return {(kind, name): entry for kind in zoo.KINDS for name, entry in known.get(kind, {}).items()}


def budgets_gib(network: str) -> tuple[float, ...]:
    """Those that MONeT published."""
    return 10, 9, 8, 7, 6, 5.51 if network == "vgg16" else 5


def graph_entries(settings: dict[str, Any]) -> Iterator[Entry]:
    """Plans of MONeT's graphs at the published budgets: with every implementation, and on published costs.

    Those on published costs have no Winograd, whose costs are modelled.
    """
    for network in BATCHES:
        graph = _without_work(monet_graph(network, implementations="joint"))
        yield from _graph_entries(network, "", graph, "roofline of a P100", settings)
    for network in BATCHES:
        stored = zoo.FOLDER / "graphs" / f"{network}_b{BATCHES[network]}_p100.json.gz"
        if stored.is_file():
            graph = load_graph(stored)
            costs = "published, of a P100; masks and indices by ratios measured there, others by a CPU's"
            yield from _graph_entries(network, "_p100", graph, costs, settings)


def _graph_entries(
    network: str, ending: str, graph: Graph, costs: str, settings: dict[str, Any]
) -> Iterator[Entry]:  # fmt: skip
    for gib in budgets_gib(network):
        made_from = settings | {"scope": "staged", "graph_sha256": graph.sha256(), "budget_bytes": int(gib * GIB)}

        def make(path: Path, made_from: dict[str, Any] = made_from) -> dict[str, Any]:
            return _solved(graph, made_from, path, costs)

        yield Entry("graph", f"{network}_b{BATCHES[network]}_{gib:g}GB{ending}", made_from, make)


def _solved(graph: Graph, made_from: dict[str, Any], path: Path, costs: str) -> dict[str, Any]:
    options = {key: value for key, value in made_from.items() if key not in ("graph_sha256", "budget_bytes")}
    solution = finished(remat.solve(graph, made_from["budget_bytes"], **options))
    if solution.plan is None:
        raise InvalidInput(f"{solution.status}: {solution.message}")
    stored = f"graphs/{graph.name}.json.gz"
    save_graph(graph, path.parent / stored)
    solution.plan.save(path)
    trace = remat.simulate(graph, solution.plan)
    return {
        "graph": stored, "budget_bytes": made_from["budget_bytes"], "peak_bytes": trace.peak_bytes, "cost": trace.cost,
        "cost_unit": graph.cost_unit, "overhead": trace.cost / graph.total_cost - 1, "bound": solution.bound,
        "gap": solution.gap, "status": str(solution.status), "costs": costs,
    }  # fmt: skip


def _without_work(graph: Graph) -> Graph:
    """The graph without the work from which its costs were derived: no plan depends on it."""
    operations = tuple(
        replace(op, work=None, implementations=tuple(replace(one, work=None) for one in op.implementations))
        for op in graph.operations
    )
    return replace(graph, operations=operations)


def torch_entries(settings: dict[str, Any], cache: Path) -> Iterator[Entry]:
    """Plans of PyTorch models: small ones at fractions with default implementations, published ones with exact ones."""
    version = metadata.version("torch").split("+")[0]

    def entry(name: str, spec: ModelSpec, budget: float | int, **options: Any) -> Entry:
        plain_spec = json.loads(json.dumps(asdict(spec)))  # with JSON's types, to compare with the index
        more = {"torch": version, "device": "cpu", "scope": "free", "budget": budget, "spec": plain_spec}
        made_from = settings | more | options
        return Entry("torch", name, made_from, lambda path: _planned(spec, made_from, cache, path))

    for model in ON_A_CPU:
        today = for_a_cpu(torch_model(model))
        older = OLDER_SIZES.get(model)
        spec = today if older is None else replace(torch_model(model), **older)
        for share in FRACTIONS:
            name = f"{model}_b{spec.batch_size}_{share:g}"
            yield entry(name, spec, share, cost="profile", operators="default")
        for share in OF_ACTIVATIONS if model in BATCHES else ():
            name = f"{model}_b{today.batch_size}_activations_{share:g}"
            yield entry(name, today, share, cost="profile", operators="default", of="activations")
    for model, batch in BATCHES.items():
        spec = replace(torch_model(model), batch_size=batch)
        for gib in budgets_gib(model):
            name = f"{model}_b{batch}_{gib:g}GB"
            yield entry(name, spec, int(gib * GIB), cost="roofline", operators=PUBLISHED_OPERATORS)


def _planned(spec: ModelSpec, made_from: dict[str, Any], cache: Path, path: Path) -> dict[str, Any]:
    """Plan the model's step as a user would; a step runs only for a fraction of an LSTM."""
    import torch

    import remat.torch as rt
    from remat.torch.frontend import build
    from remat.torch.planning.capturing import describe_inputs

    torch.set_num_threads(made_from["threads"])
    torch.manual_seed(made_from["seed"])
    # Models of published size have no memory for parameters; the others have contents, because the LSTM runs.
    place = "meta" if made_from["cost"] == "roofline" else "cpu"
    model, arguments, _ = build.build(spec, load_target(spec.target), place)
    options = {key: made_from[key] for key in (*SETTINGS, "scope", "cost")}
    options["implementations"] = made_from["operators"]  # the index's first entries had this key

    def planned(budget: float | int) -> StepPlan:
        return rt.rematerialize(model.train(), arguments, budget, cache_folder=cache, **options).plan

    budget = made_from["budget"]
    if made_from.get("of") == "activations":
        plain = planned(1.0)
        assert plain.plain_peak_bytes is not None
        budget = share_of_activations(budget, plain.graph.fixed_bytes, plain.plain_peak_bytes)
    plan = planned(budget)
    stop_if_interrupted()
    plan.save(path)
    shown = ", ".join(f"{key}={value!r}" for key, value in spec.options.items() if key != "loss")
    return {
        "model": {"target": spec.target + (f" ({shown})" if shown else ""), "inputs": describe_inputs((arguments, {}))},
        "budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes, "plain_peak_bytes": plan.plain_peak_bytes,
        "cost": plan.trace.cost, "cost_unit": plan.graph.cost_unit, "overhead": plan.overhead,
        "bound": plan.graph.least_cost, "gap": 1 - plan.graph.least_cost / plan.trace.cost, "status": "FEASIBLE",
        "costs": f"{plan.costs} on a CPU",
    }  # fmt: skip


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    run(main)
