"""AOT autograd and its min-cut partitioner."""

from __future__ import annotations

import collections
import copy
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo import compiled_autograd
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._ops import OpOverload

from remat.torch.internals.operators import patched


def gradients_without_holes() -> AbstractContextManager[None]:
    """Let the gradient of an output that is a part of a larger tensor be dense, as a loss makes it.

    By default the backward pass takes it in the output's strides: for ``x[:, 0]`` it would be as large as ``x``.
    """
    original: Any = collect_metadata_analysis.coerce_tangent_and_suggest_memory_format

    def dense(output: Any) -> Any:
        gradient, layout, is_other = original(output)
        if type(layout).__name__ == "MemoryFormatMeta" and layout.stride is not None:
            without_holes = gradient.clone()
            if without_holes.stride() != gradient.stride():
                return without_holes, type(layout).from_tensor(without_holes), True
        return gradient, layout, is_other

    return patched(collect_metadata_analysis, coerce_tangent_and_suggest_memory_format=dense)


Boxed = Callable[[list[Any]], Any]
PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def second_stage_later(
    begin: Callable[[Callable[[PartitionFn | None], Boxed]], Boxed],
) -> AbstractContextManager[None]:
    """Let AOT autograd end behind its first stage, the capture of the training graph.

    The second one, from the training graph to a compiled function, may then run later, and several times.

    Args:
        begin: (the second stage, a function of a partition function, or of None for the compiler's own) -> what AOT
            autograd is to return as compiled. While `begin` runs, the compiler is as during a compilation.
    """
    original: Any = aot_autograd.aot_stage2_compile  # pyright: ignore[reportPrivateImportUsage]

    def stage(state: Any, captured: Any, own_partition_fn: PartitionFn, *compilers: Any) -> Any:
        if not state.needs_autograd:
            return original(state, captured, own_partition_fn, *compilers)
        context, compilation = TracingContext.try_get(), CompileContext.try_get()

        def finish(partition_fn: PartitionFn | None) -> Boxed:
            partition_fn = partition_fn or own_partition_fn
            # This stage would print all graphs, whether somebody reads that or not.
            quiet = replace(state.aot_config, enable_log=False)
            own = replace(state, fw_metadata=_copied_metadata(state.fw_metadata), aot_config=quiet)
            if TracingContext.try_get() is context:
                return original(own, captured, partition_fn, *compilers)[0]
            with tracing(context), compile_context(compilation), compiled_autograd._disable():
                return original(own, captured, partition_fn, *compilers)[0]

        return begin(finish), state.fw_metadata

    return patched(aot_autograd, aot_stage2_compile=stage)


def _copied_metadata(metadata: Any) -> Any:
    """A copy into whose attributes, dicts and lists the second stage may write."""
    copied = copy.copy(metadata)
    for name, value in vars(metadata).items():
        if isinstance(value, (dict, list, set)):
            setattr(copied, name, copy.copy(value))
    return copied


def forbid_overwriting() -> None:
    """Call while a half is compiled: backward then overwrites none of its arguments, so that it may run twice."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def boxed(module: fx.GraphModule) -> Boxed:
    """The module's code as a function of one list, whose items it drops after their last use.

    Functions and constants are bound once. The code that `fx` writes looks up every operator in each step, and calls it
    through a function in Python.
    """
    code = _Code(module)
    places = module.graph.find_nodes(op="placeholder")
    taken = "".join(f"{code.names.setdefault(x, f'v{i}')}, " for i, x in enumerate(places))
    lines = [f"{taken} = args" if taken else "", "args.clear()", code.dropped(x for x in places if not x.users)]
    for node in module.graph.nodes:
        if node.op == "get_attr":
            code.names[node] = code.bound_to(operator.attrgetter(str(node.target))(module))
        elif node.op == "output":
            lines.append(f"return {code.written(node.args[0])}")
        elif node not in code.names:
            call = code.call(node)
            code.names[node] = f"v{len(code.names)}"
            lines += [f"{code.names[node]} = {call}", code.dropped(code.ends[node])]
    body = "".join(f"    {line}\n" for line in lines if line)
    exec(f"def run(args):\n{body}", code.bound)
    return code.bound["run"]


_aten = torch.ops.aten
# PyTorch's own functions for frequent operators, with the same positional arguments: they read these in C++, where an
# operator that is called from Python matches each with its schema. Only calls without keywords take them.
FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add, _aten.addmm.default: torch.addmm, _aten.bmm.default: torch.bmm,
    _aten.clone.default: torch.clone, _aten.convolution.default: torch.convolution,
    _aten.expand.default: torch.Tensor.expand, _aten.mm.default: torch.mm, _aten.mul.Tensor: torch.mul,
    _aten.native_dropout.default: torch.native_dropout, _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.permute.default: torch.permute, _aten.relu.default: torch.relu, _aten.select.int: torch.select,
    _aten.squeeze.dim: torch.squeeze, _aten.sum.dim_IntList: torch.sum, _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose, _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
}  # fmt: skip


def _function(node: fx.Node) -> Callable[..., Any]:
    target: Any = node.target
    if not node.kwargs and target in FUNCTIONS:
        return FUNCTIONS[target]
    return target._op if type(target) is OpOverload else target


class _Code:
    """Parts of a graph's code.

    Attributes:
        ends: node -> values that nothing behind it reads.
        names: of values, in the code.
        bound: constants and functions by name.
    """

    def __init__(self, module: fx.GraphModule):
        self.ends = collections.defaultdict[fx.Node, list[fx.Node]](list)
        for x in module.graph.nodes:
            if x.op != "get_attr" and (x.users or x.op == "call_function"):
                self.ends[max(x.users, default=x)].append(x)
        self.names = dict[fx.Node, str]()
        self.bound = dict[str, Any]()
        self._functions = dict[Any, str]()

    def bound_to(self, value: Any) -> str:
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name

    def call(self, node: fx.Node) -> str:
        assert node.op == "call_function"
        args = [self.written(x) for x in node.args] + [f"{key}={self.written(x)}" for key, x in node.kwargs.items()]
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        function = _function(node)
        if function not in self._functions:
            self._functions[function] = self.bound_to(function)
        return f"{self._functions[function]}({', '.join(args)})"

    def written(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return self.names[x]
        if isinstance(x, (tuple, list)):
            items = "".join(f"{self.written(item)}, " for item in x)
            return f"({items})" if isinstance(x, tuple) else f"[{items}]"
        if isinstance(x, dict):
            return "{" + "".join(f"{key!r}: {self.written(value)}, " for key, value in x.items()) + "}"
        if isinstance(x, slice):
            return f"slice({', '.join(map(self.written, (x.start, x.stop, x.step)))})"
        return repr(x) if x is None or type(x) in (bool, int, str) else self.bound_to(x)

    def dropped(self, values: Iterable[fx.Node]) -> str:
        names = [self.names[x] for x in values]
        return f"del {', '.join(names)}" if names else ""


def mark_boxed(function: Boxed) -> Boxed:
    """Tell AOT autograd that a function takes one list."""
    function._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


_PARTITIONER = threading.Lock()  # its settings and the fake tensors of a step belong to one thread at a time


def min_cut(
    module: fx.GraphModule, n_forward_outputs: int, costs: Mapping[str, int] | None, share: float = 1.0,
    solver: str = "dp",
) -> tuple[fx.GraphModule, fx.GraphModule]:  # fmt: skip
    """The halves of a training graph as `torch.compile` cuts it; names of nodes stay, and `module` does not change.

    Args:
        costs: of calls by their names, others cost 0; None for PyTorch's own estimate, its counter of FLOPs.
        share: ``activation_memory_budget``, of the bytes that would be saved without recomputation.
        solver: ``activation_memory_budget_solver``.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

    class Costs(CustomRuntimeEstimator):
        def __call__(self, node: fx.Node) -> float:
            return 0.0 if costs is None else float(costs.get(node.name, 0))

        def uuid(self) -> None:
            """None, so that nothing is cached."""

    copied = fx.GraphModule(module, _copied(module.graph))
    copied.graph.find_nodes(op="output")[0].meta.update(module.graph.find_nodes(op="output")[0].meta)
    settings: dict[str, Any] = {
        "activation_memory_budget": share,
        "activation_memory_budget_solver": solver,
        "activation_memory_budget_runtime_estimator": "flops" if costs is None else Costs(),
        "cse": False,  # so that nodes keep their names
    }
    with _PARTITIONER, functorch_config.patch(settings):
        return min_cut_rematerialization_partition(copied, (), num_fwd_outputs=n_forward_outputs)


def _copied(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def merge_equal_calls(module: fx.GraphModule) -> None:
    """Compute equal calls of a training graph once, as PyTorch's own partitioner does first."""
    from torch._functorch.compile_utils import fx_graph_cse

    end = module.graph.find_nodes(op="output")[0]
    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)
    module.graph.find_nodes(op="output")[0].meta.update(end.meta)
