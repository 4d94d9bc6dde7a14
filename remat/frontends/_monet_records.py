"""Plans from ``monet-solutions`` files: the published schedules of MONeT's program, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput
from remat.files import read_json
from remat.frontends._monet_costs import (
    IN_PLACE,
    KIB,
    MODES,
    OVER_GRADIENT,
    STATISTICS,
    TICK_NS,
    damaged_in,
    graph_of,
    read_costs,
)
from remat.graph import Graph
from remat.plan import Plan


@dataclass(frozen=True, slots=True)
class Schedule:
    """A published schedule, as a plan for the graph with the costs that it was solved with.

    Attributes:
        file: its name in monet-schedules.
        level: of MONeT's ablation, see `load_costs`.
        cost: the objective that its authors stored, in ns; None if there is none.
    """

    file: str
    level: str
    budget_bytes: int
    graph: Graph
    plan: Plan
    cost: int | None


def load_schedules(path: str | Path) -> Iterator[Schedule]:
    """The schedules of MONeT's program in a file of format ``monet-solutions``; those of Checkmate's are left out.

    The file of costs that it names lies beside it.

    Raises:
        InvalidInput: a file is not of its format, or a schedule does not fit the costs; one line.
    """
    document = read_json(path)
    if not isinstance(document, Mapping) or document.get("format") != "monet-solutions":
        raise InvalidInput(f"{path}: is no file of format 'monet-solutions'")
    measured = read_costs(Path(path).with_name(str(document.get("costs"))))
    levels = {mode: level for level, mode in MODES.items()}
    graphs: dict[str, Graph] = {}
    for each in document.get("solutions", ()):
        with damaged_in(path):
            if each["program"] == "checkmate":
                continue
            name = each["set"]
            if name not in graphs:
                graphs[name] = graph_of(measured, levels[each["mode"]], name)
            stored = each["stored"]["total"]
            cost = None if stored < 0 else round(stored) * TICK_NS
            plan = _plan(each, measured, graphs[name])
            budget_bytes, file = each["budget_kib"] * KIB, str(each["file"])
            found = Schedule(file, levels[each["mode"]], budget_bytes, graphs[name], plan, cost)
        yield found


def _plan(schedule: Mapping[str, Any], measured: Mapping[str, Any], graph: Graph) -> Plan:
    """The forward operations of each stage in the graph's order, then its backward operation."""
    of_node = [k for k, op in enumerate(graph.operations) if not op.kind.endswith(f"_{STATISTICS}")]
    statistics = {*range(len(graph))} - {*of_node}
    positions = next(each for each in measured["sets"] if each["name"] == schedule["set"])["operations"]
    made_by = {each["id"]: (each["operation"], each["name"]) for each in measured["intermediates"]}
    algorithms = {(t, k): f"algorithm_{a}" for t, k, a in schedule["algorithms"]}
    in_place = {(t, v) for t, v in schedule["in_place"]}
    steps = list[tuple[int, str]]()

    def run(node: int, *words: str) -> None:
        k = of_node[node]
        names = {each.name for each in graph.operations[k].implementations}
        name = "_".join(filter(None, words))
        over = f"{name}_{OVER_GRADIENT}".lstrip("_")
        steps.append((k, over if over in names else name if name in names else ""))

    for t, stage in enumerate(schedule["run"]):
        makes = dict(made_by[v] for v in stage if v < 0)
        for node in sorted(v for v in stage if v >= 0):
            if t == 0 and of_node[node] - 1 in statistics:
                steps.append((of_node[node] - 1, ""))
            run(node, algorithms.get((t, node), ""), IN_PLACE if (t, node) in in_place else "", makes.get(node, ""))
        if t > 0:
            node, position = measured["loss"] + t, schedule["backward"][t - 1]
            p = positions[node].get("p", [0])[position]
            name = measured["implementations"][node][p]["name"] if position else ""
            run(node, algorithms.get((t, node), name))
    order, names = zip(*steps, strict=True)
    return Plan.from_order(graph, order, schedule["budget_kib"] * KIB, names)
