"""Cost models: the cost of an operation from its work (`Operation.work`)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from remat.cost.gpu import Gpu, gpu_names, link_of, load_gpu
from remat.cost.profile import NEGLIGIBLE, Noise, Profile, profile_costs
from remat.cost.roofline import modelled_costs
from remat.errors import CostWarning, InvalidInput, check_name, warn
from remat.graph import Graph

COST_MODELS = ("flops", "roofline", "profile")

__all__ = [
    "COST_MODELS", "CostWarning", "Gpu", "Noise", "apply_cost", "costs_and_noise", "gpu_names", "link_of", "load_gpu",
]  # fmt: skip


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
        graph: from a frontend, with `Operation.work`.
        model: ``flops`` (unit ``flop``), ``roofline`` or ``profile`` (unit ``ns``).
        gpu: the device of the roofline. ``flops`` ignores it. ``profile`` uses its stored measurements
            (``results/<gpu>/profile.parquet``), or its roofline, on CUDA, for operations that cannot be measured.
        cache_folder: of measurements; None measures without a cache.
        device: of ``profile``: ``cpu`` or ``cuda``. None takes the stored measurements of `gpu` if there are any,
            else measures on CUDA if PyTorch operations can run there, else on the CPU.

    Raises:
        UnknownName: unknown cost model.
        MissingPackage: ``profile`` without the framework of the operations.
        InvalidInput: the graph came with costs and without the work of its operations; no device;
            an operation needs more memory than the measuring device has.
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
    """The graph of `apply_cost`, and the noise of its costs if they were measured here, else None."""
    check_name("cost model", model, COST_MODELS)
    if all(op.work is None for op in graph.operations):
        raise InvalidInput(
            f"graph '{graph.name}' does not give the work of its operations, so cost={model} cannot be applied; "
            "use the costs it came with"
        )
    implementations = graph.every_implementation()
    if model == "profile":
        profile = profile_costs(implementations, gpu, cache_folder, device)
        _warn(profile.unmeasured, "not measured, charged by the roofline")
        if profile.unsteady_share > NEGLIGIBLE:
            n = len(profile.unsteady)
            warn(
                f"the machine was too busy to time {n} operation{'s' * (n > 1)} steadily, {profile.unsteady_share:.0%} "
                "of the cost: charged by the roofline, scaled to the others; the next process measures them again",
                CostWarning,
            )  # fmt: skip
        return graph.with_costs(_cautious(graph, profile), "ns"), profile.noise
    if model == "roofline" and gpu is None:
        raise InvalidInput(f"cost={model} needs a device; known: {', '.join(gpu_names())}")
    costs, unknown = modelled_costs(implementations, gpu if model == "roofline" else None)
    how = "by the bytes they move" if model == "roofline" else "one FLOP per byte moved"
    _warn(unknown, f"no FLOP rule, charged {how}")
    return graph.with_costs(costs, "ns" if model == "roofline" else "flop"), None


def _cautious(graph: Graph, profile: Profile) -> list[int]:
    """Costs in ns of every implementation, in which no other implementation wins for want of a measurement.

    One that was not measured is taken to be as much slower than its default as the slowest that was. The roofline
    counts work and traffic, which are those of the default, and would make a kernel that is ten times slower a bargain.
    """
    counts = [len(op.all_implementations) for op in graph.operations]
    default = np.repeat(np.cumsum([0, *counts])[:-1], counts)  # place of each one's default
    ns, modelled = np.array(profile.ns, np.int64), np.array(profile.modelled, bool)
    is_other = default != np.arange(len(ns))
    timed = is_other & ~modelled & ~modelled[default] & (ns[default] > 0)
    slowest = np.max(ns[timed] / ns[default[timed]], initial=1.0)
    cautious = np.maximum(ns, np.ceil(slowest * ns[default]).astype(np.int64))
    return np.where(is_other & modelled, cautious, ns).tolist()


def _warn(kinds: set[str] | Mapping[str, str], what: str) -> None:
    """Warn once, naming every kind, with its reason if `kinds` gives one."""
    if kinds:
        named = (f"{kind} ({kinds[kind]})" if isinstance(kinds, Mapping) else kind for kind in sorted(kinds))
        warn(f"{what}: {', '.join(named)}", CostWarning)
