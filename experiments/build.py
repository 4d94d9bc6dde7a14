"""From a model to a costed graph: extraction (in a child process where a framework is needed), then costs."""

import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from experiments.settings import RUNS_FOLDER, Settings
from remat.cost import apply_cost
from remat.cost.gpu import Gpu
from remat.errors import InvalidInput
from remat.extraction import extract, extract_in_child
from remat.frontends.json import load_graph
from remat.frontends.spec import DTYPES, ModelSpec
from remat.graph import Graph
from remat.plan import parse_scope
from remat.solving.judgement import why_impossible

CACHE_FOLDER = RUNS_FOLDER / "cache"


@dataclass(frozen=True, slots=True)
class Subject:
    """The graph of a run and its origin, for the rows; the defaults are those of a graph file.

    Attributes:
        dtype: the graph's floating-point types, joined by "+"; the type that moves most bytes comes first.
    """

    graph: Graph
    model: str | None = None
    framework: str | None = None
    granularity: str | None = None
    batch_size: int | None = None
    cost_model: str = "file"
    cost_source: str = "file"
    dtype: str | None = field(init=False)

    def __post_init__(self) -> None:
        moved: Counter[str] = Counter()
        for op in self.graph.operations:
            if op.work is not None and op.work.dtype in DTYPES and not op.work.is_free:
                moved[op.work.dtype] += op.work.bytes_moved
        object.__setattr__(self, "dtype", "+".join(name for name, _ in moved.most_common()) or None)


def build(settings: Settings) -> Subject:
    """The costed graph of `settings`.

    Raises:
        InvalidInput: the network cannot be built, or one operation needs more than the budget. The budget is
            checked before anything is measured or solved.
    """
    spec = settings.spec
    if spec is None:
        assert settings.graph_file is not None
        graph = load_graph(settings.graph_file)
    else:
        graph = extracted(spec)
    if settings.budget_bytes is not None:
        reason = why_impossible(graph, settings.budget_bytes, parse_scope(settings.scope))
        if reason:
            raise InvalidInput(reason)
    if spec is None:
        return Subject(graph)
    origin = (spec.name, spec.framework, spec.granularity, spec.batch_size)
    found = costed(graph, settings.cost, settings.gpu, settings.device)
    if found is graph:
        return Subject(graph, *origin)
    return Subject(found, *origin, settings.cost, "measured" if settings.cost == "profile" else "modelled")


def extracted(spec: ModelSpec, cache_folder: Path | None = CACHE_FOLDER / "graphs") -> Graph:
    """The graph of a network."""
    return extract(spec) if spec.framework == "synthetic" else extract_in_child(spec, cache_folder)


def costed(graph: Graph, cost: str, gpu: Gpu, device: str | None = None) -> Graph:
    """A graph with costs; itself if it came with them, as synthetic graphs do."""
    if all(op.work is None for op in graph.operations):
        return graph
    return apply_cost(graph, cost, gpu, cache_folder=CACHE_FOLDER / "costs", device=device)


def build_quietly(settings: Settings) -> tuple[Subject, list[str]]:
    """`build`, and the warnings of frontends and cost models as lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subject = build(settings)
    return subject, list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)))
