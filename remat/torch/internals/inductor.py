"""Inductor: its code for two halves, in the order of a plan."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._guards import tracing as tracing_in

from remat.torch.internals.aot import _copied
from remat.torch.internals.operators import outside_modes, replaced

_Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of generated code.

    Attributes:
        name: in the code.
        node: of the half for which it was made; '' if that is not known.
        is_result: whether it is that node's result; else perhaps a part of it, or an argument in another layout.
        bytes: its size; 0 if it has no storage of its own.
    """

    name: str
    node: str
    is_result: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class LoweredHalf:
    """What Inductor makes of the forward or the backward half.

    Attributes:
        source: the generated code; it defines ``call``, which takes one list.
        groups: for each group of calls that it fuses, the buffers that the group fills.
        is_extern: for each group whether it is a call of a library, not generated code.
        inputs, outputs: names in the code, of those that are tensors.
    """

    source: str
    groups: tuple[tuple[Buffer, ...], ...]
    is_extern: tuple[bool, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def records_cuda_graphs() -> bool:
    """Whether Inductor's settings ask for CUDA graphs."""
    import torch._inductor.config

    return torch._inductor.config.triton.cudagraphs


def inductor(graph: fx.GraphModule, example_inputs: Sequence[Any], partition: _Partition) -> Callable[..., Any]:
    """A backend that lets Inductor compile both halves.

    Inductor asks for a partition of the training graph after its own passes over it. These decompose operators and
    draw random numbers from seeds; each seed is drawn once. It then fuses calls, so that it needs other memory than the
    graph says.
    """
    import torch._inductor.config  # takes seconds, like the next imports
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, CustomSchedulerPass

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            with outside_modes():
                return partition(gm, kwargs["num_fwd_outputs"])

        def __deepcopy__(self, memo: Any) -> Partitioner:  # Inductor copies its settings
            return self

        def __reduce__(self) -> Any:  # as a part of the key of Inductor's cache
            return str, (self.uuid(),)

        def uuid(self) -> str:
            """Always the same: each half has its own key, which holds the calls that the plan put there."""
            return "remat"

    class Ordered(CustomSchedulerPass):
        """Groups of calls run in the plan's order; calls of one group may be fused.

        Else Inductor moves repeated calls to earlier ones that read the same, and their results are held for too long.
        """

        def __call__(self, nodes: Any) -> Any:
            in_group = _grouped(nodes)
            # A buffer that waits for its next use takes memory, of which the plan does not know.
            torch._inductor.config.allow_buffer_reuse = reuses_buffers and not in_group
            return _keep_order(nodes, in_group) if in_group else nodes

        def uuid(self) -> str:
            return "remat"

    reuses_buffers = torch._inductor.config.allow_buffer_reuse
    # AOT autograd's own cache has a key that does not know the plan. The backward half is compiled at once, under
    # these settings, not at the first call of backward.
    with (
        torch._inductor.config.patch(
            custom_partitioner_fn=Partitioner(), _pre_fusion_custom_pass=Ordered(), allow_buffer_reuse=reuses_buffers
        ),
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
    ):
        return compile_fx(graph, list(example_inputs))  # pyright: ignore[reportReturnType]


def name_in_group(name: str, group: int) -> str:
    """A name by which Inductor's scheduler keeps a call's place, see `inductor`."""
    return f"remat_group_{group}_{name}"


def _grouped(nodes: Sequence[Any]) -> dict[int, list[Any]]:
    """Nodes of Inductor's scheduler by the groups in the names of their calls."""
    in_group = dict[int, list[Any]]()
    for node in nodes:
        if found := re.match(r"remat_group_(\d+)_", _origin_name(node.node)):
            in_group.setdefault(int(found[1]), []).append(node)
    return in_group


def _keep_order(nodes: Sequence[Any], in_group: Mapping[int, Sequence[Any]]) -> Any:
    """The nodes of Inductor's scheduler, of which each waits for the group before its own."""
    from torch._inductor.dependencies import WeakDep

    for before, i in itertools.pairwise(sorted(in_group)):
        ends = _read_outside(in_group[before])
        for node in in_group[i]:
            for name in ends - {dep.name for dep in node.unmet_dependencies}:
                node.add_fake_dep(WeakDep(name, node.get_name(), is_fake=True))
    scheduler = nodes[0].scheduler
    scheduler.nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()
    return scheduler.nodes


def _origin_name(node: Any) -> str:
    """The name of the call whose result a node of Inductor's scheduler computes; '' if it is not known."""
    origin = node.get_origin_node() or next(iter(node.get_origins()), None)
    return "" if origin is None else origin.name


def _read_outside(group: Sequence[Any]) -> set[str]:
    """The buffers of nodes of Inductor's scheduler that others read; the last one if there are none.

    Nodes that run later may wait for these only: a buffer that nobody else waits for needs no memory.
    """
    own = {node.get_name() for node in group}
    outputs = [output for node in group for output in node.get_outputs()]
    read = {x.get_name() for x in outputs if any(user.get_name() not in own for user in x.users)}
    return read or {outputs[-1].get_name()}


Lowering = Callable[[_Partition], tuple[LoweredHalf, LoweredHalf]]


def lowering(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Lowering:
    """A function that shows what `inductor` generates for a partition; no kernel is compiled.

    Call this while Dynamo calls a backend, and the function at any time.
    """
    context, original = copy.copy(TracingContext.get()), fx.GraphModule(graph, _copied(graph.graph))

    def lowered(partition: _Partition) -> tuple[LoweredHalf, LoweredHalf]:
        again = fx.GraphModule(original, _copied(original.graph))
        with tracing_in(context), torch.enable_grad(), _only_code() as halves:
            inductor(again, example_inputs, partition)
        forward, backward = halves
        return forward, backward

    return lowered


@contextmanager
def _only_code() -> Iterator[list[LoweredHalf]]:
    """Let Inductor stop once it has written the code of a half, and note the code."""
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    halves, groups = list[LoweredHalf](), dict[Any, Any]()

    class Reader(CustomSchedulerPass):
        def __call__(self, nodes: Any) -> Any:
            extern = tuple(any(each.is_extern() for each in node.get_nodes()) for node in nodes)
            groups[V.graph] = tuple(tuple(_buffers_of(node)) for node in nodes), extern
            return nodes

        def uuid(self) -> str:
            return "remat"

    def compile_to_module(self: Any) -> Any:
        source = self.codegen()[0].value
        buffers, is_extern = groups[self]
        names = tuple(self.graph_input_names), tuple(self.get_output_names())
        halves.append(LoweredHalf(source, buffers, is_extern, *names))
        return SimpleNamespace(call=None)

    config = torch._inductor.config.patch(_post_fusion_custom_pass=Reader(), fx_graph_cache=False)
    with replaced(GraphLowering, compile_to_module=compile_to_module), config:
        yield halves


def _buffers_of(group: Any) -> Iterator[Buffer]:
    """The buffers that a fused group of Inductor's scheduler fills."""
    from torch._inductor.ir import Layout, NonOwningLayout

    for node in group.get_nodes():
        for output in node.get_outputs():
            name = _origin_name(output.node) or _origin_name(node.node)
            layout = output.node.layout
            owns = isinstance(layout, Layout) and not isinstance(layout, NonOwningLayout)
            size = int(layout.storage_size()) * layout.dtype.itemsize if owns else 0
            yield Buffer(output.get_name(), name, output.node.get_origin_node() is not None, size)
