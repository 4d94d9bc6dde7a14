"""`rematerialize`: from a model and a budget to a module that trains within it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remat import zoo
from remat.cost import COST_MODELS, load_gpu
from remat.cost.profile import one_child
from remat.errors import InvalidInput, InvalidPlan, check_name, shown
from remat.execution import (
    Peaks,
    PlanOptions,
    StepPlan,
    check_options,
    copies_of,
    implementations_of,
    is_fraction,
    parse_budget,
)
from remat.execution.phases import CAPTURE
from remat.link import Link
from remat.plan import parse_scope
from remat.torch.following.in_one_graph import InOneGraph
from remat.torch.following.module import Rematerialized
from remat.torch.following.self_check import check_untested_version
from remat.torch.internals import inductor
from remat.torch.measuring.measure import difference_of_steps
from remat.torch.parts.in_parts import checked_parts, in_parts
from remat.torch.planning.capturing import (
    captured_step,
    default_gpu,
    device_of,
    keywords,
    offload_link,
    with_storages,
)
from remat.torch.planning.eager import Eager
from remat.torch.planning.inductor import Inductor
from remat.torch.planning.planner import Backend, Planner, there_before
from remat.torch.resident.in_backward import BY_THE_LOOP, OPTION, InBackward
from remat.torch.resident.optimizer import state_bytes
from remat.torch.resident.residents import Resident
from remat.torch.resident.shard import WHOLE, Sharding, check_shard, check_whole
from remat.torch.step import aot
from remat.torch.step.blocks import repeated_blocks
from remat.torch.step.branches import describe_inputs
from remat.torch.step.loss import Outside
from remat.torch.step.refusals import check_given_tensors, check_sample_args
from remat.torch.step.training_graph import CapturedStep
from remat.torch.step.with_implementations import CHOICES
from remat.units import format_size

MOST_PLANS = 4
BACKENDS = ("eager", "inductor")
_OTHER_STEPS = ("backend", "implementations", "shard", "parts")  # than one eager step of default implementations
# [option] the options that it does not go with
NOT_WITH = {
    "retain_graph": ("backend", "shard", "parts", "in_backward"),
    "in_backward": ("scope", "accumulate", *_OTHER_STEPS),
    "offload": (*_OTHER_STEPS, "retain_graph", "in_backward", "plan", "cost"),
    "copies": (*_OTHER_STEPS, "retain_graph", "in_backward"),
    "shard": ("backend", "implementations", "plan"),
    "parts": ("backend", "implementations", "plan"),
}


@one_child()
def rematerialize(
    model: nn.Module,
    sample_args: tuple[Any, ...],
    budget: int | float | str | None = None,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    strategy: str = "portfolio",
    backend: str = "eager",
    mode: str | None = None,
    cost: str = "profile",
    plan: str | os.PathLike[str] | StepPlan | None = None,
    optimizer: torch.optim.Optimizer | str | int | None = None,
    accumulate: bool = False,
    scope: str = "free",
    time_limit_s: float = 60.0,
    seed: int = 0,
    threads: int = 2,
    gpu: str | None = None,
    implementations: str = "default",
    verify: bool = False,
    cache_folder: str | os.PathLike[str] | None = None,
    parts: Sequence[str] | None = None,
    optimizer_in_backward: bool = False,
    shard: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    retain_graph: bool = False,
    target_gap: float | None = None,
    offload: str | Link | bool = False,
) -> Rematerialized:
    """A module that trains `model` within a memory budget: a plan says which operations it recomputes, and which values
    it copies to the host meanwhile.

    Use it in place of the model in an ordinary loop (``loss.backward()``, any optimizer). Parameters and buffers are
    the model's own objects. With ``backend="eager"``, gradients, loss, buffers and random numbers are those of the
    plain model, bit for bit. The step is captured on tensors without contents, and nothing is computed here. (With
    ``verify=True``, or for a fraction of a recurrent network's peak, a step runs, and its effects are undone.)
    docs/how-to/pytorch.md explains what the budget counts, when steps are planned, and the limits.

    Args:
        model: in the mode (train or eval) in which it will be trained.
        sample_args: positional arguments of the model, the largest that will occur; only shapes, dtypes and devices
            matter, so that tensors on ``meta`` suffice. Steps of other shapes are planned when they occur, or before,
            by `Rematerialized.prepare`.
        budget: the most bytes that PyTorch's allocator may hold at once in a step, everything included; or a size
            (``8GB``, ``7.5GiB``); or a float in (0, 1], a fraction of the plain step's peak.
        sample_kwargs: keyword arguments of the model, e.g. ``{"mask": mask}``.
        strategy: a name from `remat.strategies()`.
        backend: ``eager`` runs PyTorch's own kernels one by one; ``inductor`` compiles them, as `torch.compile` does,
            so that results differ in the last bits. The plan is then made on the groups of calls that Inductor fuses,
            and a fraction is of the peak of the compiled plain step.
        mode: as in `torch.compile`: only ``default``, because the others record CUDA graphs.
        cost: of operations: ``profile`` (measured here), ``roofline`` or ``flops``.
        plan: the plan to follow instead of solving: a file that ``plan.save`` wrote, the plan of another module, or one
            that comes with remat (``zoo:resnet50_b16_0.8``, see `remat.zoo`). A budget replaces the plan's own.
        optimizer: whose state is counted: a `torch.optim.Optimizer`, a name (``adam``) or a size; None counts none,
            which is right for plain SGD only.
        accumulate: count gradients of earlier steps, which exist while a step runs under gradient accumulation or
            ``zero_grad(set_to_none=False)``.
        scope: of plans: ``free`` may reorder operations, ``fixed_order`` and ``staged`` keep the order of first runs.
        time_limit_s, seed, threads: of the solver, which ends sooner where more time is not expected to save a
            thousandth of the cost.
        target_gap: the solver ends at this proven gap instead; 0.01 is 1 %.
        gpu: of ``cost="roofline"``; by default the device at hand.
        implementations: ``default``; or ``joint``, to choose also how each call runs, with gradients equal to rounding;
            or ``exact``, to choose only among implementations that give the default's bits.
        verify: run steps on the sample arguments to measure `measured_peak_bytes`; while it exceeds the budget, plan
            again with less. Compare a step with the plain one; ``print(model.plan)`` says by how much they differ.
            Gradients, buffers and random numbers stay as they are.
        cache_folder: of measurements of operations, and of plans that were searched; by default ``$REMAT_CACHE`` or
            ``~/.cache/remat``.
        parts: names of submodules that are planned together, for a model that does not compile into one graph. What
            stands between them runs as in PyTorch, and counts.
        optimizer_in_backward: update each parameter in the backward pass, by `optimizer` (which must be a
            `torch.optim.Optimizer` over the model's parameters), when its gradient is ready and nothing reads the
            parameter any more. Its gradient is then freed. The loop need not call ``optimizer.step()``.
        shard: plan for one of so many ranks, over which FSDP2 (`fully_shard`) divides parameters, gradients and
            optimizer state. `parts`, by default the model's repeated blocks, are gathered one by one. In processes of
            `torch.distributed`, as many as ranks, this call shards the model, so that its optimizer is made afterwards.
        loss: (the module's outputs) -> the scalar that is differentiated, where the module does not return it:
            ``lambda out: F.cross_entropy(out, labels)``. Its memory is then counted exactly; it is called on tensors
            without contents. By default it is the scalar that outputs hold as ``loss`` (transformers' models); where
            there is none, it is taken to need the memory of cross-entropy or the mean squared error.
        retain_graph: count several backward passes through one forward pass, ``loss.backward(retain_graph=True)``,
            which keep what a plan frees.
        offload: let the plan also copy values to the host's memory and back (docs/how-to/offload.md): over a
            `remat.Link`, a rate (``25GB/s``), a name (``pcie4``), or ``auto``, the link of this machine's GPU. On a
            CPU, whose memory is the host's, ``auto`` copies nothing, and a link that is given is imitated.

    Raises:
        RematError: the host has no memory left for the copies of a step, or a copy failed (from the module's calls).
        InvalidInput: (a ValueError) no plan within the budget was found; the model does not compile into one graph; an
            option is wrong; a plan was made for another step.
        MissingPackage: this PyTorch is newer than any tested one, and a plan changes the results of a small step.
    """
    _check(model, sample_args, backend, mode, gpu, cost, cache_folder, loss, optimizer)
    _check_switches(
        accumulate=accumulate, verify=verify, optimizer_in_backward=optimizer_in_backward, retain_graph=retain_graph
    )  # fmt: skip
    if shard is not None:
        check_shard(model, shard, optimizer, accumulate, verify)
        parts = repeated_blocks(model) if parts is None else parts
    given_plan, plan = plan, zoo.resolved(plan)
    options = PlanOptions(strategy, scope, cost, time_limit_s, seed, threads, target_gap)
    check_options(budget, plan, options)
    implementations = _implementations(implementations, backend, plan)
    kwargs = keywords(sample_kwargs)
    check_given_tensors(model, sample_args, kwargs)
    device = device_of(model, (sample_args, kwargs))
    link, scope = offload_link(offload, device), str(parse_scope(scope))
    _check_together(
        backend=(backend != "eager", f"backend={backend!r}"),
        implementations=(implementations != "default", f"implementations={implementations!r}"),
        scope=(scope != "free", f"scope={scope!r} (an update waits for repetitions, which only scope='free' allows)"),
        accumulate=(accumulate, "accumulate=True (each backward pass updates the parameters)"),
        shard=(shard is not None, "shard="),
        parts=(parts is not None and shard is None, "parts="),
        retain_graph=(retain_graph, "retain_graph=True (add the losses up and call backward() once instead)"),
        in_backward=(optimizer_in_backward, OPTION),
        offload=(link is not None, "offload="),
        copies=(plan is not None and copies_of(plan), "a plan that copies values to the host"),
        plan=(plan is not None, "plan=, which says what is copied and computed again"),
        cost=(cost == "flops", f"cost={cost!r}, which is no time"),
    )
    updates = InBackward(optimizer, model) if optimizer_in_backward else BY_THE_LOOP
    sample_args, kwargs = with_storages((sample_args, kwargs), device)
    check_untested_version(device)
    inputs = describe_inputs((sample_args, kwargs))
    options = replace(
        options, link=link, scope=scope, gpu=default_gpu(device) if gpu is None else load_gpu(gpu),
        cache_folder=Path(cache_folder) if cache_folder else options.cache_folder,
    )  # fmt: skip
    how: Backend = Eager(implementations, updates, retain_graph) if backend == "eager" else Inductor()
    planner = Planner(
        type(model).__name__, options, device, how, plain=Peaks(None, "a plan was given"),
        resident=Resident(model, optimizer, shard, accumulate), sample=inputs, outside=Outside(loss, retain_graph),
    )  # fmt: skip
    if parts is not None:
        assert budget is not None  # which only a plan makes needless
        names = checked_parts(model, parts)
        division = WHOLE if shard is None else Sharding.of(model, shard, names, device)
        return in_parts(planner, model, sample_args, kwargs, names, division, budget, verify)
    with planner.phases.of(CAPTURE):
        step = captured_step(model, sample_args, kwargs, how)
        if plan is None or is_fraction(budget):
            planner.plain = how.plain_peak(planner, step, model, sample_args, kwargs, may_run=is_fraction(budget))
    planner.follow_loss(model, sample_args, kwargs)
    promised = None if budget is None else parse_budget(budget, planner.plain)
    if plan is not None:
        try:
            step_plan = planner.take(plan, step, inputs, promised)
        except InvalidPlan as error:
            raise zoo.named(error, given_plan) from None
    else:
        assert promised is not None
        planner.budget_bytes = promised
        step_plan = planner.plan(step, inputs)
    module = Rematerialized(InOneGraph(model, planner), step_plan, accumulate)
    return _verified(module, sample_args, kwargs, step) if verify else module


def follow(
    model: nn.Module,
    sample_args: tuple[Any, ...],
    plan: str | os.PathLike[str] | StepPlan,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    backend: str = "eager",
    optimizer: torch.optim.Optimizer | str | int | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
) -> Rematerialized:
    """A module whose steps run this plan; nothing is solved.

    Args:
        model, sample_args, sample_kwargs: those for which the plan was made; only shapes, dtypes and devices matter.
        plan: a file that ``plan.save`` wrote, the plan of another module, or one that comes with remat (``zoo:...``).
        backend: for which the plan was made.
        optimizer: whose state is counted, as in `rematerialize`.
        cache_folder: of measurements of kernels that a step of other shapes needs.

    Raises:
        InvalidInput: the plan was made for another step.
        InvalidPlan: the file holds no valid plan.
    """
    return rematerialize(
        model, sample_args, plan=plan, sample_kwargs=sample_kwargs, backend=backend, optimizer=optimizer,
        cache_folder=cache_folder,
    )  # fmt: skip


def _check_together(**options: tuple[bool, str]) -> None:
    """Refuse what does not go together; for each option whether it is given, and how."""
    for option, others in NOT_WITH.items():
        is_given, how = options[option]
        for is_other_given, other in (options[name] for name in others):
            if is_given and is_other_given:
                raise InvalidInput(f"{how} does not go with {other}; leave either out")


def _verified(
    module: Rematerialized, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: CapturedStep
) -> Rematerialized:
    """The module with its `measured_peak_bytes`; planned again while these exceed the budget."""
    planner = module._planner
    updates = planner.backend.updates
    promised, measured = planner.budget_bytes, 0
    for _ in range(MOST_PLANS):
        if measured:
            planner.budget_bytes -= measured - promised
            planner.plans.clear()
            try:
                step_plan = replace(planner.plan(step, planner.sample), budget_bytes=promised)
            except InvalidInput:  # its message names a smaller budget than the caller's
                break
            module = Rematerialized(InOneGraph(module.model, planner), step_plan, module._accumulates)
        with updates.undone():
            measured = there_before(module.plan) + planner.measured_peak(module, args, kwargs)
        module.measured_peak_bytes = measured
        if measured <= promised:
            with updates.collecting():
                difference = difference_of_steps(module.model, module, args, kwargs, planner.device)
            module.plan = replace(module.plan, difference=difference)
            return module
    raise InvalidInput(
        f"a step needs {format_size(measured)} ({format_size(module.predicted_peak_bytes)} were predicted), more than "
        f"the budget of {format_size(promised)}, and no other plan was found; give a larger budget"
        f"{planner.backend.instead}"
    )


def _check(
    model: Any, sample_args: Any, backend: str, mode: Any, gpu: str | None, cost: str, cache_folder: Any, loss: Any,
    optimizer: Any,
) -> None:  # fmt: skip
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(module, Rematerialized) for module in model.modules()):
        raise InvalidInput("the model or a part of it is rematerialized already; pass the plain .model")
    check_whole(model)
    check_sample_args(sample_args)
    aot.check_that_calls_are_compiled()
    check_name("backend", backend, BACKENDS)
    check_name("cost model", cost, COST_MODELS)
    if mode is not None and not (isinstance(mode, str) and mode == "default"):
        raise InvalidInput(
            f"mode={shown(mode)} is not supported, only 'default': the other modes record CUDA graphs, whose memory "
            "pools keep what a plan frees, or choose kernels that no plan has seen"
        )
    if backend == "inductor" and inductor.records_cuda_graphs():
        raise InvalidInput(
            "Inductor is set to record CUDA graphs, whose memory pools keep what a plan frees: "
            "set torch._inductor.config.triton.cudagraphs = False"
        )
    if gpu is not None and cost != "roofline":
        raise InvalidInput(f"gpu={shown(gpu)} is of cost='roofline'; cost={cost!r} does not use it")
    if not isinstance(cache_folder, (str, os.PathLike, type(None))):
        raise InvalidInput(f"cache_folder must be the path of a folder, not {shown(cache_folder)}")
    if loss is not None and not callable(loss):
        raise InvalidInput(
            f"loss must be a function of the module's outputs, e.g. lambda out: F.cross_entropy(out, labels), not "
            f"{shown(loss)}"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        state_bytes(optimizer, ())  # an unknown name is refused before the capture


def _check_switches(**options: Any) -> None:
    for name, value in options.items():
        if not isinstance(value, (bool, np.bool_)):
            raise InvalidInput(f"{name} must be True or False, not {shown(value)}")


def _implementations(implementations: str, backend: str, plan: Any) -> str:
    """The implementations to choose from: those asked for, or those of a given plan."""
    check_name("implementations", implementations, CHOICES)
    if isinstance(plan, StepPlan):
        implementations = plan.implementations
    elif plan is not None:
        implementations = implementations_of(plan)
    if implementations != "default" and backend != "eager":
        raise InvalidInput(
            f"implementations={implementations!r} needs backend='eager': {backend} chooses its own kernels"
        )
    return implementations
