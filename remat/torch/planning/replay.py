"""Who holds what while a plan runs: for explanations, and for graphs that are retained."""

from __future__ import annotations

import re

from remat.graph import Graph
from remat.plan import Plan
from remat.search.timeline import replayed
from remat.simulator import simulate
from remat.torch.step.training_graph import end_of

STEP = "(the step)"  # stands for values that no module makes


def group_of(module: str) -> str:
    """The path with * for every number, so that blocks count together."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module) or STEP


def held_values(graph: Graph, plan: Plan, i: int) -> set[int]:
    """Values that are held while computation `i` of a plan runs, its outputs included."""
    held, computed = set[int](), -1
    for k, new, others in replayed(graph, plan):
        held.update(new)
        if k < 0:
            held.difference_update(others)
            continue
        computed += 1
        if computed == i:
            break
    return held


def retained_peak(graph: Graph, plan: Plan, accumulates: bool) -> int:
    """The peak of a step whose graph is retained for several backward passes.

    What is saved for the backward pass then stays to its end, and the gradients of the pass before are held too.

    Args:
        accumulates: whether `fixed_bytes` counts gradients that are there before.
    """
    trace, end = simulate(graph, plan), end_of(graph)
    at = trace.order.tolist().index(end)
    made = [v for v, value in enumerate(graph.values) if value.keep and graph.producer[v] > end]
    earlier = 0 if accumulates else sum(graph.values[v].bytes for v in made)
    begin_of_next = int(trace.running_bytes[at]) + earlier  # the loss is differentiated again
    saved, extra, peak, n = None, 0, max(trace.peak_bytes, begin_of_next), 0
    held = set[int]()
    for k, new, others in replayed(graph, plan):
        if k >= 0:
            if n == at + 1:
                saved = held - set(graph.operations[end].outputs)
            if saved is not None:
                peak = max(peak, int(trace.running_bytes[n]) + extra + earlier)
            held.update(new)
            n += 1
        else:
            held.difference_update(others)
            if saved is not None:
                extra += sum(graph.values[v].bytes for v in saved.intersection(others))
                saved.difference_update(others)
    return max(peak, trace.final_bytes + extra + earlier)
