"""Tables of `experiments.execution_joint`: all implementations, and the plans that choose among them."""

from __future__ import annotations

import collections
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.documents import markdown_table
from experiments.steps.row import PORTFOLIO, StepRow
from experiments.steps.table import BUDGET, MODEL, table
from remat.implementation import DEFAULT

MAIN = (
    MODEL, BUDGET, "implementations", "predicted MB", "measured MB", "measured / predicted", "predicted overhead",
    "measured overhead", "gradient error", "computations by other implementations",
)  # fmt: skip
FUSED = (
    "In plans `batch_norm_from_leaky_relu` is batch norm's part of the backward pass of `batch_norm_leaky_relu`: from "
    "the output of the leaky ReLU, which `leaky_relu_in_place` writes over the batch norm's."
)
PROMISE = 1.03  # measured over predicted, at most


def document(rows: Sequence[StepRow]) -> str:
    """Everything between the marks of docs/implementations.md."""
    parts = ["### What there is", implementations(), "### Measured"]
    if not rows:
        return "\n\n".join([*parts, "Not measured yet."])
    by_device = sorted(rows, key=lambda row: row.device != "cpu")
    never = never_chosen(by_device)
    parts += [
        _how(by_device), table(shown(by_device), MAIN), "\n".join(f"- {line}" for line in summary(by_device)),
        "### Offered and never chosen", never or "Every implementation that was offered runs in some plan.",
    ]  # fmt: skip
    return "\n\n".join(parts)


def shown(rows: Sequence[StepRow]) -> list[StepRow]:
    """Rows by model: first the plain step, then plans from the largest budget to the smallest."""
    models = list(dict.fromkeys((row.device, row.model) for row in rows))
    return sorted(rows, key=lambda row: (models.index((row.device, row.model)), -(row.budget_bytes or math.inf),
                                         row.implementations))  # fmt: skip


def summary(rows: Sequence[StepRow]) -> list[str]:
    """Lines about kept promises, and about joint plans beside those that only recompute."""
    plans = [row for row in rows if row.method == PORTFOLIO]
    lines = []
    for chosen_from in ("default", "exact", "joint"):
        mine = [row for row in plans if _is_measured(row) and row.implementations == chosen_from]
        lines += [_promise(chosen_from, mine)] if mine else []
    default = {(row.device, row.model, row.parameter): row for row in plans if row.implementations == "default"}
    joint = {(row.device, row.model, row.parameter): row for row in plans if row.implementations == "joint"}
    pairs = [(row, default[key]) for key, row in joint.items() if key in default]
    both = [(a, b) for a, b in pairs if _is_measured(a) and _is_measured(b)]
    if both:
        predicted = [(1 + (a.predicted_overhead or 0.0)) / (1 + (b.predicted_overhead or 0.0)) for a, b in both]
        measured = [(a.measured_ratio or 0.0) / (b.measured_ratio or 1.0) for a, b in both]
        lines.append(
            f"At equal budgets a step of the joint plan takes {_spread(predicted)} of the time of the default one by "
            f"prediction, {_spread(measured)} measured ({sum(r < 1 for r in predicted)} of {len(both)} predicted to "
            f"be faster, {sum(r > 1 for r in predicted)} slower)"
        )
    if joint:
        only = sum(_is_measured(a) and not _is_measured(b) for a, b in pairs)
        lost = sum(_is_measured(b) and not _is_measured(a) for a, b in pairs)
        lines.append(f"At {only} budgets only the joint plan exists, at {lost} only the default one")
    return lines


def _is_measured(row: StepRow) -> bool:
    return row.measured_peak_bytes is not None


def _promise(chosen_from: str, rows: Sequence[StepRow]) -> str:
    """Whether plans that choose from these implementations met their predictions."""
    over = [(row.measured_peak_bytes or 0) / (row.predicted_peak_bytes or 1) for row in rows]
    worst, row = max(zip(over, rows, strict=True), key=lambda x: x[0])
    kept = "" if worst <= PROMISE else f": MORE THAN {PROMISE - 1:.0%} ABOVE"
    times = [(row.measured_ratio or 0.0) / (1 + (row.predicted_overhead or 0.0)) for row in rows]
    return (
        f"`{chosen_from}`: measured over predicted peak is at most {worst:.4f} ({row.model} at "
        f"{row.parameter}){kept}; {sum(bool(row.same_as) for row in rows)} of {len(rows)} plans leave the plain step's "
        f"bits, the largest gradient error is {max(row.gradient_error or 0.0 for row in rows):.1e}; step times are "
        f"{_spread(times)} of those predicted over plain, in {sum(ratio <= PROMISE for ratio in times)} of "
        f"{len(rows)} plans at most {PROMISE - 1:.0%} above"
    )


def never_chosen(rows: Iterable[StepRow]) -> str:
    """A table of implementations that no plan runs, with the reason; '' if there are none."""
    offers: dict[str, dict[tuple[str, str], dict[str, Any]]] = collections.defaultdict(dict)
    chosen: set[str] = set()
    held: dict[str, float] = collections.defaultdict(float)
    for row in rows:
        for name, offer in (row.offered or {}).items():  # of exact and joint plans, the last row counts
            offers[name][row.device, row.model] = offer
        chosen |= set(row.chosen or {})
        for name, share in (row.held or {}).items():
            held[name] = max(held[name], share)
    lines = [
        (f"`{name}`", ", ".join(model for _, model in mine), str(sum(o["operations"] for o in mine.values())),
         _why_never(list(mine.values()), held[name]))
        for name, mine in sorted(offers.items()) if name not in chosen
    ]  # fmt: skip
    heads = ("implementation", "offered in", "operations", "why it is in no plan")
    return markdown_table(heads, lines, "llrl") if lines else ""


def _why_never(offers: list[dict[str, Any]], held: float) -> str:
    n = sum(offer["offers"] for offer in offers)
    reasons = []
    needed = sum(offer["needed_later"] for offer in offers)
    if needed:
        reasons.append(f"{needed} of {n}: what it overwrites is read again later")
    worse: collections.Counter[str] = collections.Counter()
    for offer in offers:
        worse.update(offer["worse_than"])
    reasons += [f"{times} of {n}: not faster than `{other}`, and spares nothing that this one does not spare"
             if other != DEFAULT else f"{times} of {n}: not faster than the default, and spares no memory"
             for other, times in worse.most_common()]  # fmt: skip
    left = n - needed - worse.total()
    if left:
        rest = [o for o in offers if o["offers"] > o["needed_later"] + sum(o["worse_than"].values())]
        slower = [o["slower"] for o in rest]
        kept, running = (max(o[key] for o in rest) for key in ("spares_kept_bytes", "spares_running_bytes"))
        text = f"{left} of {n}: {_range(slower)} of the default's time"
        of = ((kept, "of what is kept for the backward pass"), (running, "while it runs"))
        spared = [f"{size / 1e6:.1f} MB {what}" for size, what in of if size > 0]
        text += f", to spare at most {' and '.join(spared)}" if spared else ""
        if min(slower) < 0:
            text += "; faster, but the search did not take it within its time"
        elif kept <= 0 and held and held < 0.9995:
            text += f"; what is held then is at most {held:.1%} of a plan's peak, where that would spare nothing"
        reasons.append(text)
    return "; ".join(reasons)


def implementations() -> str:
    """A table of every implementation in `remat.torch.implementations`."""
    from remat.torch.implementations import IMPLEMENTATIONS

    rows = []
    for name, one in IMPLEMENTATIONS.items():
        calls = " + ".join(kind.removeprefix("aten.") for kind in one.forward_kinds)
        tolerance = one.tolerance.get("float32")
        gradients = "exact" if one.exact else f"to {tolerance:.0e} of the largest" if tolerance else "to rounding"
        devices = "" if one.devices == ("cpu", "cuda") else f", {one.devices[0]} only"
        note = "what PyTorch does anyway" if one.is_default else one.family.value
        rows.append((f"`{name}`", f"{calls}{devices}", note, ", ".join(one.reads), gradients))
    heads = ("implementation", "of", "what is other", "backward reads", "gradients")
    return f"{markdown_table(heads, rows, 'lllll')}\n\n{FUSED}"


def _how(rows: Sequence[StepRow]) -> str:
    dates, first = sorted({row.finished_at[:10] for row in rows}), rows[0]
    torch = json.loads(first.versions or "{}").get("torch", "")
    gpu = "" if any(row.device == "cuda" for row in rows) else " No GPU was at hand."
    return (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {first.cpu}, {first.threads} threads, PyTorch {torch}, "
        f"eager backend, {first.time_limit_s:g} s per plan, times as medians over {first.rounds} rounds of a plain and "
        f"a planned step each (quartiles in brackets): the plain row says how far a plain step is from itself.{gpu} "
        "Gradient errors are the largest, relative to the largest gradient; "
        "that of the plain row is what the plain step's gradients change by if every parameter is another in its last "
        "bit. A forward and a backward operation are two computations, and so is each repetition."
    )


def _spread(ratios: Iterable[float]) -> str:
    ratios = sorted(ratios)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f} (median {statistics.median(ratios):.2f})"


def _range(slower: list[float]) -> str:
    low, high = 1 + min(slower), 1 + max(slower)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
