"""Every private interface of PyTorch that remat uses, and nothing else uses one (a test sees to it).

Checked with PyTorch 2.11.0, 2.13.0 and 2.15.0: ``make test-torch TORCH=2.15.0`` runs the tests with another version.
What is used, and where PyTorch keeps it:

- trees of tensors: ``torch.utils._pytree``
- tensors without contents: ``torch._subclasses.fake_tensor``, the one place where their kinds are dispatched included
- dispatch modes: ``torch.utils._python_dispatch``
- Dynamo: its settings, its stance, its exceptions, what it writes into a graph's nodes
- AOT autograd: its entry, its settings, its descriptions of inputs and outputs, its guess of a gradient's layout
- the min-cut partitioner and its settings; Inductor's entry, and the partitioner that it can be given
- kernels that are registered for tracing: ``OpOverload.py_kernels``, `torch._C.DispatchKey`
- native recurrent layers: ``torch._VF``; their list of weights
- the identity of a storage, the base of a view, the tables of tensors of a module, the profiler's events

Operators (``torch.ops.aten``) are not private, though names of some begin with an underscore: graphs are made of them.
"""

# ruff: noqa: F401 - the other modules import from here what is only imported here

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    ViewBaseAOTInput,
)
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.graph import _BoxedCodeGen
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map

outside_modes, current_dispatch_mode = _disable_current_modes, _get_current_dispatch_mode
_Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]


# Tensors, storages and modules


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share a storage; fake tensors have no address that would say so."""
    return tensor.untyped_storage()._cdata


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has shape and dtype, but no contents."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of; None if it is no view."""
    return tensor._base


def module_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own tables of parameters and of buffers."""
    return module._parameters, module._buffers


def share_tables(module: nn.Module, model: nn.Module) -> None:
    """Let `module` have the parameters, buffers and submodules of `model`, those that are added later too."""
    for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        module.__dict__[shared] = getattr(model, shared)


def flat_weights(layer: nn.RNNBase) -> list[Any]:
    """Weights of a recurrent layer in the order in which its kernel takes them."""
    return layer._flat_weights


def memory_events(profiler: Any) -> list[Any]:
    """Allocations and frees that `torch.autograd.profiler` saw, in their order; each has ``nbytes()``."""
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    return sorted(events, key=lambda e: e.start_ns())


# Operators and kernels

_TRACED_INSTEAD = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


def schema_of(target: Any) -> Any:
    """The schema of an operator; None for another function."""
    return getattr(target, "_schema", None)


def native_recurrent(kind: str) -> Callable[..., Any]:
    """The function that a recurrent layer calls: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    return getattr(torch._VF, kind)


def composite_kernel(op: OpOverload, *args: Any) -> Any:
    """Call the kernel that makes `op` of other operators."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


@contextmanager
def kernels_instead(instead: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    """Take away the formulas that PyTorch registers for tracing operators, and use others where they are given.

    Only a call of the model is replaced, not one that another formula makes.
    """
    taken = []
    try:
        for op, function in instead.items():
            taken.append((op, {key: op.py_kernels.pop(key) for key in _TRACED_INSTEAD if key in op.py_kernels}))
            if function is not None:
                composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
                keys = _TRACED_INSTEAD if composite else _TRACED_INSTEAD[:1]
                op.py_kernels.update(dict.fromkeys(keys, function))
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in taken:
            for key in _TRACED_INSTEAD:
                op.py_kernels.pop(key, None)
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


@contextmanager
def corrected_fakes(correct: Callable[[FakeTensorMode, Any, Any, Any], Any]) -> Iterator[None]:
    """Let `correct` change what operators make of tensors without contents.

    Args:
        correct: (mode, operator, arguments, what PyTorch says it makes) -> what it makes.
    """
    dispatch = FakeTensorMode.dispatch

    def corrected(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return correct(self, func, args, dispatch(self, func, types, args, kwargs))

    FakeTensorMode.dispatch = corrected
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch


# Dynamo


@contextmanager
def compiler_settings(most_graphs: int) -> Iterator[None]:
    """The compiler's settings under which steps are captured and executed.

    Recurrent layers are let through; `most_graphs` shapes and modes may each have their graph;
    DistributedDataParallel must not cut it into buckets; hooks that are added later are noticed; sizes of
    storages do not depend on what was captured before. The backward pass of eager mode does not cast, whatever casts
    around the forward pass. An operator that refuses its arguments raises without a traceback in PyTorch's log.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        with functorch_config.patch(backward_pass_autocast="off"), torch._dynamo.config.patch(
            allow_rnn=True, recompile_limit=most_graphs, accumulated_recompile_limit=4 * most_graphs,
            optimize_ddp=False, skip_nnmodule_hook_guards=False, fake_tensor_cache_enabled=False,
        ):  # fmt: skip
            yield
    finally:
        log.disabled = was


def compiler_is_disabled() -> bool:
    """Whether ``TORCHDYNAMO_DISABLE`` or the setting behind it is on."""
    return torch._dynamo.config.disable


def compiler_stance() -> str:
    """What `torch.compiler.set_stance` was last given."""
    return torch._dynamo.eval_frame._stance.stance


def primals_of(graph: fx.GraphModule) -> tuple[Any, ...]:
    """The real tensors behind the placeholders of a graph that Dynamo hands to its backend."""
    return tuple(node.meta["grapharg"].example for node in graph.graph.find_nodes(op="placeholder"))


def example_of(node: fx.Node) -> Any:
    """What a node of such a graph holds, without contents."""
    return node.meta["example_value"]


# What AOT autograd writes into the nodes of a training graph

FORWARD, BACKWARD = "is_forward", "is_backward"
COPIED_META = ("val", "tensor_meta", "desc")  # of a placeholder that stands for the same in another graph


def in_pass(which: str) -> dict[str, str]:
    """Meta of a node in the pass `which`, ``FORWARD`` or ``BACKWARD``."""
    return {"partitioner_tag": which}


def pass_of(node: fx.Node) -> dict[str, str]:
    """Meta of a node in the same pass as `node`."""
    return {key: node.meta[key] for key in ("partitioner_tag",) if key in node.meta}


def is_in_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == FORWARD


def is_in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in (BACKWARD, "must_be_in_backward")


def called_by_name(node: fx.Node) -> Any:
    """What the model called, where that is known by name (``to``) or as a function."""
    behind = node.meta.get("source_fn_stack") or [("", None)]
    return behind[-1][1]


def primal_index(place: fx.Node) -> int:
    """Which primal a placeholder stands for."""
    description: Any = place.meta["desc"]
    return description.idx


def differentiated_output(tangent: fx.Node) -> Any:
    """The description of the output that a placeholder holds the gradient of; None if it is of an input."""
    return getattr(tangent.meta["desc"], "output", None)


def descriptions_of_outputs(graph: fx.Graph) -> list[Any]:
    """Of the outputs of a training graph."""
    return list(graph.find_nodes(op="output")[0].meta["desc"])


def with_descriptions(end: fx.Node, descriptions: Sequence[Any], n_saved: int) -> None:
    """Describe the outputs of a half; its last `n_saved` are saved for backward."""
    end.meta["desc"] = [*descriptions, *(SavedForBackwardsAOTOutput(i) for i in range(n_saved))]


def is_plain_output(description: Any) -> bool:
    """Whether an output is what the module returned itself."""
    return isinstance(description, PlainAOTOutput)


def is_view_base(place: fx.Node) -> bool:
    """Whether a placeholder stands for the common base of arguments that overlap."""
    return isinstance(place.meta["desc"], ViewBaseAOTInput)


def mutated_input(description: Any) -> int | None:
    """Which primal an output holds the new contents of."""
    mutated: Any = description.mutated_input if isinstance(description, InputMutationAOTOutput) else None
    return None if mutated is None else mutated.idx


# AOT autograd


@contextmanager
def gradients_without_holes() -> Iterator[None]:
    """Let the gradient of an output that is a part of a larger tensor be dense, as one that a loss makes is.

    By default the backward pass takes it in the output's strides: of ``x[:, 0]`` it would be as large as ``x``.
    """
    name = "coerce_tangent_and_suggest_memory_format"
    original = getattr(collect_metadata_analysis, name)

    def dense(output: Any) -> Any:
        made, layout, is_other = original(output)
        if (
            type(layout).__name__ != "MemoryFormatMeta"
            or layout.stride is None
            or made.clone().stride() == made.stride()
        ):
            return made, layout, is_other
        made = made.clone()
        return made, type(layout).from_tensor(made), True

    setattr(collect_metadata_analysis, name, dense)
    try:
        yield
    finally:
        setattr(collect_metadata_analysis, name, original)


def forbid_overwriting() -> None:
    """While a half is compiled: backward overwrites nothing that it is given, so that it may run twice."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module's code as a function of one list, whose items it drops after their last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


def mark_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOT autograd that a function takes one list."""
    function._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def is_compiled_backward(node: Any) -> bool:
    """Whether a node of the autograd graph is a compiled backward half."""
    return "CompiledFunctionBackward" in node.name()


def min_cut(module: fx.GraphModule, n_forward_outputs: int, costs: Mapping[str, int], share: float) -> fx.GraphModule:
    """The forward half of a training graph as PyTorch's own partitioner cuts it; names of nodes stay.

    Args:
        costs: of calls by their names; others cost 0.
        share: ``activation_memory_budget``, of the bytes that would be saved without recomputation.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

    class Costs(CustomRuntimeEstimator):
        def __call__(self, node: fx.Node) -> float:
            return float(costs.get(node.name, 0))

        def uuid(self) -> None:
            """None: nothing is to be cached."""

    settings: dict[str, Any] = {
        "activation_memory_budget": share,
        "activation_memory_budget_solver": "dp",
        "activation_memory_budget_runtime_estimator": Costs(),
        "cse": False,  # what remains keeps its names
    }
    with functorch_config.patch(settings):
        return min_cut_rematerialization_partition(module, (), num_fwd_outputs=n_forward_outputs)[0]


def inductor(graph: fx.GraphModule, example_inputs: Sequence[Any], partition: _Partition) -> Callable[..., Any]:
    """A backend that has Inductor compile both halves.

    Inductor asks for a partition of the training graph after its own passes over it. These decompose operators and
    draw random numbers from seeds; each seed is drawn once. It then fuses calls, so that the memory it needs is
    not quite the plan's.
    """
    import torch._inductor.config  # takes seconds, as the next ones
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            with outside_modes():
                return partition(gm, kwargs["num_fwd_outputs"])

        def __deepcopy__(self, memo: Any) -> Partitioner:  # Inductor copies its settings
            return self

        def uuid(self) -> str:
            """A new one each time: what is compiled depends on the plan, so nothing in Inductor's caches serves."""
            return uuid.uuid4().hex

    with torch._inductor.config.patch(custom_partitioner_fn=Partitioner()):
        return compile_fx(graph, list(example_inputs))  # pyright: ignore[reportReturnType]
