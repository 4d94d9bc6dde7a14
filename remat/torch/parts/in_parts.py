"""A model whose parts follow plans of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from torch import nn

from remat.errors import InvalidInput, shown, unknown_name
from remat.execution import Peaks, StepPlan, parse_budget
from remat.torch.following.in_one_graph import InOneGraph
from remat.torch.following.module import Rematerialized
from remat.torch.measuring.measure import difference_of_steps
from remat.torch.parts.opaque import followed_step
from remat.torch.parts.parts_plan import PartsPlan
from remat.torch.parts.search import PartsSearch
from remat.torch.planning.planner import Planner
from remat.torch.resident.shard import Division
from remat.torch.step.work import storage_bytes, tensors_of
from remat.units import format_size


class InParts:
    """A call whose parts follow plans of their own; what stands between them runs as PyTorch runs it.

    Attributes:
        search: found the plans; it plans other shapes.
    """

    def __init__(self, model: nn.Module, search: PartsSearch, plan: PartsPlan):
        self.model, self.planner, self.search, self.plan = model, search.planner, search, plan
        division = search.division
        self.modules = {
            name: Rematerialized(InOneGraph(division.part(model, name), search.planners[name]), each, accumulates=True)
            for name, each in plan.parts.items()
            if name in search.planners
        }
        self.own = {name: model.get_submodule(name) for name in self.modules}
        division.apply(model)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> Any:
        division = self.search.division
        for name, module in self.own.items():
            if reduce(lambda owner, child: getattr(owner, child, None), name.split("."), self.model) is not module:
                raise InvalidInput(f"the part '{name}' was replaced after it was planned: call rematerialize again")
        division.check_applied(self.model)
        with division.placed(self.model, self.modules):
            return self.model(*args, **kwargs)

    def plans_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StepPlan]:
        return self.search.plans_for(self.model, args, kwargs, list(self.search.planners))

    def of(self, model: nn.Module) -> InParts:
        return InParts(model, self.search, self.plan)


def in_parts(
    planner: Planner, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str],
    division: Division, budget: Any, verify: bool,
) -> Rematerialized:  # fmt: skip
    """A module whose parts are planned together.

    Args:
        names: of the parts.
    """
    resident = planner.resident
    there = division.parameters_bytes(model, (*model.buffers(), *tensors_of((args, kwargs))))
    gradients = sum(storage_bytes(p) for p in model.parameters() if p.requires_grad) if resident.accumulates else 0
    fixed_bytes = there + resident.state_bytes() + gradients
    plain = followed_step(model, args, kwargs, planner.device, planner.outside, division=division)
    workspaces = planner.workspaces_of(plain.signatures)
    planner.follow_loss(model, args, kwargs)
    fixed_bytes += planner.read_bytes
    planner.plain = Peaks(fixed_bytes + plain.peak_bytes(workspaces))
    planner.budget_bytes = parse_budget(budget, planner.plain)
    search = PartsSearch(planner, division=division)
    plan = search.plan(model, args, kwargs, names, fixed_bytes)
    shown: Any = plan  # it answers the questions that users ask of a `StepPlan`
    module = Rematerialized(InParts(model, search, plan), shown, resident.accumulates)
    if verify:
        module.measured_peak_bytes = measured = fixed_bytes + planner.measured_peak(module, args, kwargs)
        if measured > planner.budget_bytes:
            raise InvalidInput(
                f"a step needs {format_size(measured)}, more than the budget of {format_size(planner.budget_bytes)}; "
                "give a smaller budget"
            )
        module.plan = replace(shown, difference=difference_of_steps(model, module, args, kwargs, planner.device))
    return module


def checked_parts(model: nn.Module, parts: Any) -> list[str]:
    """The names of parts.

    Raises:
        InvalidInput: they are no modules of the model, or one is inside of another.
    """
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise InvalidInput(f"parts must be a list of names of submodules, e.g. ['encoder'], not {shown(parts)}")
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in parts:
        if name not in known:
            raise unknown_name("part", str(name), known)
    modules = {name: model.get_submodule(name) for name in parts}
    for name, module in modules.items():
        if any(module is part for other in modules.values() if other is not module for part in other.modules()):
            raise InvalidInput(f"the part '{name}' is inside of another; give either")
    return list(dict.fromkeys(parts))
