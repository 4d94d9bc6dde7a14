"""Casts of parameters under autocast as in eager mode: once for all uses of a parameter.

Eager mode keeps a cast parameter until the outermost autocast region ends, so that gradients of all uses are added in
the lower precision and cast back once. Tracing casts again for every use, which rounds differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from remat.torch.internals import notes

aten = torch.ops.aten
_LOWER = (torch.bfloat16, torch.float16)
# Names of calls by which a model itself converts; eager mode does not keep their results.
_EXPLICIT = {"to", "type", "bfloat16", "half", "type_as"}


def cast_once(graph: fx.Graph, trained: Mapping[fx.Node, fx.Node]) -> None:
    """Cast every parameter in a training graph once per type, and add its gradients before they are cast back.

    Args:
        trained: placeholder of a leaf -> the node that the graph returns as its gradient.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for place, gradient in trained.items():
        total = gradient
        casts: dict[torch.dtype, list[fx.Node]] = {}
        for user in place.users:
            is_cast = user.target is aten._to_copy.default and user.meta["val"].dtype in _LOWER
            if is_cast and notes.called_by_name(user) not in _EXPLICIT:
                casts.setdefault(user.meta["val"].dtype, []).append(user)
        for dtype, several in casts.items():
            if len(several) < 2:
                continue
            first = min(several, key=position.__getitem__)
            for other in several:
                if other is not first:
                    other.replace_all_uses_with(first)
                    graph.erase_node(other)
            total = _add_before_casting(graph, total, dtype)


def _add_before_casting(graph: fx.Graph, total: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Replace a sum of which some terms were cast from `dtype`: add these terms first, and cast their sum."""
    terms = _terms(total)
    lower = [term.all_input_nodes[0] for term in terms if _is_cast_from(term, dtype)]
    if len(lower) < 2:
        return total
    back = next(term for term in terms if _is_cast_from(term, dtype))
    with graph.inserting_before(total):
        added = lower[0]
        for term in lower[1:]:
            added = _call(graph, aten.add.Tensor, (added, term), {}, total)
        result = _call(graph, back.target, (added,), dict(back.kwargs), total)
        for term in terms:
            if not _is_cast_from(term, dtype):
                result = _call(graph, aten.add.Tensor, (result, term), {}, total)
    sums = [total, *reversed(_inner(total))]
    total.replace_all_uses_with(result)
    for node in [*sums, *terms]:
        if not node.users:
            graph.erase_node(node)
    return result


def _call(graph: fx.Graph, target: Any, args: tuple[fx.Node, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    made.meta = notes.pass_of(like)
    made.meta["val"] = target(*(arg.meta["val"] for arg in args), **kwargs)
    return made


def _terms(node: fx.Node) -> list[fx.Node]:
    """The terms of a sum, in the order in which they are added."""
    return [term for source in node.all_input_nodes for term in _terms(source)] if _is_sum(node) else [node]


def _inner(node: fx.Node) -> list[fx.Node]:
    """The sums within a sum, each after the sums that it reads."""
    return [n for arg in node.all_input_nodes if _is_sum(arg) for n in (*_inner(arg), arg)] if _is_sum(node) else []


def _is_sum(node: fx.Node) -> bool:
    within = len(node.users) == 1 and not notes.is_in_forward(node)
    return node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2 and within


def _is_cast_from(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is aten._to_copy.default and node.all_input_nodes[0].meta["val"].dtype is dtype
