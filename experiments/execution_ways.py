"""``python -m experiments.execution_ways JOB``: plans that choose implementations of one PyTorch model, measured.

Runs in a process of its own for `experiments.execution_joint`. At every budget a plan for each ``implementations=``
is a row of the job's file as soon as it is measured; a row that is there is neither planned nor measured again. What is
offered to each is a row too.
"""

from __future__ import annotations

import collections
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import remat
from experiments.execution_subject import Subject, measure
from remat.cost import CostWarning
from remat.files import read_lines, write_lines
from remat.graph import Graph
from remat.implementation import DEFAULT, Implementation

# So that all ways of an operation are timed in the same passes: on a machine that does something else too, times of
# different minutes do not compare.
WIDEST_FIRST = ("joint", "exact", "default")


def main(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    warnings.simplefilter("ignore", CostWarning)
    rows = Rows(Path(job["rows"]))
    for operators in sorted(job["operators"], key=WIDEST_FIRST.index):
        wanted = [(operators, f"{fraction:g}") for fraction in job["fractions"]]
        if all(map(rows.of, (*wanted, ("offered", operators)))):
            continue
        subject = Subject(job, operators)
        plain = rows.of(("plain", "")) or rows.add(_plain(subject))
        if not rows.of(("offered", operators)):
            rows.add({"method": "offered", "parameter": operators, "offered": offered(subject.graph)})
        plain_bytes = plain["predicted_peak_bytes"] or plain["measured_peak_bytes"]
        for (_, parameter), fraction in zip(wanted, job["fractions"], strict=True):
            if not rows.of((operators, parameter)):
                rows.add(_planned(subject, operators, parameter, int(fraction * plain_bytes)))
        del subject
        torch._dynamo.reset()
        gc.collect()


class Rows:
    """The rows of a job, in its file as soon as there are any."""

    def __init__(self, path: Path):
        self.path = path
        self.known = read_lines(path)

    def of(self, key: tuple[str, str]) -> dict[str, Any] | None:
        """The row of a method and its parameter."""
        return next((row for row in self.known if (row["method"], row["parameter"]) == key), None)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        self.known.append(row)
        write_lines(self.path, self.known)
        print("row", json.dumps(row), flush=True)
        return row


def _plain(subject: Subject) -> dict[str, Any]:
    method = subject.followed("plain", "", subject.module, subject.module)
    row = measure(subject, method, subject.job["rounds"])
    return row | {"operations": len(subject.graph), "gradient_error": rounding_error(subject)}


def _planned(subject: Subject, operators: str, parameter: str, budget_bytes: int) -> dict[str, Any]:
    """Predictions and measurements of the plan at a budget; that there is none is a row too."""
    what = {"method": operators, "parameter": parameter, "budget_bytes": budget_bytes}
    began = time.perf_counter()
    try:
        method = subject.best_within(budget_bytes, parameter)
    except remat.InvalidInput as error:
        return what | {"planning_s": time.perf_counter() - began, "note": str(error).splitlines()[0]}
    assert method.plan is not None
    assert method.ns is not None
    row = what | {
        "planning_s": time.perf_counter() - began,
        "predicted_overhead": method.ns / subject.graph.total_cost - 1,
        "chosen": dict(collections.Counter(name for name in method.plan.choices if name).most_common()),
        "held": held_by_those_who_offer(subject.graph, method.plan),
        "gradient_error": gradient_error(subject, method.module),
    }
    return measure(subject, method, subject.job["rounds"]) | row


def gradient_error(subject: Subject, module: nn.Module) -> float:
    """Largest difference of a gradient from the plain step's, relative to the largest gradient of that."""
    return _difference(_gradients(subject, subject.module), _gradients(subject, module))


def rounding_error(subject: Subject) -> float:
    """The same for the plain step, if every parameter is another in its last bit: what rounding alone can do."""
    plain = _gradients(subject, subject.module)
    parameters = list(subject.module.parameters())
    before = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in parameters:
            up = torch.rand(p.shape, generator=generator) < 0.5
            p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf).to(p)))
    try:
        return _difference(plain, _gradients(subject, subject.module))
    finally:
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)


def _gradients(subject: Subject, module: nn.Module) -> list[torch.Tensor | None]:
    subject.put_buffers_back()
    torch.manual_seed(1)
    module(*subject.args).backward()
    kept = [None if p.grad is None else p.grad.detach().clone() for p in subject.module.parameters()]
    subject.module.zero_grad()
    return kept


def _difference(plain: list[torch.Tensor | None], ours: list[torch.Tensor | None]) -> float:
    assert [x is None for x in plain] == [x is None for x in ours]
    pairs = [(a, b) for a, b in zip(plain, ours, strict=True) if a is not None and b is not None]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest if largest else 0.0


def held_by_those_who_offer(graph: Graph, plan: remat.Plan) -> dict[str, float]:
    """The most that is held while an operation with an implementation runs, over the peak, by its name."""
    trace = remat.simulate(graph, plan)
    most = np.zeros(len(graph), dtype=np.int64)
    np.maximum.at(most, trace.order, trace.running_bytes)
    held: dict[str, float] = {}
    for k, op in enumerate(graph.operations):
        for way in op.implementations:
            held[way.name] = max(held.get(way.name, 0.0), float(most[k]) / trace.peak_bytes)
    return held


@dataclass(frozen=True, slots=True)
class Offer:
    """What an implementation offers to a model, by measured costs and counted bytes.

    Attributes:
        operations: that can run so; a forward and its backward operation are two.
        offers: independent choices: a backward operation that needs something of its forward operation is one with it.
        needed_later: of these, how many would overwrite what another operation reads by default.
        worse_than: how many another way of the same operations beats: not slower, keeping no more for the backward
            pass, needing no more while it runs.
        slower: median, over what is left, of its time over the default's, minus 1; 0 if nothing is left.
        spares_kept_bytes: of what is left, the most that it spares of what the backward pass reads.
        spares_running_bytes: likewise of what an operation needs while it runs.
    """

    operations: int
    offers: int
    needed_later: int
    worse_than: dict[str, int]
    slower: float
    spares_kept_bytes: int
    spares_running_bytes: int


def offered(graph: Graph) -> dict[str, dict[str, Any]]:
    """`Offer` of each implementation by name, as JSON."""
    by_name: dict[str, list[_Choice]] = collections.defaultdict(list)
    rivals: dict[tuple[int, ...], list[_Choice]] = collections.defaultdict(list)
    for choice in _choices(graph):
        by_name[choice.name].append(choice)
        rivals[choice.operations].append(choice)
    return {name: asdict(_offer(mine, rivals, graph)) for name, mine in sorted(by_name.items())}


@dataclass(frozen=True, slots=True)
class _Choice:
    """Operations that run by one implementation, against their default."""

    name: str
    operations: tuple[int, ...]
    ways: tuple[Implementation, ...]
    ns: int
    default_ns: int
    kept_bytes: int
    running_bytes: tuple[int, ...]

    def no_better_than(self, other: _Choice | None) -> bool:
        """Whether another choice for the same operations, None for the default, is as good in everything."""
        if other is None:
            return self.ns >= self.default_ns and self.kept_bytes >= 0 and min(self.running_bytes) >= 0
        running = zip(self.running_bytes, other.running_bytes, strict=True)
        same = (self.ns, self.kept_bytes, self.running_bytes) == (other.ns, other.kept_bytes, other.running_bytes)
        no_better = self.ns >= other.ns and self.kept_bytes >= other.kept_bytes and all(a >= b for a, b in running)
        return no_better and not same


def _offer(mine: list[_Choice], rivals: dict[tuple[int, ...], list[_Choice]], graph: Graph) -> Offer:
    needed, left = 0, []
    worse: collections.Counter[str] = collections.Counter()
    for choice in mine:
        if _overwrites_what_is_read(choice, graph):
            needed += 1
            continue
        others = (None, *(other for other in rivals[choice.operations] if other is not choice))
        better = next((other for other in others if choice.no_better_than(other)), choice)
        if better is choice:
            left.append(choice)
        else:
            worse[DEFAULT if better is None else better.name] += 1
    return Offer(
        operations=sum(len(choice.operations) for choice in mine), offers=len(mine), needed_later=needed,
        worse_than=dict(worse.most_common()),
        slower=statistics.median([c.ns / max(1, c.default_ns) - 1 for c in left]) if left else 0.0,
        spares_kept_bytes=max((-c.kept_bytes for c in left), default=0),
        spares_running_bytes=max((-min(c.running_bytes) for c in left), default=0),
    )  # fmt: skip


def _choices(graph: Graph) -> Iterator[_Choice]:
    """Every implementation of every operation, with the forward implementation that makes what it reads."""
    first_extra = len(graph.values) - graph.n_extra
    readers: dict[int, set[int]] = collections.defaultdict(set)  # of a value, backward operations by default
    for k, op in enumerate(graph.operations):
        for v in op.inputs if op.is_backward else ():
            readers[v].add(k)
    needs = {
        (k, way.name): sorted({graph.producer[v] for v in way.inputs if v >= first_extra})
        for k, op in enumerate(graph.operations) for way in op.implementations
    }  # fmt: skip
    made_for = {(k, name) for (_, name), makers in needs.items() for k in makers}
    for (k, name), makers in needs.items():
        if (k, name) in made_for:
            continue  # with the operation that reads it
        # Another name than the maker's: a way that shares what that one makes.
        own = graph.implementation(k, name)
        pairs = [(m, name if name in _names(graph, m) else _maker(graph, m, own)) for m in makers]
        pairs.append((k, name))
        operations = tuple(m for m, _ in pairs)
        ways = tuple(graph.implementation(m, called) for m, called in pairs)
        defaults = tuple(graph.operations[m].all_implementations[0] for m in operations)
        yield _Choice(
            name, operations, ways, sum(way.cost for way in ways), sum(way.cost for way in defaults),
            _only_read_by(graph, operations, ways, readers) - _only_read_by(graph, operations, defaults, readers),
            tuple(_running(graph, a) - _running(graph, b) for a, b in zip(ways, defaults, strict=True)),
        )  # fmt: skip


def _names(graph: Graph, k: int) -> list[str]:
    return [way.name for way in graph.operations[k].implementations]


def _maker(graph: Graph, k: int, reader: Implementation) -> str:
    """The implementation of operation `k` that makes what `reader` reads."""
    return next(way.name for way in graph.operations[k].implementations if {*way.outputs} & {*reader.inputs})


def _only_read_by(
    graph: Graph, operations: Iterable[int], ways: Iterable[Implementation], readers: dict[int, set[int]]
) -> int:
    """Bytes of the forward pass that the backward pass reads in these operations and nowhere else."""
    inputs = {
        v for k, way in zip(operations, ways, strict=True) if graph.operations[k].is_backward for v in way.inputs
        if not graph.operations[graph.producer[v]].is_backward
    }  # fmt: skip
    return sum(graph.values[v].bytes for v in inputs if not readers[v] - {*operations})


def _running(graph: Graph, way: Implementation) -> int:
    """Bytes of what an operation reads, makes and works with."""
    touched = sum(graph.values[v].bytes for v in (*way.inputs, *way.outputs))
    return touched + way.workspace_bytes - (graph.values[way.overwrites].bytes if way.overwrites is not None else 0)


def _overwrites_what_is_read(choice: _Choice, graph: Graph) -> bool:
    return any(
        way.overwrites is not None and any(user > k for user in graph.users[way.overwrites])
        for k, way in zip(choice.operations, choice.ways, strict=True)
    )


if __name__ == "__main__":
    main(sys.argv[1])
