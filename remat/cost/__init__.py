"""Cost models: what an operation costs, from what it does (`Operation.work`)."""

from __future__ import annotations

import os
import warnings

from remat.cost.flops import flops
from remat.cost.gpu import Gpu, gpus, load_gpu
from remat.cost.roofline import roofline
from remat.errors import InvalidInput, unknown_name
from remat.graph import Graph

COST_MODELS = ("flops", "roofline", "profile")

__all__ = ["COST_MODELS", "CostWarning", "Gpu", "apply_cost", "gpus", "load_gpu"]


class CostWarning(UserWarning):
    """Some operations are charged by a fallback; the message names their kinds."""


def apply_cost(
    graph: Graph,
    model: str,
    gpu: Gpu | None,
    *,
    cache_folder: str | os.PathLike[str] | None = None,
    device: str | None = None,
) -> Graph:
    """`graph` with the costs of a cost model.

    Args:
        graph: from a frontend, `Operation.work` filled.
        model: ``flops`` (unit ``flop``), ``roofline`` or ``profile`` (unit ``ns``).
        gpu: the device of the roofline; not used by ``flops``.
        cache_folder: of measurements; None measures without a cache.
        device: of ``profile``: ``cpu`` or ``cuda``; None takes CUDA if PyTorch operations can run there.

    Raises:
        UnknownName: unknown cost model.
        InvalidInput: the graph came with costs and says nothing of its operations' work; no device;
            an operation that needs more memory than the device measured on has.
    """
    if model not in COST_MODELS:
        raise unknown_name("cost model", model, COST_MODELS)
    if all(op.work is None for op in graph.operations):
        raise InvalidInput(
            f"graph '{graph.name}' says nothing of what its operations do, so cost={model} cannot be applied; "
            "use the costs it came with"
        )
    if model == "flops":
        costs, unknown = flops(graph)
        _warn(unknown, "no FLOP rule, charged one FLOP per byte moved")
        return graph.with_costs(costs, "flop")
    if gpu is None and model == "roofline":
        raise InvalidInput(f"cost={model} needs a device; known: {', '.join(gpus())}")
    assert gpu is not None
    costs, unknown = roofline(graph, gpu)
    _warn(unknown, "no FLOP rule, charged by the bytes they move")
    return graph.with_costs(costs, "ns")


def _warn(kinds: set[str], what: str) -> None:
    if kinds:
        warnings.warn(f"{what}: {', '.join(sorted(kinds))}", CostWarning, stacklevel=3)
