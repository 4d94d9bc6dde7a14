"""A PyTorch step under a plan: what is promised, and what is measured beside the plain step."""

import statistics
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

import remat.torch as rt
from experiments.steps.torch_runs import built, paired_seconds
from experiments.steps.torch_sizes import for_a_cpu, torch_model
from remat.torch.following.module import Rematerialized
from remat.torch.measuring.measure import difference_of_steps, peak_of_step


def step_for_a_cpu(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[nn.Module, tuple[Any, ...]]:
    """A module that returns its loss, in training mode, and random arguments; always the same.

    Args:
        options: of the model, beside those of its size for a CPU.
    """
    spec = for_a_cpu(torch_model(name))
    spec.options.update(options)
    return built(spec, "cpu")


def planned(model: nn.Module, args: tuple[Any, ...], budget: float, **options: Any) -> Rematerialized:
    """The step under a plan, without a warning; `options` are those of `remat.torch.rematerialize`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rt.rematerialize(model, args, budget, **options)


def promise_of(plan: Any) -> dict[str, Any]:
    """The columns of a plan's promise."""
    return {
        "budget_bytes": plan.budget_bytes, "predicted_bytes": plan.peak_bytes, "overhead": plan.overhead,
        "recomputed": len(plan.recomputed),
    }  # fmt: skip


@dataclass(slots=True)
class Beside:
    """Steps on the CPU that compute the same as a plain one, and are measured beside it.

    Attributes:
        plain: the step whose bits and seconds the others are compared with.
        rows: what is known of each other step.
        modules: these steps.
    """

    plain: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def add(self, module: nn.Module, row: Mapping[str, Any], before_bytes: int = 0) -> dict[str, Any]:
        """Measure the peak of a step, and how far its results are from the plain ones.

        Args:
            before_bytes: that are there before the step, and count in its peak.
        """
        peak = before_bytes + peak_of_step(module, self.args, self.kwargs, "cpu")
        difference = difference_of_steps(self.plain, module, self.args, self.kwargs, "cpu")
        self.rows.append({**row, "measured_bytes": peak, "difference": difference})
        self.modules.append(module)
        return self.rows[-1]

    def timed(self, rounds: int) -> Iterator[dict[str, Any]]:
        """The rows with seconds; in each round every step runs once, and is divided by the plain one."""
        steps = list(dict.fromkeys([self.plain, *self.modules]))
        found = paired_seconds(steps, self.args, "cpu", rounds + 1)
        seconds = {step: own[1:] for step, own in zip(steps, found, strict=True)}  # the first round warms up
        for row, module in zip(self.rows, self.modules, strict=True):
            pairs = zip(seconds[module], seconds[self.plain], strict=True)
            ratios = [round(own / plain, 4) for own, plain in pairs]
            yield row | {"seconds": statistics.median(seconds[module]), "ratios": ratios}
