"""The output projection and cross-entropy of a captured step as one call, of which a plan chooses the number of chunks.

The calls from the projection to the loss, and from the gradient of the loss to those of hidden states, weight and bias,
become `remat.linear_cross_entropy` in the forward pass, which makes the gradients for a gradient of 1, and
`scaled_gradient` in the backward pass, which counts as a view because it works in place. Calls are replaced only if
nothing else reads the logits, their logarithms or their gradients. docs/decisions/0016-implementations.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.graph import reached
from remat.torch.implementations import logits
from remat.torch.internals.notes import is_in_backward, modules_as_of
from remat.torch.step.capture import TrainingGraph
from remat.torch.step.work import tensor_bytes

aten = torch.ops.aten
_RESHAPED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SAME = (aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default)
_TURNED = (aten.t.default, aten.permute.default, aten.transpose.int)
_OF_GRADIENT = (
    *_RESHAPED, *_SAME, *_TURNED, aten._log_softmax_backward_data.default, aten.nll_loss_backward.default,
    aten.slice_backward.default, aten.add.Tensor, aten.expand.default, aten.unsqueeze.default, aten.neg.default,
    aten.masked_fill.Scalar, aten.div.Tensor, aten.mul.Scalar,
)  # fmt: skip
TYPES = (torch.float32, torch.float64, torch.bfloat16)  # float16 would lose gradients that are not scaled yet


@dataclass(frozen=True, slots=True)
class _Loss:
    """The forward calls of a loss.

    Attributes:
        product: the projection, `mm` or `addmm`.
        lead, cut: see `logits.linear_cross_entropy`.
        logarithms: the call of `_log_softmax`.
        end: the node of the loss; `picked` is the call of `nll_loss_forward`.
        factor: of `nll_loss_forward` in the loss: 1 - label smoothing.
        calls: from the projection to the loss, without its result.
        masks: of labels, which other calls may read.
    """

    product: fx.Node
    lead: tuple[int, ...]
    cut: tuple[int, ...]
    logarithms: fx.Node
    picked: fx.Node
    end: fx.Node
    factor: float
    calls: frozenset[fx.Node]
    masks: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The backward calls of a loss.

    Attributes:
        upstream: the gradient of the loss.
        calls: from there to the gradient of the logits.
        ends: what makes the gradients of hidden states, weight and bias; None for one that is not asked for.
    """

    upstream: fx.Node
    calls: frozenset[fx.Node]
    ends: tuple[fx.Node | None, fx.Node | None, fx.Node | None]


def with_one_call(training_graph: TrainingGraph, n_chunks: int = 1) -> int:
    """Replace every output projection with its cross-entropy, where that needs less memory; returns how many.

    The graph is changed in place.

    Args:
        n_chunks: of the calls by default.
    """
    graph, n_replaced = training_graph.module.graph, 0
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        loss = _forward_calls(node)
        gradients = None if loss is None else _backward_calls(loss)
        if loss is not None and gradients is not None and _pays(loss, gradients):
            _replace(graph, loss, gradients, n_chunks)
            n_replaced += 1
    if n_replaced:
        graph.lint()
        training_graph.module.recompile()
    return n_replaced


def _forward_calls(picked: fx.Node) -> _Loss | None:
    """The calls that end in one of `nll_loss_forward`; None if they are others than those of a projection."""
    logarithms, labels, weights, reduction, ignored = picked.args
    first = _part(picked, 0)
    is_known = isinstance(logarithms, fx.Node) and logarithms.target is aten._log_softmax.default
    if not is_known or weights is not None or first is None or reduction not in (logits.MEAN, logits.SUM):
        return None
    assert isinstance(logarithms, fx.Node)
    assert isinstance(labels, fx.Node)
    chain = _up_to_product(logarithms.args[0])
    if chain is None or logarithms.meta["val"].dim() != 2 or logarithms.meta["val"].dtype not in TYPES:
        return None
    if logarithms.args[1] not in (1, -1):
        return None
    product, lead, cut, calls = chain
    smoothed = _smoothed(picked, logarithms, labels, ignored, reduction)
    end, factor, more, masks = smoothed or (first, 1.0, set[fx.Node](), set[fx.Node]())
    views = {user for user in logarithms.users if user.target is aten.detach.default}
    views |= {user for view in views for user in view.users if user.target is aten.detach.default}
    calls |= {logarithms, picked, *picked.users, *views, *more}
    return _Loss(product, lead, cut, logarithms, picked, end, factor, frozenset(calls - {end}), frozenset(masks))


def _part(node: fx.Node, index: int) -> fx.Node | None:
    return next((x for x in node.users if x.target is operator.getitem and x.args[1] == index), None)


def _up_to_product(node: Any) -> tuple[fx.Node, tuple[int, ...], tuple[int, ...], set[fx.Node]] | None:
    """(the projection, dimensions of the rows, the part of them that is taken, calls from it to `node`)."""
    chain = list[fx.Node]()
    while isinstance(node, fx.Node) and node.target not in (aten.mm.default, aten.addmm.default):
        if node.target not in (*_RESHAPED, *_SAME, aten.slice.Tensor):
            return None
        chain.append(node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.meta["val"].dtype not in TYPES:
        return None
    n_classes = node.meta["val"].shape[1]
    lead, cut = (), ()
    for call in reversed(chain):
        shape, before = tuple(call.meta["val"].shape), tuple(call.args[0].meta["val"].shape)  # pyright: ignore
        if shape[-1] != n_classes:
            return None
        if call.target is not aten.slice.Tensor or shape == before:
            continue
        _, dim, *rest = (*call.args, 0)
        if cut or dim in (-1, len(shape) - 1) or (len(call.args) > 4 and call.args[4] != 1):
            return None
        assert isinstance(dim, int)
        assert isinstance(rest[0], int)
        first = rest[0] if rest[0] >= 0 else rest[0] + before[dim]
        lead, cut = before[:-1], (dim, first, shape[dim])
    return node, lead, cut, {node, *chain}


def _smoothed(
    picked: fx.Node, logarithms: fx.Node, labels: fx.Node, ignored: Any, reduction: Any
) -> tuple[fx.Node, float, set[fx.Node], set[fx.Node]] | None:  # fmt: skip
    """(node of the loss, factor of the picked logarithms in it, further calls, masks of labels) with label smoothing.

    The calls are those of PyTorch's composite `cross_entropy_loss`.
    """
    total = _only(logarithms, aten.sum.dim_IntList, lambda x: x.args[1] in ([1], [-1]) and len(x.args) == 2)
    negative = _only(total, aten.neg.default)
    masked = _only(negative, aten.masked_fill.Scalar, lambda x: x.args[2] == 0)
    added = _only(masked, aten.sum.default)
    first = _part(picked, 0)
    if total is None or negative is None or masked is None or added is None or first is None:
        return None
    mask: Any = masked.args[1]
    is_mask = mask.target is aten.eq.Scalar and mask.args == (labels, ignored)
    masks, calls, last = {mask}, {total, negative, masked, added}, added
    if reduction == logits.MEAN:
        mean = _only(added, aten.div.Tensor)
        count: Any = None if mean is None else mean.args[1]
        if mean is None or not isinstance(count, fx.Node) or count.target is not aten.sum.default:
            return None
        kept: Any = count.args[0]
        is_mask &= kept.target is aten.bitwise_not.default
        is_mask &= kept.args == (mask,)
        masks, calls, last = masks | {count, kept}, calls | {mean}, mean
    spread, own = _only(last, aten.mul.Scalar), _only(first, aten.mul.Scalar)
    end = _only(spread, aten.add.Tensor, lambda x: set(x.args) == {spread, own} and not x.kwargs)
    if not is_mask or spread is None or own is None or end is None:
        return None
    n_classes, factor = logarithms.meta["val"].shape[1], own.args[1]
    assert isinstance(factor, float)
    assert isinstance(spread.args[1], float)
    if abs(factor + spread.args[1] * n_classes - 1) > 1e-9:
        return None
    return end, factor, calls | {spread, own, end}, masks


def _only(node: fx.Node | None, target: Any, fits: Callable[[fx.Node], Any] = lambda _: True) -> fx.Node | None:
    """The only user of this kind."""
    found = [] if node is None else [user for user in node.users if user.target is target and fits(user)]
    return found[0] if len(found) == 1 else None


def _backward_calls(loss: _Loss) -> _Gradients | None:
    """The calls that differentiate a loss; None if other calls read what would no longer be there."""
    of_picked = _only(loss.logarithms, aten.nll_loss_backward.default)
    upstream: Any = None if of_picked is None else of_picked.args[0]
    if loss.factor != 1 and isinstance(upstream, fx.Node):
        is_scaled = upstream.target is aten.mul.Scalar and upstream.args[1] == loss.factor
        upstream = upstream.args[0] if is_scaled else None
    if of_picked is None or not isinstance(upstream, fx.Node) or upstream.meta["val"].numel() != 1:
        return None
    ends = _ends(of_picked)
    of_logits = {end: _turned_from(end) for end in ends}
    if None in of_logits.values():
        return None
    labels, calls = {x for x in loss.picked.all_input_nodes if x is not loss.logarithms}, set[fx.Node]()
    todo = [node for own in of_logits.values() for node in own or ()]
    while todo:
        node = todo.pop()
        if node is upstream or node in {*calls, *labels, *loss.masks, *loss.calls}:
            continue
        if node.target not in _OF_GRADIENT or not is_in_backward(node):
            return None
        calls.add(node)
        todo.extend(node.all_input_nodes)
    found = _by_product(loss, ends)
    own = {*calls, *loss.calls, *ends}
    if found is None or any(user not in {*own, loss.end} for node in {*calls, *loss.calls} for user in node.users):
        return None
    return _Gradients(upstream, frozenset(calls), found)


def _ends(node: fx.Node) -> list[fx.Node]:
    """The calls behind a gradient that are none of `_OF_GRADIENT`, in the backward pass."""
    found = reached([node], lambda x: x.users if x.target in _OF_GRADIENT else ())
    return [x for x in found if x.target not in _OF_GRADIENT]


def _turned_from(end: fx.Node) -> list[fx.Node] | None:
    """What an end reads, if it is a product or a sum over rows."""
    if end.target is aten.mm.default:
        return [x for x in end.all_input_nodes if _has_gradient(x)]
    if end.target is aten.sum.dim_IntList and end.args[1] == [0]:
        return list(end.all_input_nodes)
    return None


def _has_gradient(node: fx.Node) -> bool:
    """Whether a node is of the backward pass, through views."""
    while node.target in (*_TURNED, *_RESHAPED):
        (node,) = node.all_input_nodes
    return is_in_backward(node)


def _by_product(loss: _Loss, ends: list[fx.Node]) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None] | None:
    """The ends that make the gradients of hidden states, weight and bias; None if there are others."""
    rows, turned = loss.product.args[-2:]
    assert isinstance(rows, fx.Node)
    assert isinstance(turned, fx.Node)
    n_classes, width = turned.meta["val"].shape[::-1]
    found: list[fx.Node | None] = [None, None, None]
    for end in ends:
        at = None
        if end.target is aten.sum.dim_IntList:
            at = 2 if tuple(end.args[1:3]) == ([0], True) and loss.product.target is aten.addmm.default else None
        else:
            one, other = end.args
            assert isinstance(one, fx.Node)
            assert isinstance(other, fx.Node)
            if _source(other) is _source(turned) and tuple(other.meta["val"].shape) == (n_classes, width):
                at = 0
            elif other is rows and tuple(end.meta["val"].shape) == (n_classes, width):
                at = 1
        if at is None or found[at] is not None:
            return None
        found[at] = end
    return None if not ends else (found[0], found[1], found[2])


def _source(node: fx.Node) -> fx.Node:
    while node.target in _TURNED:
        (node,) = node.all_input_nodes
    return node


def _pays(loss: _Loss, gradients: _Gradients) -> bool:
    """Whether what the one call holds to the backward pass is less than what the plain calls hold at once.

    They hold at least the logarithms and their gradient.
    """
    of_rows, of_weight, _ = gradients.ends
    held = [end.meta["val"] for end in (of_rows, of_weight) if end is not None]
    sums = 0
    if of_weight is not None and of_weight.meta["val"].dtype in logits.LOW:
        sums = 4 * of_weight.meta["val"].numel()
    return sum(map(tensor_bytes, held)) + sums < 2 * tensor_bytes(loss.logarithms.meta["val"])


def _replace(graph: fx.Graph, loss: _Loss, gradients: _Gradients, n_chunks: int) -> None:
    """Write the one call in the place of the loss, and take the others away."""
    product = loss.product
    bias, rows, turned = (None, *product.args) if product.target is aten.mm.default else product.args
    asked = [end is not None for end in gradients.ends]
    _, labels, _, reduction, ignored = loss.picked.args
    meta = loss.picked.meta
    with graph.inserting_before(loss.picked):
        weight = _call(graph, aten.t.default, (turned,), meta)
        args = (
            rows, weight, bias, labels, list(loss.lead), list(loss.cut), ignored, reduction, round(1 - loss.factor, 12),
            loss.logarithms.meta["val"].dtype, asked, n_chunks,
        )  # fmt: skip
        whole = _call(graph, logits.OPERATOR, args, meta | modules_as_of(product))
        parts = [_call(graph, operator.getitem, (whole, i), meta) for i in range(4)]
    loss.end.replace_all_uses_with(parts[0])
    for end, part in zip(gradients.ends, parts[1:], strict=True):
        if end is not None:
            with graph.inserting_before(end):
                scaled = _call(graph, logits.scaled_gradient, (part, gradients.upstream), end.meta)
                if tuple(end.meta["val"].shape) != tuple(part.meta["val"].shape):  # the sum keeps its dimension
                    scaled = _call(graph, aten.view.default, (scaled, list(end.meta["val"].shape)), end.meta)
            end.replace_all_uses_with(scaled)
    gone = {*loss.calls, loss.end, *gradients.calls, *gradients.ends, *loss.masks}
    for node in reversed(list(graph.nodes)):
        if node in gone and not node.users:
            graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> fx.Node:
    made = graph.call_function(target, args)
    made.meta = {**meta, "val": target(*fx.map_arg(args, lambda node: node.meta["val"]))}
    return made
