"""``remat check``: describe a graph, plan, bound or arena file in one line, or list all that is wrong with it."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from remat.arena import ARENA_FORMAT, arena_of_document, check_form
from remat.bounds.certificate import verify_bound
from remat.certificate import KINDS as BOUND_FORMATS
from remat.certificate import BoundCertificate
from remat.errors import InvalidGraph, InvalidInput, InvalidPlan, warn
from remat.files import read_json
from remat.frontends.dtr_log import is_dtr_log
from remat.frontends.json import GRAPH_FORMAT_NODES, GRAPH_FORMAT_VALUES, graph_of_file, load_graph
from remat.graph import Graph
from remat.plan import PLAN_FORMAT, PLAN_FORMAT_COPIES, WITHOUT_HASH, plan_problems
from remat.simulator import load_and_simulate, plain_peak
from remat.units import format_cost, format_size

GRAPH_FORMATS = (GRAPH_FORMAT_NODES, GRAPH_FORMAT_VALUES)
LOG = "DTR's operator log"


def check_file(path: str | os.PathLike[str], graph_path: str | os.PathLike[str] | None = None) -> tuple[str, list[str]]:
    """(one line that describes the file, remarks). With `graph_path`, other files are checked against that graph.

    Raises:
        InvalidInput: a line of the message for each problem, with the file and the place.
    """
    where = os.fspath(path)
    is_log = is_dtr_log(where)
    document = None if is_log else read_json(path)
    kind = document.get("format") if isinstance(document, dict) else LOG if is_log else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = _checked(where, document, kind, graph_path)
    return line, [str(warning.message) for warning in caught]


def _checked(where: str, document: Any, kind: Any, graph_path: str | os.PathLike[str] | None) -> str:
    graph = None if graph_path is None else _whole(lambda: load_graph(graph_path), "--graph ")
    if kind in (*GRAPH_FORMATS, LOG):
        own = partial(load_graph, where) if document is None else partial(graph_of_file, document, where)
        return _graph_line(where, str(kind), _whole(own))
    if kind in (PLAN_FORMAT, PLAN_FORMAT_COPIES):
        return _plan_line(where, document, graph)
    if isinstance(kind, str) and kind in BOUND_FORMATS:
        return _bound_line(where, document, graph)
    if kind == ARENA_FORMAT:
        return _arena_line(where, document, graph)
    known = ", ".join((*GRAPH_FORMATS, PLAN_FORMAT, PLAN_FORMAT_COPIES, *BOUND_FORMATS, ARENA_FORMAT))
    raise InvalidInput(f"{where}: 'format' must be one of {known}, not {kind!r:.60}")


def _whole(load: Callable[[], Graph], who: str = "") -> Graph:
    """The graph; the error for a bad one lists all its problems, each after `who`."""
    try:
        return load()
    except InvalidGraph as error:
        raise InvalidInput("\n".join(f"{who}{problem}" for problem in error.problems)) from None


def _graph_line(where: str, kind: str, graph: Graph) -> str:
    repeated = sum(n for n in Counter(op.name for op in graph.operations).values() if n > 1)
    if repeated:
        warn(f"{where}: {repeated} operations share a name with another; names are labels, plans use ids")
    least, _ = graph.largest_working_set()
    others = sum(len(op.implementations) for op in graph.operations)
    return (
        f"{where}: {kind}, graph '{graph.name:.80}': {len(graph)} operations"
        f"{f' with {others} other implementations' if others else ''}, {len(graph.values)} values of "
        f"{format_size(sum(graph.value_bytes.tolist()))}, {graph.n_edges} edges, fixed "
        f"{format_size(graph.fixed_bytes)}, one pass {format_cost(graph.total_cost, graph.cost_unit)}, plain peak "
        f"{format_size(plain_peak(graph))}, every plan needs {format_size(max(least, graph.final_bytes))} or more"
    )


def _plan_line(where: str, document: Mapping[str, Any], graph: Graph | None) -> str:
    problems = plan_problems(document, graph)
    if problems:
        raise InvalidInput("\n".join(str(problem.of_file(where)) for problem in problems))
    computed = [step for step in document["steps"] if step[0] == "compute"]
    head = f"{where}: {document['format']}, plan for graph '{document['graph']:.80}': {len(computed)} computations"
    budget = document.get("budget_bytes")
    made_for = "" if budget is None else f", made for {format_size(budget)}"
    if graph is None:
        if document.get("graph_sha256") is None:
            warn(f"{where}: {WITHOUT_HASH}")
        stated = f", scope {document['scope']} as it says" if document.get("scope") else ""
        return f"{head}{stated}{made_for}; give --graph GRAPH to check that it can be executed"
    if document["format"] == PLAN_FORMAT_COPIES and document.get("link") is None:
        raise InvalidPlan(f"{where}: copies values, but has no 'link'")
    plan, trace = load_and_simulate(where, graph)
    if not graph.has_implementations and any(len(step) == 3 and step[2] for step in document["steps"]):
        warn(f"{where}: names implementations, but the graph has none: each operation runs as it is")
    if document["graph"] != graph.name:
        warn(f"{where}: names graph {document['graph']!r:.60}, though it was made for '{graph.name:.80}'")
    if document.get("scope") not in (None, str(plan.scope)):
        raise InvalidPlan(f"{where}: says scope {document['scope']}, but its steps are {plan.scope}")
    if budget is not None and trace.peak_bytes > budget:
        raise InvalidPlan(f"{where}: peaks at {format_size(trace.peak_bytes)}, above its budget {format_size(budget)}")
    overhead = f", overhead {trace.cost / graph.total_cost - 1:.2%}" if graph.total_cost else ""
    copies = f", {len(trace.copies)} copies over {plan.link}" if plan.has_copies else ""
    on_host = f", on the host {format_size(trace.host_peak_bytes)}" if plan.has_copies else ""
    return (
        f"{head}, {len(computed) - len(graph)} of them repeated{copies}, scope {plan.scope}, cost "
        f"{format_cost(trace.cost, graph.cost_unit)}{overhead}, peak {format_size(trace.peak_bytes)}{on_host}{made_for}"
    )


def _bound_line(where: str, document: Mapping[str, Any], graph: Graph | None) -> str:
    certificate = BoundCertificate.from_dict(document, where)
    bound = certificate.bound if graph is None else format_cost(certificate.bound, graph.cost_unit)
    line = (
        f"{where}: {document['format']}, bound for graph '{certificate.graph_name:.80}': no {certificate.scope} plan "
        f"within {format_size(certificate.budget_bytes)} costs less than {bound}"
        f"{'' if certificate.link is None else f', copies over {certificate.link} included'}"
    )
    if graph is None:
        return f"{line}, as it says; give --graph GRAPH to check the proof"
    try:
        verify_bound(graph, certificate)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
    return f"{line}; the proof holds"


def _arena_line(where: str, document: Mapping[str, Any], graph: Graph | None) -> str:
    if graph is None:
        check_form(document, where)
        head = f"{where}: {document['format']}, arena for a plan of graph '{document['graph']:.80}'"
        size = format_size(document["bytes"])
        return f"{head}: {size}, as it says; give --graph GRAPH to check that nothing overlaps"
    arena = arena_of_document(document, graph, where)
    n = sum(map(len, arena.offsets))
    reused = f", {n_reused} outputs over inputs as it says" if (n_reused := sum(map(len, arena.sharing))) else ""
    return (
        f"{where}: {document['format']}, arena for a plan of graph '{graph.name:.80}': {n} outputs and workspaces, "
        f"{arena.summary()}{reused}; nothing overlaps"
    )
