"""Model to costed graph: extraction (in a child process where a framework is needed), then costs."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from experiments.settings import RUNS_FOLDER, Settings
from remat.cost import apply_cost
from remat.errors import InvalidInput
from remat.extraction import extract, extract_in_child
from remat.frontends.json import load_graph
from remat.frontends.spec import DTYPES
from remat.graph import Graph
from remat.plan import Plan, parse_scope
from remat.simulator import simulate
from remat.solving.judgement import why_impossible

CACHE_FOLDER = RUNS_FOLDER / "cache"


@dataclass(frozen=True, slots=True)
class Subject:
    """The graph of a run and what rows say of its origin; None where a graph file does not tell.

    Attributes:
        dtype: the floating-point types that the graph computes in, those that move most bytes first.
    """

    graph: Graph
    model: str | None
    framework: str | None
    granularity: str | None
    batch_size: int | None
    cost_model: str
    cost_source: str
    dtype: str | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtypes(self.graph))


def _dtypes(graph: Graph) -> str | None:
    moved: Counter[str] = Counter()
    for op in graph.operations:
        if op.work is not None and op.work.dtype in DTYPES and not op.work.is_free:
            moved[op.work.dtype] += op.work.bytes_moved
    return "+".join(name for name, _ in moved.most_common()) or None


def plain_peak(graph: Graph) -> int:
    """The peak of running every operation once, in the graph's order."""
    return simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes


def build(settings: Settings) -> Subject:
    """The costed graph of `settings`.

    Raises:
        InvalidInput: the network cannot be built, or a budget below what one operation needs; that
            is found before anything is measured or solved.
    """
    if settings.graph_file is not None:
        graph = load_graph(settings.graph_file)
        _refuse_if_impossible(graph, settings)
        return Subject(graph, None, None, None, None, "file", "file")
    spec = settings.spec
    assert spec is not None
    graph = extract(spec) if spec.framework == "synthetic" else extract_in_child(spec, CACHE_FOLDER / "graphs")
    _refuse_if_impossible(graph, settings)
    if all(op.work is None for op in graph.operations):  # synthetic graphs come with costs
        return Subject(graph, spec.name, spec.framework, spec.granularity, spec.batch_size, "file", "file")
    graph = apply_cost(graph, settings.cost, settings.gpu, cache_folder=_cache_folder(settings), device=settings.device)
    source = "measured" if settings.cost == "profile" else "modelled"
    return Subject(graph, spec.name, spec.framework, spec.granularity, spec.batch_size, settings.cost, source)


def build_quietly(settings: Settings) -> tuple[Subject, list[str]]:
    """`build`, with the warnings of frontends and cost models as lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subject = build(settings)
    return subject, list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)))


def _cache_folder(settings: Settings) -> Path:
    return CACHE_FOLDER / "costs"


def _refuse_if_impossible(graph: Graph, settings: Settings) -> None:
    budget = settings.budget_bytes
    if budget is None:
        return
    reason = why_impossible(graph, budget, parse_scope(settings.scope))
    if reason:
        raise InvalidInput(reason)
