"""Graphs from a clone of monet-schedules, which MONeT (Shah et al., ICLR 2021) profiled on a P100 and solved.

Files of ``monet-solutions``, the same data as JSON, also have the schedules: `load_schedules`. The rest is of pickles.

A solution file holds ``[SolverInfo, Solution]``: the training graph with the measured costs of its mode. A cost file
holds the measurements alone, six lists per node. It becomes a graph if the clone has no solution of that model,
batch and mode, and this project knows the network (mode ``normal``).

These rules come from MONeT's code and were checked against the published graphs of mode ``normal``:

- ``mem`` and ``fixed_mem`` are bytes, ``workspace_mem`` MiB, ``workspace_compute`` milliseconds; -1000 is an algorithm
  that failed. Like Checkmate's solver, the import rounds them to the nearest KiB and hundredth of a millisecond;
  MONeT's own solver rounds up.
- Every node of the solver is an operation with one output, in the order of its id, except intermediates
  (``int::...``): extra values of the forward operation before them, whose lists have an entry for each.
- ``args[p]`` lists the nodes that a node's p-th implementation reads. In a mode with ``conv``, the lists of a
  convolution have an entry for each algorithm of cuDNN instead.
- A forward operation in ``inplace_list`` may overwrite that input. Its workspace was measured as if the output took no
  memory of its own, so the import adds the output's bytes.
- ``fixed_bytes`` is that of the last node: parameters, buffers, the input batch and every parameter's gradient.

A graph cannot hold two facts. Batch normalization costs less when it is computed again (``recompute_workspace_*``); the
import always takes the first cost. Some gradients were written over the incoming one (a negative workspace); the import
takes 0. Both make plans look slower than they were, never faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput
from remat.frontends import _monet_pickle as stored
from remat.frontends._monet_pickle import read_pickle
from remat.frontends._monet_solver import MODELS, SolverGraph, number, scratch, ticks
from remat.frontends.monet import NETWORKS, load_schedules, monet_graph
from remat.graph import Graph
from remat.plan import Plan

_SOLUTION = re.compile(r"(?:checkmate_)?solution_(.+_\d+_[a-z_]+)_\d+(?:\.\d+)?(?:_ablation|_pipeline)*\.pkl")
_COSTS = re.compile(r"cost_(.+)_(\d+)_([a-z_]+)\.pkl")
_RECORDS = re.compile(r"(solutions_.+)\.json(?:\.gz)?")
N_LISTS = 6  # of a cost file: workspace and time; when computed again; in place


@dataclass(frozen=True, slots=True)
class Imported:
    """A graph of a file, or in `note` the reason that it has none; [name] the file's plans for that graph."""

    path: Path
    graph: Graph | None = None
    note: str = ""
    is_error: bool = False
    plans: dict[str, Plan] = field(default_factory=dict)


class NoGraph(InvalidInput):
    """A sound file from which no graph can be made."""


def import_clone(path: str | Path) -> Iterator[Imported]:
    """Every graph of a clone of monet-schedules, or of its files as JSON, once; or those of one file.

    Raises:
        InvalidInput: the path does not exist, or holds no file of monet-schedules.
    """
    path = Path(path)
    if not path.exists():
        raise InvalidInput(f"{path}: no such file or folder")
    files = [*_files(path)] if path.is_dir() else [(path.stem, path)]
    if not files:
        raise InvalidInput(
            f"{path}: no solution_*.pkl, cost_*.pkl or solutions_*.json in it; give a clone of "
            "utsaslab/monet-schedules, or a file of it"
        )
    done: set[str] = set()
    for key, file in files:
        if key in done:
            continue
        try:
            yield from _with_plans(file) if ".json" in file.suffixes else (Imported(file, load_monet(file)),)
            done.add(key)
        except InvalidInput as error:
            yield Imported(file, note=str(error), is_error=not isinstance(error, NoGraph))


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name made of model, batch and mode; file).

    Solutions come before cost files, because a solution holds the graph and all that a cost file holds.
    """
    files = sorted([*folder.rglob("*.pkl"), *folder.rglob("solutions_*.json*")])
    for pattern in (_SOLUTION, _COSTS, _RECORDS):
        for file in files:
            found = pattern.fullmatch(file.name)
            if found:
                yield "_".join(found.groups()), file


def _with_plans(path: Path) -> list[Imported]:
    """The graphs in a file of ``monet-solutions``, each with its schedules."""
    found: dict[str, Imported] = {}
    for each in load_schedules(path):
        found.setdefault(each.graph.name, Imported(path, each.graph)).plans[Path(each.file).stem] = each.plan
    return [*found.values()]


def load_monet(path: str | Path) -> Graph:
    """The training graph in a solution or cost file of monet-schedules, with the implementations of its mode.

    Raises:
        InvalidInput: in one line, naming the file: refused, damaged, or no such file.
        NoGraph: also in one line: a sound file from which no graph can be made.
    """
    path = Path(path)
    document = read_pickle(path)
    info = document[0] if isinstance(document, list) and document else document
    try:
        if isinstance(info, stored.PipelinedSolverInfo):
            raise NoGraph("a pipelined graph, whose intermediates count as fixed: not imported")
        if isinstance(info, stored.SolverInfo):
            return SolverGraph(info).graph(f"{path.name} of monet-schedules: MONeT's graph and P100 profile")
        if isinstance(document, list) and len(document) == N_LISTS:
            return _from_costs(document, path.name)
        raise InvalidInput("holds neither a SolverInfo nor six lists of costs")
    except InvalidInput as error:
        kind = NoGraph if isinstance(error, NoGraph) else InvalidInput
        raise kind(f"{path}: {' '.join(str(error).split())}") from None


def _from_costs(document: Sequence[Any], name: str) -> Graph:
    """This project's graph of the network, with the costs of the file."""
    found = _COSTS.fullmatch(name)
    model, batch, mode = found.groups() if found else ("", "1", "")
    model = MODELS.get(model, model)
    if not all(isinstance(lists, dict) for lists in document):
        raise InvalidInput("its six parts are not lists by node")
    if mode != "normal" or model not in NETWORKS:
        raise NoGraph("costs without a graph: no solution of that model, batch and mode lies beside it")
    graph = monet_graph(model, int(batch), implementations="none")
    memory, times = document[:2]
    if any(set(lists) != {*range(len(graph))} for lists in (memory, times)):
        raise NoGraph(f"costs of {len(times)} nodes, but this project's {graph.name} has {len(graph)} operations")

    def first(lists: Any, k: int) -> float:
        if not isinstance(lists[k], list) or not lists[k]:
            raise InvalidInput(f"node {k} has no measurement")
        return number(lists[k][0], f"a measurement of node {k}")

    operations = tuple(
        replace(op, cost=ticks(first(times, k), f"the time of node {k}"), workspace_bytes=scratch(first(memory, k)))
        for k, op in enumerate(graph.operations)
    )
    source = f"{name} of monet-schedules: MONeT's P100 profile, on this project's graph of the network"
    return replace(graph, operations=operations, source=source)
