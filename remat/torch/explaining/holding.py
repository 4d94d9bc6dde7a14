"""What a GPU holds beside the values of a step, alone or as one of several ranks, and what would change it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from remat.cost import CostWarning, Gpu, apply_cost
from remat.errors import InvalidInput
from remat.graph import Graph, Operation
from remat.simulator import plain_peak
from remat.torch.explaining.gpu_kernels import allocated, library_bytes
from remat.torch.resident.optimizer import STATES, TEMPORARIES, state_bytes
from remat.torch.resident.shard import bytes_per_rank, check_ranks
from remat.torch.resident.updates import UPDATE_KIND

GRADIENTS, GATHERED, PASSING = "gradients", "gathered parameters", "gathered gradients"
RANKS = (2, 8)  # over which dividing is tried


@dataclass(frozen=True, slots=True)
class Holding:
    """Parameters and optimizer state on a GPU.

    Attributes:
        parameters_bytes: of the whole model, which a step's fixed bytes contain.
        bytes_of: what is there throughout, beside buffers and inputs.
        shard: number of ranks over which gradients are divided; None: they are not.
        passing_bytes: most gradients that exist in full until they are divided.
    """

    gpu: Gpu
    parameters_bytes: int
    bytes_of: Mapping[str, int]
    shard: int | None = None
    passing_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module, gpu: Gpu, optimizer: str | int | None, shard: int | None) -> Holding:
        """Of a model, or of one of `shard` ranks over which `fully_shard` divides it.

        Raises:
            InvalidInput: FSDP2 cannot divide it.
        """
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        if shard is None:
            state = state_bytes(optimizer, model.parameters())
            return cls(gpu, whole, {"parameters": whole, "optimizer state": state})
        check_ranks(model, shard)
        each = bytes_per_rank(model, shard, optimizer)
        throughout = {name: each[name] for name in ("parameters", "optimizer state")}
        throughout[GATHERED] = each["gathered"] - each[PASSING]
        return cls(gpu, whole, throughout, shard, each[PASSING])

    @property
    def beside_bytes(self) -> int:
        """Bytes that are there throughout beside a step's parameters, buffers and inputs."""
        return sum(self.bytes_of.values()) - self.parameters_bytes

    def held(self, graph: Graph) -> Graph:
        """A captured step, `beside_bytes` among its fixed bytes, as the GPU's allocator holds it.

        Of what FSDP2 gathers in passing, parameters count throughout; gradients in the workspaces of operations, from
        where they are made, up to as many as there are at once.
        """
        graph = allocated(self._divided(graph) if self.passing_bytes else graph, self.gpu)
        return graph.resized(fixed_bytes=graph.fixed_bytes + library_bytes(graph, self.gpu))

    def framework_peak(self, held_bytes: int, needs: Sequence[int]) -> int:
        """Bytes of the framework's own step, in which what FSDP2 gathers is part of `needs`.

        Args:
            held_bytes: fixed bytes of the held step.
        """
        return held_bytes - self.bytes_of.get(GATHERED, 0) + max(needs, default=0)

    def _divided(self, graph: Graph) -> Graph:
        gradients, passing, operations = kept_gradients(graph), 0, list[Operation]()
        for op in graph.operations:
            passing += sum(graph.values[v].bytes for v in op.outputs if v in gradients)
            workspace = op.workspace_bytes + min(passing, self.passing_bytes)
            operations.append(replace(op, workspace_bytes=workspace))
        values = tuple(
            replace(value, bytes=-(-value.bytes // (self.shard or 1))) if v in gradients else value
            for v, value in enumerate(graph.values)
        )
        return graph.resized(operations, values)

    def costed(self, graph: Graph) -> Graph:
        """The graph with the costs of the GPU's roofline."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CostWarning)  # the costs are a model
            return apply_cost(graph, "roofline", self.gpu)

    def bytes_by_name(self, graph: Graph) -> dict[str, int]:
        """Bytes of everything that is there throughout a held step, and of the gradients."""
        library = library_bytes(graph, self.gpu)
        return {
            **self.bytes_of,
            "buffers and inputs": graph.fixed_bytes - sum(self.bytes_of.values()) - library,
            "cuBLAS's workspace": library,
            **({PASSING: self.passing_bytes} if self.passing_bytes else {}),
            GRADIENTS: sum(graph.values[v].bytes for v in kept_gradients(graph)),
        }


def changes(captured: Graph, model: nn.Module, holding: Holding, optimizer: str | int | None) -> dict[str, int]:
    """Bytes that other choices add to the peak of a captured step, as `Holding.held` takes it."""
    graph = holding.held(captured)
    peak = plain_peak(graph)
    found = {
        name: plain_peak(changed) - peak for name, changed in _changed(graph, optimizer, holding.shard is not None)
    }
    n_tensors = STATES.get(optimizer.lower(), 0) if isinstance(optimizer, str) else 0
    trained = [p for p in model.parameters() if p.requires_grad]
    n_numbers = sum(p.numel() for p in trained) * n_tensors // (holding.shard or 1)
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        if n_numbers and {p.element_size() for p in trained} != {size}:
            found[f"{optimizer} in {dtype}"] = size * n_numbers - holding.bytes_of["optimizer state"]
    if holding.shard is None and (optimizer is None or str(optimizer).lower() in STATES):
        for ranks in RANKS:
            try:
                rank = Holding.of(model, holding.gpu, optimizer, ranks)
            except InvalidInput:  # shard= says why
                break
            fixed_bytes = captured.fixed_bytes - holding.beside_bytes + rank.beside_bytes
            found[f"a rank of shard={ranks}"] = plain_peak(rank.held(captured.resized(fixed_bytes=fixed_bytes))) - peak
    return found


def _changed(graph: Graph, optimizer: str | int | None, is_rank: bool) -> Iterator[tuple[str, Graph]]:
    gradients = kept_gradients(graph)
    kept = sum(graph.values[v].bytes for v in gradients)
    values = (replace(value, keep=value.keep and v not in gradients) for v, value in enumerate(graph.values))
    freed = replace(graph, values=tuple(values))
    # From the second step on the gradients are there before; each new one is added to them and freed.
    yield "gradient accumulation", replace(freed, fixed_bytes=graph.fixed_bytes + kept)
    if not is_rank and isinstance(optimizer, str) and optimizer.lower() in TEMPORARIES:
        yield "updates in backward", _with_updates(freed, gradients, TEMPORARIES[optimizer.lower()])


def _with_updates(graph: Graph, gradients: Collection[int], times: int) -> Graph:
    """The step with an update of each parameter behind its gradient, which holds `times` the gradient's bytes."""
    operations = list[Operation]()
    for op in graph.operations:
        operations.append(op)
        for v in op.outputs:
            if v in gradients:
                size = times * graph.values[v].bytes
                operations.append(
                    Operation(f"update_{v}", UPDATE_KIND, (v,), (), 0, size, is_backward=True, run_once=True)
                )
    return replace(graph, operations=tuple(operations), loss=None)


def kept_gradients(graph: Graph) -> set[int]:
    """Values that are held to the end, but for the loss."""
    loss = () if graph.loss is None else graph.operations[graph.loss].outputs
    return {v for v, value in enumerate(graph.values) if value.keep and v not in loss}
