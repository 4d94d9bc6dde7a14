"""What Dynamo and AOT autograd write into the nodes of their graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    ViewBaseAOTInput,
)
from torch.utils.checkpoint import CheckpointPolicy

Modules = Sequence[tuple[str, str]]  # (path from the traced function, class) of nested modules, the outermost first


def modules_of(node: fx.Node) -> Modules:
    """The modules that were running when a node was made; none if that is not known."""
    return _named(node.meta.get("nn_module_stack") or {})


def modules_as_of(node: fx.Node) -> dict[str, Any]:
    """Notes that place another call in the modules of this one."""
    return {"nn_module_stack": node.meta.get("nn_module_stack")}


def _named(stack: Mapping[str, tuple[str, Any]]) -> Modules:
    return [(path, getattr(kind, "__name__", str(kind))) for path, kind in stack.values()]


def primals_of(graph: fx.GraphModule) -> tuple[Any, ...]:
    """The real tensors behind the placeholders of a graph that Dynamo hands to its backend."""
    return tuple(node.meta["grapharg"].example for node in graph.graph.find_nodes(op="placeholder"))


def grad_mode_after(node: fx.Node, before: bool) -> bool:
    """Whether gradients are on after a call of such a graph."""
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else before


def example_of(node: fx.Node) -> Any:
    """What a node of such a graph makes, with tensors without contents; None if that is not noted."""
    return node.meta.get("example_value")


def is_function(node: fx.Node) -> bool:
    """Whether a node of such a graph is the call of a `torch.autograd.Function`."""
    return getattr(node.target, "__name__", "") == "autograd_function_apply"


FORWARD, BACKWARD = "is_forward", "is_backward"

COPIED_META = ("val", "tensor_meta", "desc")  # of a placeholder that holds the same tensor in another graph


def in_pass(which: str) -> dict[str, str]:
    """Meta of a node in the pass `which`, ``FORWARD`` or ``BACKWARD``."""
    return {"partitioner_tag": which}


def pass_of(node: fx.Node) -> dict[str, str]:
    """Meta of a node in the same pass as `node`."""
    return {key: node.meta[key] for key in ("partitioner_tag",) if key in node.meta}


def is_in_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in (FORWARD, "must_be_in_forward")


def is_checkpointed(node: fx.Node) -> bool:
    """Whether a call is inside of a checkpoint of the model's, which PyTorch runs again in the backward pass."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def is_in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in (BACKWARD, "must_be_in_backward")


def called_by_name(node: fx.Node) -> Any:
    """The name (``to``) or function that the model called, if it is known."""
    calls = node.meta.get("source_fn_stack") or [("", None)]
    return calls[-1][1]


def primal_index(place: fx.Node) -> int:
    """Index of the primal that a placeholder holds."""
    description: Any = place.meta["desc"]
    return description.idx


def is_tangent(place: fx.Node) -> bool:
    """Whether a placeholder of a training graph holds the gradient of an output."""
    return place.name.startswith("tangents")


def differentiated_output(tangent: fx.Node) -> Any:
    """The description of the output whose gradient a placeholder holds; None if it is the gradient of an input."""
    return getattr(tangent.meta["desc"], "output", None)


def descriptions_of_outputs(graph: fx.Graph) -> list[Any]:
    """Descriptions of the outputs of a training graph."""
    return list(graph.find_nodes(op="output")[0].meta["desc"])


def with_descriptions(end: fx.Node, descriptions: Sequence[Any], n_saved: int) -> None:
    """Describe the outputs of a half; its last `n_saved` are saved for backward."""
    end.meta["desc"] = [*descriptions, *(SavedForBackwardsAOTOutput(i) for i in range(n_saved))]


def is_plain_output(description: Any) -> bool:
    """Whether the module itself returned an output."""
    return isinstance(description, PlainAOTOutput)


def is_view_base(place: fx.Node) -> bool:
    """Whether a placeholder holds the common base of arguments that overlap."""
    return isinstance(place.meta["desc"], ViewBaseAOTInput)


def mutated_input(description: Any) -> int | None:
    """Index of the primal whose new contents an output holds; None for other outputs."""
    mutated: Any = description.mutated_input if isinstance(description, InputMutationAOTOutput) else None
    return None if mutated is None else mutated.idx


def module_path(node: fx.Node) -> str:
    """Path, in the model of a captured step, of the module whose forward function makes a node, or to whose backward
    pass it belongs; '' if none is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    return path.partition(".model")[2].lstrip(".")
