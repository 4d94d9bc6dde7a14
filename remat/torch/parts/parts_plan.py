"""The plans of a model's parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

from remat.errors import InvalidInput
from remat.execution import StepPlan
from remat.units import format_size


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """The plans of a model's parts.

    Attributes:
        parts: [name of a part] its plan; its budget is the part's own share.
        fixed_bytes: there before a step: parameters, buffers, arguments, optimizer state.
        peak_bytes: predicted, of the whole step, fixed bytes included.
        plain_peak_bytes: of the plain step; None if not known.
        difference: see `StepPlan`.
        ranks: over which parameters are divided; all bytes are those of one rank.
    """

    name: str
    parts: Mapping[str, StepPlan]
    budget_bytes: int
    fixed_bytes: int
    peak_bytes: int
    plain_peak_bytes: int | None
    difference: float | None = None
    ranks: int = 1
    loss: str = ""

    @property
    def overhead(self) -> float:
        """Predicted cost of the parts over that of running each of their operations once, minus 1."""
        once = sum(plan.graph.total_cost for plan in self.parts.values())
        return sum(plan.trace.cost for plan in self.parts.values()) / once - 1 if once else 0.0

    @property
    def recomputed(self) -> dict[str, int]:
        """Number of repeats of each repeated operation, by its name after that of its part."""
        return {f"{name}.{op}": n for name, plan in self.parts.items() for op, n in plan.recomputed.items()}

    def save(self, path: str | PathLike[str]) -> None:
        """Plans in parts have no file.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput(
            "plans in parts are not loaded from a file; plan.parts[name].save(path) writes that of a part"
        )

    def __str__(self) -> str:
        plain = self.plain_peak_bytes
        share = f", {self.peak_bytes / plain:.1%} of the plain step's {format_size(plain)}" if plain else ""
        each = f", on each of {self.ranks} ranks" if self.ranks > 1 else ""
        lines = [
            f"{self.name}: {len(self.parts)} parts, {len(self.recomputed)} operations computed again{each}",
            f"  budget          {format_size(self.budget_bytes)}",
            f"  predicted peak  {format_size(self.peak_bytes)}{share}",
            f"  always there    {format_size(self.fixed_bytes)}",
            f"  overhead        {self.overhead:.2%} of the parts",
        ]
        lines += [f"  loss outside    {self.loss}"] if self.loss else []
        for name, plan in self.parts.items():
            n = len(plan.graph)
            lines.append(f"  {name}: {len(plan.recomputed)} of {n} operations computed again, {plan.overhead:.2%}")
        if self.difference is not None:
            differs = f"differs by up to {self.difference:.1e} of a tensor's largest number"
            lines.append(f"  verified        {differs if self.difference else 'the bits of the plain step'}")
        return "\n".join(lines)
