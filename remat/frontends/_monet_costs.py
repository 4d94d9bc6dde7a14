"""Graphs from ``monet-costs`` files, and plans for them from ``monet-solutions`` files, both JSON of MONeT's data.

MONeT (Shah et al., ICLR 2021) measured every implementation of five networks on a P100, for each mode of its ablation
anew. A file has a set of costs for each mode; they become a graph by the rules of MONeT's program:

- A cost is rounded up to a hundredth of a millisecond, a size to a KiB (Checkmate's program rounds to the nearest).
- Convolutions take one of cuDNN's algorithms; the default is the one of the modes without algorithms. An algorithm
  that failed is left out.
- A mask or packed indices are an extra value; the implementation that makes them costs the operation and the surcharge.
- Batch normalization that is computed again costs less. So its first time is two operations: one makes the statistics,
  a value of 0 bytes, and costs the difference; the other reads them, and costs what computing it again does. A few
  small ones were measured .01 to .05 ms slower the second time; they cost the first time's, always.
- A parameter's gradient begins when it is made, and is kept.
- A workspace is what the peak has beyond outputs. Where it is negative, the output takes the storage of an input: of
  `may_overwrite`, or of the incoming gradient, if that has the same size and nobody else reads it later; else 0.
- MONeT's max pooling pools again in its backward operation, and drops PyTorch's indices of 8 bytes an output each time.
  Levels with `KEPT_INDICES`, which are ours, may keep them: the gradient then costs the difference of both times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput, unknown_name
from remat.files import read_json
from remat.graph import Graph, Operation, Value
from remat.implementation import Implementation
from remat.plan import Plan

MODES = {
    "n": "normal",
    "i": "inplace_normal",
    "ic": "inplace_conv_normal",
    "im": "inplace_multiway",
    "in": "inplace_newnode",
    "icmn": "inplace_conv_multiway_newnode",
}
KEPT_INDICES = "+int64"  # ends a level of ours
STATISTICS = "statistics"
IN_PLACE, OVER_GRADIENT, INT64 = "in_place", "over_gradient", "indices_int64"
KIB, TICK_NS = 1024, 10_000
_DEFAULT_ALGORITHM = {False: "algorithm_4", True: "algorithm_1"}  # [is_backward]


def load_costs(path: str | Path, level: str = "icmn", *, set_name: str | None = None) -> Graph:
    """The training graph in a file of format ``monet-costs``, with MONeT's implementations at a level; costs in ns.

    Args:
        level: of MONeT's ablation: ``n`` (default implementations), ``i`` (in place), ``ic`` (and convolutions'
            algorithms), ``im`` (and gradients from outputs), ``in`` (and masks and indices) or ``icmn`` (all). With
            ``+int64`` behind it, e.g. ``icmn+int64``, max pooling may keep PyTorch's indices.
        set_name: a set of costs of that level; by default the first one with which schedules were solved, or the first.

    Raises:
        InvalidInput: the file is no such file, or has no costs of that level; one line, naming the file.
    """
    document = read_costs(path)
    with damaged_in(path):
        return graph_of(document, level, set_name)


def read_costs(path: str | Path) -> Mapping[str, Any]:
    """The document in a file of costs; raises as `load_costs`."""
    document = read_json(path)
    if not isinstance(document, Mapping) or document.get("format") != "monet-costs":
        raise InvalidInput(f"{path}: is no file of format 'monet-costs'")
    return document


@contextmanager
def damaged_in(path: str | Path) -> Iterator[None]:
    """Refuse the file if what it should hold is not there, or of another type."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{path}: is damaged: {type(error).__name__}: {error}") from None


def graph_of(document: Mapping[str, Any], level: str, set_name: str | None = None) -> Graph:
    """As `load_costs`, from its document."""
    theirs = str(level).removesuffix(KEPT_INDICES)
    if theirs not in MODES:
        raise unknown_name("level", level, MODES)
    costs = set_of(document["sets"], MODES[theirs], set_name)
    graph = _Builder(document, costs, round if theirs == "n" else math.ceil, theirs != level).graph()
    again = "".join(costs["name"].partition("@")[1:])  # of a set that was measured once more
    return replace(graph, name=f"{document['network']}_b{document['batch']}_{level}{again}")


def set_of(sets: Sequence[Mapping[str, Any]], mode: str, name: str | None) -> Mapping[str, Any]:
    """The set of costs of that mode and name."""
    found = [each for each in sets if each["mode"] == mode and name in (None, each["name"])]
    if not found:
        raise InvalidInput(f"has no costs {name or mode}; it has {', '.join(each['name'] for each in sets)}")
    return next((each for each in found if each.get("solutions")), found[0])


class _Builder:
    """Collects the operations and values of a file with one set of costs."""

    def __init__(
        self, document: Mapping[str, Any], costs: Mapping[str, Any], rounded: Callable[[float], int],
        keeps_indices: bool = False,
    ):  # fmt: skip
        self.document, self.costs, self.rounded, self.keeps_indices = document, costs, rounded, keeps_indices
        self.nodes: list[Mapping[str, Any]] = document["operations"]
        self.loss: int = document["loss"]
        self.values: list[Value] = []
        self.value_of: dict[int, int] = {}  # [index of an operation, or id of an intermediate]
        self.statistics_of: dict[int, int] = {}
        self.int64_of: dict[int, int] = {}
        self.last_reader: dict[int, int] = {}
        for k, node in enumerate(self.nodes):
            self.last_reader |= dict.fromkeys(node["reads"], k)
        made = costs["intermediate_activated"]
        self.made_by = {each["operation"]: each for each in document["intermediates"]} if made else {}

    def graph(self) -> Graph:
        """The graph; its name is still to be given."""
        outputs = [self._outputs(k) for k in range(len(self.nodes))]
        for each in self.made_by.values():
            self.value_of[each["id"]] = self._value(
                f"{self.nodes[each['operation']]['name']}:{each['name']}", each["bytes"]
            )
        for k, node in enumerate(self.nodes):
            if self.keeps_indices and node["kind"] == "aten::max_pool2d":
                self.int64_of[k] = self._value(f"{node['name']}:{INT64}", 2 * node["bytes"])
        operations = list[Operation]()
        for k, own in enumerate(outputs):
            if k in self.statistics_of:
                operations.append(self._statistics(k))
            operations.append(self._operation(k, own))
        loss = self.loss + len(self.statistics_of)
        return Graph(
            "", tuple(operations), tuple(self.values), self._bytes(self.nodes[self.loss]["fixed_bytes"]), "ns", loss,
            f"MONeT's costs of {self.document['network']}, {self.costs['name']}; {self.document['device']}",
        )  # fmt: skip

    def _outputs(self, k: int) -> tuple[int, ...]:
        """The values that operation `k` makes by default: its own, its parameters' gradients, statistics."""
        node, measured = self.nodes[k], self.costs["operations"][k]
        grown = self._bytes(node["fixed_bytes"]) - self._bytes(self.nodes[k - 1]["fixed_bytes"]) if k > self.loss else 0
        made = list[int]()
        if "rt" in measured and self._ns(measured["rt"][0]) < self._ns(measured["t"][0]):
            self.statistics_of[k] = self._value(f"{node['name']}:{STATISTICS}", 0)
        if node["bytes"] or not grown:
            made.append(self._value(node["name"], node["bytes"]))
            self.value_of[k] = made[0]
        if grown:
            self.values.append(Value(f"{node['name']}:parameters", grown, keep=True))
            made.append(len(self.values) - 1)
        return tuple(made)

    def _statistics(self, k: int) -> Operation:
        """What operation `k` does the first time only."""
        node, measured = self.nodes[k], self.costs["operations"][k]
        cost, scratch = self._ns(measured["t"][0]) - self._ns(measured["rt"][0]), max(0, self._bytes(measured["w"][0]))
        name, kind = f"{node['name']}:{STATISTICS}", f"{node['kind']}_{STATISTICS}"
        return Operation(name, kind, self._reads(node["reads"]), (self.statistics_of[k],), cost, scratch)

    def _operation(self, k: int, outputs: tuple[int, ...]) -> Operation:
        node, is_backward = self.nodes[k], k > self.loss
        found = self._with_algorithms(k) if node.get("has_algorithms") and self.costs["algorithms"] else None
        if found is None:
            found = self._gradients(k) if is_backward else self._forward(k, outputs)
        else:
            reads = self._reads(node["reads"])
            found = [Implementation(name, reads, outputs, cost, scratch) for name, cost, scratch in found]
        default, *others = (replace(each, outputs=each.outputs or outputs) for each in found)
        return Operation(
            node["name"], node["kind"], default.inputs, outputs, default.cost, default.workspace_bytes, is_backward,
            implementations=tuple(others),
        )  # fmt: skip

    def _with_algorithms(self, k: int) -> list[tuple[str, int, int]]:
        """(name, cost, workspace) of a convolution's algorithms that did not fail, the default one first."""
        names, measured = self.document["implementations"][k], self.costs["operations"][k]
        found = [
            (names[p]["name"], self._ns(t), max(0, self._bytes(w)))
            for p, t, w in zip(measured["p"], measured["t"], measured["w"], strict=True)
            if t >= 0
        ]
        usual = _DEFAULT_ALGORITHM[k > self.loss]
        return sorted(found, key=lambda each: (each[0] != usual, each[1]))

    def _forward(self, k: int, outputs: tuple[int, ...]) -> list[Implementation]:
        """The default; in place; and each of them with the mask or indices."""
        node, measured = self.nodes[k], self.costs["operations"][k]
        reads, size = self._reads(node["reads"]), self._bytes(node["bytes"])
        times, scratches = ("rt", "rw") if k in self.statistics_of else ("t", "w")
        if k in self.statistics_of:
            reads = tuple(sorted((*reads, self.statistics_of[k])))
        cost, scratch = self._ns(measured[times][0]), self._bytes(measured[scratches][0])
        found = [Implementation("", reads, outputs, cost, max(0, scratch))]
        over = node.get("may_overwrite") if self.costs["in_place"] else None
        if over is not None:
            if "it" in measured:
                cost, scratch = self._ns(measured["it"][0]), self._bytes(measured["iw"][0])
            found.append(Implementation(IN_PLACE, reads, outputs, cost, max(0, scratch + size), self.value_of[over]))
        found = [*found, *self._with_intermediate(k, found)]
        if k in self.int64_of:  # by default they are scratch memory
            made, scratch = (*outputs, self.int64_of[k]), max(0, found[0].workspace_bytes - 2 * size)
            found.append(Implementation(INT64, reads, made, found[0].cost, scratch))
        return found

    def _with_intermediate(self, k: int, found: Sequence[Implementation]) -> Iterator[Implementation]:
        """The same implementations, which also make the mask or the indices."""
        if (made := self.made_by.get(k)) is None:
            return
        extra = self.costs["intermediates"][-1 - made["id"]]
        size = self._bytes(made["bytes"])
        read = sum(self._bytes(self.nodes[v]["bytes"]) for v in self.nodes[k]["reads"])
        for each in found:
            in_place = each.overwrites is not None
            cost = self._ns(extra["it" if in_place and "it" in extra else "t"][0])
            scratch = self._bytes(extra["iw" if in_place and "iw" in extra else "w"][0])
            # MONeT's rows count the operation and its intermediate one after the other; the input may be gone then.
            scratch = max(0, each.workspace_bytes - size, scratch - (0 if in_place else read))
            name = f"{each.name}_{made['name']}" if each.name else made["name"]
            outputs = (*each.outputs, self.value_of[made["id"]])
            yield replace(each, name=name, outputs=outputs, cost=each.cost + cost, workspace_bytes=scratch)

    def _gradients(self, k: int) -> list[Implementation]:
        """The implementations of a backward operation; those whose output takes the gradient's storage, beside."""
        node, measured, names = self.nodes[k], self.costs["operations"][k], self.document["implementations"][k]
        found = list[Implementation]()
        for i, (p, t, w) in enumerate(zip(measured.get("p") or [0], measured["t"], measured["w"], strict=True)):
            reads = names[p].get("reads", node["reads"])
            each = Implementation(names[p]["name"] if i else "", self._reads(reads), (), self._ns(t))
            over = self._overwritten(k, reads) if w < 0 else None
            if over is None or i == 0:
                found.append(replace(each, workspace_bytes=max(0, self._bytes(w))))
            if over is not None:
                name = "_".join(filter(None, (each.name, OVER_GRADIENT)))
                scratch = max(0, self._bytes(w) + self._bytes(node["bytes"]))
                found.append(replace(each, name=name, workspace_bytes=scratch, overwrites=over))
        if (pooled := node.get("backward_of")) in self.int64_of:
            reads = *self._reads([v for v in node["reads"] if v >= self.loss]), self.int64_of[pooled]
            cost = max(0, found[0].cost - self._ns(self.costs["operations"][pooled]["t"][0]))
            scratch = max(0, found[0].workspace_bytes - 2 * self._bytes(self.nodes[pooled]["bytes"]))
            found.append(Implementation(INT64, reads, (), cost, scratch))
        return found

    def _overwritten(self, k: int, reads: Sequence[int]) -> int | None:
        """The gradient whose storage the output can take: of the same size, read last by operation `k`."""
        size = self.nodes[k]["bytes"]
        for v in reads:
            if v > self.loss and self.nodes[v]["bytes"] == size and self.last_reader[v] == k:
                return self.value_of[v]
        return None

    def _reads(self, nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({self.value_of[v] for v in nodes}))

    def _value(self, name: str, size: int) -> int:
        self.values.append(Value(name, self._bytes(size)))
        return len(self.values) - 1

    def _bytes(self, size: float) -> int:
        return self.rounded(size / KIB) * KIB

    def _ns(self, milliseconds: float) -> int:
        return self.rounded(milliseconds * 100) * TICK_NS


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
    with damaged_in(path):
        measured = read_costs(Path(path).with_name(str(document.get("costs"))))
        solutions = [*document.get("solutions", ())]
    levels = {mode: level for level, mode in MODES.items()}
    graphs: dict[str, Graph] = {}
    for each in solutions:
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
