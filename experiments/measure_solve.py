"""A solve as a measurement, with one form of row for every experiment that compares strategies."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import remat
from experiments.build import costed, extracted
from experiments.documents import ROOT
from experiments.registry import Case, Row
from experiments.settings import configured_model
from experiments.solving import compile_first, finished
from experiments.store import code_of
from remat.certificate import BoundCertificate
from remat.cost import load_gpu
from remat.errors import InvalidInput, RematError
from remat.frontends import synthetic
from remat.frontends.monet import load_costs
from remat.frontends.spec import ModelSpec
from remat.incumbent import GAP_TOLERANCE
from remat.simulator import plain_peak
from remat.solution import Solution, Status

Source = str | Mapping[str, Any]
MONET_COSTS = "monet/costs_{}.json.gz"  # below REMAT_INSTANCES; {} is the network
LIMITS = {"scope": "staged", "time_limit_s": 60.0, "threads": 2, "seed": 0, "target_gap": GAP_TOLERANCE}
_OF_STATS = ("start_s", "first_plan_s", "within_1pct_s")


def published_folder(part: str) -> Path:
    """The folder of published files that REMAT_INSTANCES names.

    Raises:
        InvalidInput: it has no folder `part`.
    """
    folder = Path(os.environ.get("REMAT_INSTANCES", ""))
    if not (folder / part).is_dir():
        raise InvalidInput(f"published files are absent: set REMAT_INSTANCES to the folder that holds {part}/")
    return folder


def graph_of(source: Source) -> remat.Graph:
    """The graph of a file, of a model, or of a function of `remat.frontends.synthetic` with its arguments.

    Args:
        source: a path here, below the project, or below REMAT_INSTANCES; ``{"function": "chain", "n": 48}``; or
            ``{"model": "vgg19", "gpu": "v100", "cost": "roofline"}``, with other values than those of conf/model; or
            ``{"monet": "vgg16", "level": "icmn", "set": None}``, MONeT's published costs.
    """
    if not isinstance(source, str):
        if "function" in source:
            return getattr(synthetic, source["function"])(**{k: v for k, v in source.items() if k != "function"})
        if network := source.get("monet"):
            file = published_folder("monet") / MONET_COSTS.format(network)
            return load_costs(file, source["level"], set_name=source["set"])
        spec = spec_of(source)
        assert spec is not None
        return costed(extracted(spec), source["cost"], load_gpu(source["gpu"]))
    own = next((path for path in (Path(source), ROOT / source) if path.is_file()), None)
    return remat.load_graph(own or published_folder(source.partition("/")[0]) / source)


def spec_of(source: Source) -> ModelSpec | None:
    """The network behind the graph; None if there is none."""
    if isinstance(source, str) or "model" not in source:
        return None
    spec = configured_model(source["model"])
    other = {name: source[name] for name in ("batch_size",) if name in source}
    if "input_size" in source:
        other["input_size"] = tuple(source["input_size"])
    return replace(spec, options={**spec.options, **source.get("options", {})}, **other)


def share_of_peak(graph: remat.Graph, share: float) -> int:
    """A budget: a share of the peak of running every operation once."""
    return int(share * plain_peak(graph))


def solve_case(
    source: Source, graph: remat.Graph, strategy: str, budget_bytes: int, *,
    options: Mapping[str, Any] | None = None, **others: Any,
) -> Case:  # fmt: skip
    """The case of one solve.

    Args:
        graph: of `source`.
        options: of the strategy.
        others: values of `LIMITS` other than the usual ones; and more columns of the row, e.g. a published result. A
            text `certificate` is the file, below the run's folder, in which the certificate of the bound is kept.
    """
    what = {
        "graph": source, "graph_sha256": graph.sha256(), "strategy": strategy, "budget_bytes": budget_bytes,
        "options": dict(options or {}), **LIMITS, **others,
    }  # fmt: skip
    of = " ".join([strategy, *map(str, what["options"].values())])
    name = f"{graph.name}, {budget_bytes:,} B, {of}, {what['time_limit_s']:g} s"
    code = code_of(strategy, has_link="link" in what["options"])
    return Case(solve, what, code, name=name + (f", seed {what['seed']}" if what["seed"] else ""))


def solve(
    graph: Source, strategy: str, budget_bytes: int, options: Mapping[str, Any], certificate: str = "", **others: Any
) -> Iterator[Row]:  # fmt: skip
    """One row, of `solved`."""
    loaded = graph_of(graph)
    solution = solved(loaded, strategy, budget_bytes, **{name: others[name] for name in LIMITS}, **options)
    if certificate and (found := solution.certificate) is not None:
        known = BoundCertificate.load(path) if (path := Path(certificate)).exists() else None
        if known is None or known.graph_sha256 != found.graph_sha256 or known.bound < found.bound:
            found.save(path)  # the file had none of the same graph with a better bound
    yield row_of(solution, loaded)


def solved(graph: remat.Graph, strategy: str, budget_bytes: int, scope: str, **how: Any) -> Solution:
    """The solution of a solve in a process of its own, whose memory is therefore measured alone.

    Raises:
        RematError: the solver failed, or the simulator refutes a claim of it.
    """
    compile_first([strategy])
    (solution,) = remat.solve_sweep(graph, [budget_bytes], strategy, scope, isolate=True, **how)
    if solution.status is Status.SKIPPED:  # not for this graph, however often it is asked
        return solution
    if finished(solution).contradicted:
        raise RematError(f"contradicted: {solution.message}")
    return solution


def row_of(solution: Solution, graph: remat.Graph) -> Row:
    """The measured columns. Only ``found_s``, of the last plan, is without ``start_s``, the start of the process."""
    stats, proof, start_s = solution.stats, solution.certificate, solution.stats.get("start_s") or 0.0
    return {
        "graph_name": graph.name, "n_operations": len(graph), "n_edges": graph.n_edges,
        "total_cost": graph.total_cost, "fixed_bytes": graph.fixed_bytes, "plain_peak_bytes": plain_peak(graph),
        "status": str(solution.status), "cost": solution.cost, "overhead": solution.overhead,
        "peak_bytes": solution.peak_bytes, "bound": solution.bound, "gap": solution.gap,
        "proven_by": solution.proven_by or None, "certified_bound": None if proof is None else proof.bound,
        "message": solution.message, "wall_s": solution.wall_s, **{name: stats.get(name) for name in _OF_STATS},
        "found_s": max(0.0, stats["trajectory"][-1][0] - start_s) if stats.get("trajectory") else None,
        "peak_memory_bytes": stats.get("solver_peak_memory_bytes"),
    }  # fmt: skip
