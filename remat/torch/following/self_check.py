"""Compare one small step under a plan with the plain step, for a PyTorch that is newer than any tested one."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from remat.cost.records import cache_key, read_record
from remat.errors import headline, warn
from remat.execution import PlanOptions, default_cache
from remat.execution.kept import keep
from remat.files import digest_of_source
from remat.plan import Plan
from remat.torch import _version
from remat.torch.following.in_one_graph import InOneGraph
from remat.torch.following.module import Rematerialized
from remat.torch.inductor.mincut import order_with
from remat.torch.planning.capturing import captured_step
from remat.torch.planning.eager import Eager
from remat.torch.planning.planner import Planner
from remat.torch.step.branches import describe_inputs

SIZE = 12  # of the batch and of every layer


def check_untested_version(device: str) -> None:
    """Refuse an untested PyTorch under which a plan changes results; a tested one is not checked.

    The check runs once for each version of PyTorch, content of remat and kind of device, with a warning. The user's
    cache keeps its verdict.

    Raises:
        MissingPackage: results differ, or the step fails.
    """
    if not _version.is_untested():
        return
    provenance = {"torch": torch.__version__, "remat": digest_of_source(Path(__file__).parents[1]), "device": device}
    path = default_cache() / "torch" / f"{cache_key('self-check', provenance)}.json"
    differing = read_record(path).get("differing")
    if not isinstance(differing, list):
        try:
            differing = differing_results(device)
        except Exception as error:  # a newer PyTorch may fail in any way
            raise _version.newer_fails(
                f"a step under a plan fails ({type(error).__name__}: {headline(error, 160)})"
            ) from error
        keep(path, {**provenance, "differing": differing}, "verdict on this PyTorch")
        if not differing:
            warn(
                f"{_version.newer()}; one small step under a plan gave the bits of the plain step (nothing else was "
                "checked, and this result is remembered)"
            )
    if differing:
        named = ", ".join(map(str, differing[:3])) + (", ..." if len(differing) > 3 else "")
        raise _version.newer_fails(f"a step under a plan gives other results than the plain step ({named})")


def differing_results(device: str) -> list[str]:
    """Names of the gradients, buffers and other results in which a step under a plan differs from the plain step.

    The plan recomputes everything that it may. The model has linear layers, batch norm and dropout.
    """
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.ReLU(), nn.Dropout(0.3), nn.Linear(SIZE, SIZE), nn.GELU(),
            nn.Linear(SIZE, SIZE),
        ).to(device)  # fmt: skip
        x = torch.randn(SIZE, SIZE, device=device)
        expected = _results(copy.deepcopy(model), x)
        found = _results(_recomputing(model, x, device), x)
    return [name for name, result in expected.items() if not torch.equal(result, found[name])]


def _results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    outputs = model(x)
    outputs.square().sum().backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    after = torch.rand(1, device=x.device)
    return {"outputs": outputs.detach(), **gradients, **dict(model.named_buffers()), "random numbers": after}


def _recomputing(model: nn.Module, x: Tensor, device: str) -> Rematerialized:
    """The model under a plan that saves nothing that it can recompute; nothing is solved or measured."""
    planner = Planner("self-check", PlanOptions(cost="flops"), device, Eager())
    own = planner.surrounded(captured_step(model, (x,), {}, planner.backend), describe_inputs(((x,), {})))
    plan = Plan.from_order(own.graph, order_with(own.graph, set()))
    step_plan = planner.plans[own.fingerprint.sha256] = own.planned(own.graph, plan, "self-check", None)
    return Rematerialized(InOneGraph(model, planner), step_plan)
