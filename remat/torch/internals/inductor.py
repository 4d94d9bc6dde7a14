"""Inductor: its code for two halves, in the order of a plan."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._guards import TracingContext

from remat.torch.internals.aot import PartitionFn, second_stage_later
from remat.torch.internals.operators import outside_modes, patched, replaced

Halves = tuple[fx.GraphModule, fx.GraphModule]
Partition = Callable[[fx.GraphModule, int], Halves]
Finish = Callable[[Partition], Any]
_GROUP = re.compile(r"remat_group_(\d+)_")


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
        groups: for each group of calls that it fuses, the buffers that the group fills; () with all that follows if the
            code was in Inductor's cache.
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


def settings_key() -> tuple[str, ...]:
    """What determines the code that Inductor generates for given halves: version, settings, threads, vector unit."""
    import torch._inductor.config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    own = torch._inductor.config.get_hash().hex(), functorch_config.get_hash().hex()
    return torch.__version__, *own, str(torch.get_num_threads()), str(pick_vec_isa())


def halfway(graph: fx.GraphModule, example_inputs: Sequence[Any], begin: Callable[[Finish], Any]) -> Any:
    """A graph as a function that is compiled only as far as the training graph, with Inductor's own passes over it.

    These decompose operators and draw random numbers from seeds; each seed is drawn once. Inductor then fuses calls of
    the halves, so that it needs other memory than the graph says.

    Args:
        begin: gets the rest of the compilation, a function of a partition, and returns what runs the graph. A partition
            is (training graph, number of forward outputs) -> (forward half, backward half). Inductor's passes run
            before the first one, later ones get the graph that the first one has left.
    """
    import torch._inductor.config  # takes seconds, like the next imports
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.virtualized import V

    def begin_boxed(finish: Callable[[PartitionFn | None], Any]) -> Any:
        fake_mode, is_first = TracingContext.get().fake_mode, True

        def finished(partition: Partition) -> Any:
            nonlocal is_first
            begins, is_first = is_first, False
            with _settings() as reused, V.set_fake_mode(fake_mode), torch.enable_grad(), enable_python_dispatcher():
                if begins:
                    with torch._inductor.config.patch(custom_partitioner_fn=_partitioner(partition)):
                        return finish(None)

                def partition_fn(module: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Halves:
                    halves = partition(module, num_fwd_outputs)
                    # A buffer that waits for its next use takes memory, of which the plan does not know.
                    has_groups = any(_GROUP.match(node.name) for half in halves for node in half.graph.nodes)
                    torch._inductor.config.allow_buffer_reuse = reused and not has_groups
                    return halves

                return finish(partition_fn)

        return begin(finished)

    with second_stage_later(begin_boxed), _settings():
        return compile_fx(graph, list(example_inputs))


def _partitioner(partition: Partition) -> Any:
    """A partition as Inductor takes it behind its own passes."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            with outside_modes():
                return partition(gm, kwargs["num_fwd_outputs"])

        def __deepcopy__(self, memo: Any) -> Partitioner:  # Inductor copies its settings
            return self

        def uuid(self) -> str:
            return "remat"

    return Partitioner()


@contextmanager
def _settings() -> Iterator[bool]:
    """Inductor's settings for the halves of plans; gives whether buffers are reused without a plan.

    Each half has its own key in Inductor's cache, which holds the calls that the plan put there. AOT autograd's own
    cache has a key that does not know the plan. The backward half is compiled at once, under these settings, not at the
    first call of backward.
    """
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomSchedulerPass

    class Ordered(CustomSchedulerPass):
        """Groups of calls run in the plan's order; calls of one group may be fused.

        Else Inductor moves repeated calls to earlier ones that read the same, and their results are held for too long.
        """

        def __call__(self, nodes: Any) -> Any:
            in_group = _grouped(nodes)
            return _keep_order(nodes, in_group) if in_group else nodes

        def uuid(self) -> str:
            return "remat"

    reuses_buffers = torch._inductor.config.allow_buffer_reuse
    with (
        torch._inductor.config.patch(_pre_fusion_custom_pass=Ordered(), allow_buffer_reuse=reuses_buffers),
        functorch_config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True, unlift_effect_tokens=True
        ),
    ):
        yield reuses_buffers


def name_in_group(name: str, group: int) -> str:
    """A name by which Inductor's scheduler keeps a call's place, see `halfway`."""
    return f"remat_group_{group}_{name}"


def _grouped(nodes: Sequence[Any]) -> dict[int, list[Any]]:
    """Nodes of Inductor's scheduler by the groups in the names of their calls."""
    in_group = dict[int, list[Any]]()
    for node in nodes:
        if found := _GROUP.match(_origin_name(node.node)):
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


def shown(finish: Finish, halves: Halves, *, whole: bool) -> tuple[LoweredHalf, LoweredHalf]:
    """What Inductor generates for two halves; no kernel is compiled.

    A later compilation of these halves finds the code in Inductor's cache.

    Args:
        whole: the groups are asked for, which that cache does not hold.
    """
    import torch._inductor.config

    found = _shown(finish, halves)
    if whole and not all(half.groups for half in found):
        with torch._inductor.config.patch(fx_graph_cache=False):
            found = _shown(finish, halves)
    forward, backward = found
    return forward, backward


def _shown(finish: Finish, halves: Halves) -> list[LoweredHalf]:
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen import cpp
    from torch._inductor.graph import GraphLowering
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.scheduler import Scheduler

    found, groups, new = list[LoweredHalf](), list[Any](), list[Any]()

    def fuse_nodes(self: Any, nodes: Any) -> Any:
        is_all = nodes is self.nodes  # else the nodes of one group, which it may fuse alone
        fused = fuse(self, nodes)
        if is_all:
            extern = tuple(any(each.is_extern() for each in node.get_nodes()) for node in fused)
            groups[:] = tuple(tuple(_buffers_of(node)) for node in fused), extern
        return fused

    def codegen(self: Any) -> Any:
        made = generate(self)
        new[:] = *groups, tuple(self.graph_input_names), tuple(self.get_output_names())
        return made

    def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(LoweredHalf(self.source_code, *(new or ((), (), (), ()))))
        new.clear()
        end(self, *args, **kwargs)

    def load(_key: str, path: str, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(call=_uncompiled, __file__=path)

    strides = _remembered(cpp.stride_at_vec_range)  # pyright: ignore[reportPrivateImportUsage]
    with patched(PyCodeCache, load_by_key_path=load), patched(cpp, stride_at_vec_range=strides):
        fuse, generate, end = Scheduler.fuse_nodes, GraphLowering.codegen, CompiledFxGraph.post_compile
        with (
            replaced(Scheduler, fuse_nodes=fuse_nodes), replaced(GraphLowering, codegen=codegen),
            replaced(CompiledFxGraph, post_compile=post_compile),
        ):  # fmt: skip
            finish(lambda *_: halves)
    return found


@functools.cache
def _remembered(function: Any) -> Any:
    """A function whose cache holds everything.

    Inductor's own, for strides in vectors on a CPU, holds 128: their algebra took 30 % of a U-Net's lowering.
    """
    return functools.cache(getattr(function, "__wrapped__", function))


def _uncompiled(_args: list[Any]) -> Any:
    raise AssertionError("this code was only shown")


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
