"""Cost models: what an operation costs, from what it does (`Operation.work`)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from remat.cost.flops import flop_costs
from remat.cost.gpu import Gpu, gpus, load_gpu
from remat.cost.profile import Noise, profile_costs
from remat.cost.roofline import roofline_costs
from remat.errors import CostWarning, InvalidInput, unknown_name, warn
from remat.graph import Graph

COST_MODELS = ("flops", "roofline", "profile")

__all__ = ["COST_MODELS", "CostWarning", "Gpu", "Noise", "apply_cost", "costs_and_noise", "gpus", "load_gpu"]


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
        gpu: the device of the roofline; not used by ``flops``, and by ``profile`` where measurements of it are
            stored (``results/<gpu>/profile.parquet``) or, on CUDA, for operations that cannot be measured.
        cache_folder: of measurements; None measures without a cache.
        device: of ``profile``: ``cpu`` or ``cuda``; None takes what is stored for `gpu`, else measures on CUDA if
            PyTorch operations can run there, else on the CPU.

    Raises:
        UnknownName: unknown cost model.
        MissingPackage: ``profile`` without the framework of the operations.
        InvalidInput: the graph came with costs and says nothing of its operations' work; no device;
            an operation that needs more memory than the device measured on has.
    """
    return costs_and_noise(graph, model, gpu, cache_folder=cache_folder, device=device)[0]


def costs_and_noise(
    graph: Graph,
    model: str,
    gpu: Gpu | None,
    *,
    cache_folder: str | os.PathLike[str] | None = None,
    device: str | None = None,
) -> tuple[Graph, Noise | None]:
    """`apply_cost`, and how sure costs are that were measured here; None for others."""
    if model not in COST_MODELS:
        raise unknown_name("cost model", model, COST_MODELS)
    if all(op.work is None for op in graph.operations):
        raise InvalidInput(
            f"graph '{graph.name}' says nothing of what its operations do, so cost={model} cannot be applied; "
            "use the costs it came with"
        )
    implementations = graph.every_implementation()
    if model == "flops":
        costs, unknown = flop_costs(implementations)
        _warn(unknown, "no FLOP rule, charged one FLOP per byte moved")
        return graph.with_costs(costs, "flop"), None
    if gpu is None and model == "roofline":
        raise InvalidInput(f"cost={model} needs a device; known: {', '.join(gpus())}")
    if model == "profile" or gpu is None:
        profile = profile_costs(implementations, gpu, cache_folder, device)
        _warn(profile.unmeasured, "not measured, charged by the roofline")
        if profile.unsteady:
            n = len(profile.unsteady)
            warn(
                f"the machine was too busy to time {n} operation{'s' * (n > 1)} steadily: charged by the roofline, "
                "scaled to the others; the next call measures them again", CostWarning,
            )  # fmt: skip
        return graph.with_costs(profile.ns, "ns"), profile.noise
    costs, unknown = roofline_costs(implementations, gpu)
    _warn(unknown, "no FLOP rule, charged by the bytes they move")
    return graph.with_costs(costs, "ns"), None


def _warn(kinds: set[str] | Mapping[str, str], what: str) -> None:
    """One warning that names every kind, with its reason where there is one."""
    if kinds:
        reasons = kinds if isinstance(kinds, Mapping) else {}
        named = (f"{kind} ({reasons[kind]})" if kind in reasons else kind for kind in sorted(kinds))
        warn(f"{what}: {', '.join(named)}", CostWarning)
