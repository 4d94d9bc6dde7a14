"""Implementations, and the plans that choose them, see docs/results/implementations.md."""

import collections
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from analysis.execution import implementation_figure
from experiments.arguments import names_of
from experiments.documents import Drawing, LongTable, links, long_table, made, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.steps.job import PORTFOLIO, WIDEST_FIRST, Job
from experiments.steps.table import BUDGET, MODEL, REMARK, columns
from experiments.steps.torch_sizes import device_here, torch_names
from remat.implementation import DEFAULT
from remat.torch.implementations import IMPLEMENTATIONS

PAGE = "results/implementations.md"
MEASURED = (
    MODEL, BUDGET, "implementations", "predicted MB", "measured MB", "measured / predicted", "predicted overhead",
    "measured overhead", "gradient error", "computations by other implementations", REMARK,
)  # fmt: skip
CHOICES = ("default", "exact", "joint")
SUMMARY = (
    "implementations", "plans", "measured / predicted peak, at most", "the plain step's bits", "largest gradient error",
    "step time / predicted",
)  # fmt: skip
OFFERED = ("implementation", "of", "difference", "backward reads", "gradients")
NEVER = ("implementation", "offered in", "operations", "why no plan runs it")


@experiment(page=PAGE)
def implementations(
    models: Sequence[str] = ("mobilenet_v2", "unet", "vgg16", "resnet50", "googlenet"),
    choices: Sequence[str] = ("default", "exact", "joint"), budgets: Sequence[float] = (0.8, 0.6, 0.45),
    device: str = "cpu", rounds: int = 7, time_limit_s: float = 8.0, threads: int = 2,
) -> Iterator[Case]:  # fmt: skip
    """PyTorch's plans that choose implementations beside those that only recompute: memory, time, gradients."""
    names_of("choice", choices, WIDEST_FIRST)
    for model in names_of("model", models, torch_names()):
        yield Job(
            "torch", model, device_here(device), time_limit_s=time_limit_s, threads=threads, rounds=rounds,
            fractions=budgets, choices=choices,
        ).case  # fmt: skip


@implementations.draws
def page(rows: Sequence[Row]) -> Drawing:
    """How promises were kept, the figure, and tables of implementations, of plans, and of what no plan runs."""
    rows = in_order(rows)
    long = [
        LongTable("implementations", OFFERED, every_implementation()),
        long_table("implementations_measured", [row for row in rows if row["offered"] is None], columns(MEASURED)),
        LongTable("implementations_never", NEVER, never_chosen(rows)),
    ]  # fmt: skip
    first, torch = rows[0], json.loads(rows[0]["versions"]).get("torch", "")
    how = (
        f"{made(rows)}, {first['threads']} threads, PyTorch {torch}, {first['time_limit_s']:g} s per plan, "
        f"medians over {first['rounds']} rounds of a plain and a planned step each:"
    )
    text = f"{how}\n\n{summary(rows)}\n\nTables: {links(PAGE, *long)}."
    return Drawing(text, long, {"implementations": implementation_figure(rows)})


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The CPU first; of each model the plain step's row, then those of plans, the largest budget first."""
    models = list(dict.fromkeys((row["device"], row["model"]) for row in rows))
    return sorted(rows, key=lambda row: (row["device"] != "cpu", models.index((row["device"], row["model"])),
                                         -(row["budget_bytes"] or math.inf), row["implementations"]))  # fmt: skip


def summary(rows: Sequence[Row]) -> str:
    """How plans kept their promises, by the implementations they choose from; joint plans beside default ones."""
    plans = [row for row in rows if row["method"] == PORTFOLIO]
    measured = [row for row in plans if _is_measured(row)]
    by_choice = ((name, [row for row in measured if row["implementations"] == name]) for name in CHOICES)
    kept = markdown_table(SUMMARY, [[f"`{name}`", *_promise(mine)] for name, mine in by_choice if mine])
    beside = _beside_default(plans)
    return f"{kept}\n\n{beside}" if beside else kept


def _beside_default(plans: Sequence[Row]) -> str:
    """Joint plans beside default plans at equal budgets; '' if no joint plan was asked for."""
    default, joint = (
        {(row["device"], row["model"], row["parameter"]): row for row in plans if row["implementations"] == choice}
        for choice in ("default", "joint")
    )
    if not joint:
        return ""
    pairs = [(row, default[key]) for key, row in joint.items() if key in default]
    both = [(a, b) for a, b in pairs if _is_measured(a) and _is_measured(b)]
    only = sum(_is_measured(a) and not _is_measured(b) for a, b in pairs)
    lost = sum(_is_measured(b) and not _is_measured(a) for a, b in pairs)
    lines = []
    if both:
        predicted = [(1 + (a["predicted_overhead"] or 0.0)) / (1 + (b["predicted_overhead"] or 0.0)) for a, b in both]
        measured = [(a["measured_ratio"] or 0.0) / (b["measured_ratio"] or 1.0) for a, b in both]
        lines.append(
            f"At equal budgets a step of the joint plan takes {_spread(predicted)} of the default plan's time by "
            f"prediction and {_spread(measured)} measured; of {len(both)}, "
            f"{sum(r < 1 for r in predicted)} are predicted to be faster, {sum(r < 1 for r in measured)} are measured "
            "to be."
        )
    lines.append(f"Budgets with a joint plan only: {only}; with a default plan only: {lost}.")
    return " ".join(lines)


def _is_measured(row: Row) -> bool:
    return row["measured_peak_bytes"] is not None


def _promise(rows: Sequence[Row]) -> list[str]:
    """The cells of `SUMMARY` after the first."""
    worst = max((row["measured_peak_bytes"] or 0) / (row["predicted_peak_bytes"] or 1) for row in rows)
    times = [(row["measured_ratio"] or 0.0) / (1 + (row["predicted_overhead"] or 0.0)) for row in rows]
    return [
        str(len(rows)), f"{worst:.4f}", f"{sum(bool(row['same_as']) for row in rows)} of {len(rows)}",
        f"{max(row['gradient_error'] or 0.0 for row in rows):.1e}", _spread(times),
    ]  # fmt: skip


def never_chosen(rows: Iterable[Row]) -> list[list[str]]:
    """Implementations that were offered and that no plan runs, and why, as rows of `NEVER`."""
    offers: dict[str, dict[tuple[str, str], dict[str, Any]]] = collections.defaultdict(dict)
    chosen: set[str] = set()
    held: dict[str, float] = collections.defaultdict(float)
    for row in rows:
        for name, offer in (row["offered"] or {}).items():  # the last of those offered to exact and to joint plans
            offers[name][row["device"], row["model"]] = offer
        chosen |= set(row["chosen"] or {})
        for name, share in (row["held"] or {}).items():
            held[name] = max(held[name], share)
    return [
        [name, ", ".join(model for _, model in mine), str(sum(o["operations"] for o in mine.values())),
         _why_never(list(mine.values()), held[name])]
        for name, mine in sorted(offers.items()) if name not in chosen
    ]  # fmt: skip


def _why_never(offers: list[dict[str, Any]], held: float) -> str:
    n = sum(offer["offers"] for offer in offers)
    reasons = []
    needed = sum(offer["needed_later"] for offer in offers)
    if needed:
        reasons.append(f"{needed} of {n}: a later operation reads the value that it overwrites")
    worse: collections.Counter[str] = collections.Counter()
    for offer in offers:
        worse.update(offer["worse_than"])
    reasons += [f"{times} of {n}: not faster than {other}, and saves no memory beyond that one's"
             if other != DEFAULT else f"{times} of {n}: not faster than the default, and saves no memory"
             for other, times in worse.most_common()]  # fmt: skip
    left = n - needed - worse.total()
    if left:
        rest = [o for o in offers if o["offers"] > o["needed_later"] + sum(o["worse_than"].values())]
        slower = [o["slower"] for o in rest]
        kept, running = (max(o[key] for o in rest) for key in ("spares_kept_bytes", "spares_running_bytes"))
        ends = dict.fromkeys(f"{1 + end:.2f}" for end in (min(slower), max(slower)))
        text = f"{left} of {n}: {' to '.join(ends)} of the default's time"
        saved = [f"{size / 1e6:.1f} MB {when}" for size, when in
                 ((kept, "kept for the backward pass"), (running, "while it runs")) if size > 0]  # fmt: skip
        text += f", to save at most {' and '.join(saved)}" if saved else ""
        if min(slower) < 0:
            text += "; faster, but the search did not take it within its time"
        elif kept <= 0 and held and held < 0.9995:
            text += f"; but memory is then at most {held:.1%} of a plan's peak"
        reasons.append(text)
    return "; ".join(reasons)


def every_implementation() -> list[list[str]]:
    """Every implementation of `remat.torch.implementations`, as rows of `OFFERED`."""
    rows = []
    for name, one in IMPLEMENTATIONS.items():
        calls = " + ".join(kind.removeprefix("aten.") for kind in one.forward_kinds)
        tolerance = one.tolerance.get("float32")
        gradients = "exact" if one.exact else f"to {tolerance:.0e} of the largest" if tolerance else "to rounding"
        devices = "" if one.devices == ("cpu", "cuda") else f", {one.devices[0]} only"
        difference = "none: PyTorch's own" if one.is_default else one.family.value
        rows.append([name, f"{calls}{devices}", difference, ", ".join(one.reads), gradients])
    return rows


def _spread(ratios: Iterable[float]) -> str:
    ratios = sorted(ratios)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f} (median {statistics.median(ratios):.2f})"
