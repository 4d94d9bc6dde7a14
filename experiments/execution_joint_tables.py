"""Tables of `experiments.execution_joint`: what implementations there are, and what plans make of them."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable
from typing import Any

from experiments.documents import markdown_table
from remat.implementation import DEFAULT

Measured = dict[str, Any]  # a model, its device and its rows
Row = dict[str, Any]

MAIN = (
    "model, batch (operations)", "budget", "operators", "predicted MB", "measured MB", "measured / predicted",
    "predicted overhead", "measured overhead", "gradient error", "computations by other implementations",
)  # fmt: skip
FUSED = (
    "In plans `batch_norm_from_leaky_relu` is batch norm's part of the backward pass of `batch_norm_leaky_relu`: from "
    "the output of the leaky ReLU, which `leaky_relu_in_place` writes over the batch norm's."
)
PROMISE = 1.03  # measured over predicted, at most


def document(run: dict[str, Any]) -> str:
    """Everything that stands between the marks of docs/implementations.md."""
    parts = ["### What there is", implementations(), "### Measured"]
    if not run["models"]:
        return "\n\n".join([*parts, "Not measured yet."])
    models = sorted(run["models"].values(), key=lambda measured: measured["device"] != "cpu")
    lines = [line_of(measured, row) for measured in models for row in shown(measured)]
    never = never_chosen(models)
    parts += [
        _how(run, models), "\n".join([*main_heads(), *lines]), "\n".join(f"- {line}" for line in summary(models)),
        "### Offered and never chosen", never or "Every implementation that was offered runs in some plan.",
    ]  # fmt: skip
    return "\n\n".join(parts)


def main_heads() -> list[str]:
    return markdown_table(MAIN, ()).splitlines()


def shown(measured: Measured) -> list[Row]:
    """The plain step's row, then those of plans, the largest budget first."""
    rows = [row for row in measured["rows"] if row["method"] != "offered"]
    return sorted(rows, key=lambda row: (-row.get("budget_bytes", math.inf), row["method"]))


def line_of(measured: Measured, row: Row) -> str:
    """A row of the main table."""
    plain = next(r for r in measured["rows"] if r["method"] == "plain")
    where = "" if measured["device"] == "cpu" else f" on {measured['device']}"
    cells = [f"{measured['model']}{where}, {measured['batch']} ({plain['operations']})"]
    if row["method"] == "plain":
        cells += ["plain", ""]
    else:
        cells += [f"{row['parameter']}: {row['budget_bytes'] / 1e6:.1f} MB", row["method"]]
    if "note" in row:
        cells += [_reason(row["note"]), "", "", "", "", "", ""]
    else:
        peak, error = row["predicted_peak_bytes"], row.get("gradient_error", 0.0)
        overhead = row.get("predicted_overhead")
        bits = {True: "same bits", False: "0, other bits elsewhere", None: "0"}[row["same"]]
        if row["method"] == "plain":
            bits = f"{error:.1e} by rounding"
        elif error:
            bits = f"{error:.1e}"
        cells += [
            f"{peak / 1e6:.1f}" if peak else "", f"{row['measured_peak_bytes'] / 1e6:.1f}",
            f"{row['measured_peak_bytes'] / peak:.4f}" if peak else "",
            "" if overhead is None else f"{overhead:+.1%}", _measured_overhead(row),
            bits, _counted(row.get("chosen", {})),
        ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def summary(models: Iterable[Measured]) -> list[str]:
    """What the rows say of the promise, and of joint plans beside those that only recompute."""
    plans = [(m, row) for m in models for row in m["rows"] if row["method"] not in ("plain", "offered")]
    ended = [(m, row) for m, row in plans if "note" not in row]
    lines = []
    for operators in ("default", "exact", "joint"):
        mine = [(row["measured_peak_bytes"] / row["predicted_peak_bytes"], m, row)
                for m, row in ended if row["method"] == operators]  # fmt: skip
        if mine:
            worst, m, row = max(mine, key=lambda x: x[0])
            kept = "" if worst <= PROMISE else f": MORE THAN {PROMISE - 1:.0%} ABOVE"
            bits = [row["same"] for _, _, row in mine]
            late = [_late(row) for _, _, row in mine]
            lines.append(
                f"`{operators}`: measured over predicted peak is at most {worst:.4f} ({m['model']} at "
                f"{row['parameter']}){kept}; {bits.count(True)} of {len(mine)} plans leave the plain step's bits, the "
                f"largest gradient error is {max(row['gradient_error'] for _, _, row in mine):.1e}; step times are "
                f"{_spread(late)} of those predicted over plain, in {sum(ratio <= PROMISE for ratio in late)} of "
                f"{len(mine)} plans at most {PROMISE - 1:.0%} above"
            )
    of = {(m["device"], m["model"], row["method"], row["parameter"]): row for m, row in plans}
    pairs = [(row, of.get((m["device"], m["model"], "default", row["parameter"]))) for m, row in plans
             if row["method"] == "joint"]  # fmt: skip
    both = [(joint, other) for joint, other in pairs if other and "note" not in joint and "note" not in other]
    if both:
        predicted = [(1 + a["predicted_overhead"]) / (1 + b["predicted_overhead"]) for a, b in both]
        taken = [a["measured_ratio"] / b["measured_ratio"] for a, b in both]
        lines.append(
            f"At equal budgets a step of the joint plan takes {_spread(predicted)} of the time of the default one by "
            f"prediction, {_spread(taken)} measured ({sum(r < 1 for r in predicted)} of {len(both)} predicted to be "
            f"faster, {sum(r > 1 for r in predicted)} slower)"
        )
    only = [joint for joint, other in pairs if "note" not in joint and other and "note" in other]
    lost = [joint for joint, other in pairs if "note" in joint and other and "note" not in other]
    if pairs:
        lines.append(f"At {len(only)} budgets only the joint plan exists, at {len(lost)} only the default one")
    return lines


def never_chosen(models: Iterable[Measured]) -> str:
    """Implementations that no plan runs, and why, where that can be computed; '' if there are none."""
    offers: dict[str, list[tuple[Measured, dict[str, Any]]]] = collections.defaultdict(list)
    chosen: set[str] = set()
    held: dict[str, float] = collections.defaultdict(float)
    for measured in models:
        latest = {}  # of those offered to exact and to joint plans
        for row in measured["rows"]:
            latest |= row.get("offered", {})
            chosen |= set(row.get("chosen", {}))
            for name, share in row.get("held", {}).items():
                held[name] = max(held[name], share)
        for name, offer in latest.items():
            offers[name].append((measured, offer))
    rows = [
        (f"`{name}`", ", ".join(m["model"] for m, _ in mine), str(sum(o["operations"] for _, o in mine)),
         _why_never([o for _, o in mine], held[name]))
        for name, mine in sorted(offers.items()) if name not in chosen
    ]  # fmt: skip
    heads = ("implementation", "offered in", "operations", "why it is in no plan")
    return markdown_table(heads, rows).replace("| --- | --: | --: | --: |", "| --- | --- | --: | --- |") if rows else ""


def _why_never(offers: list[dict[str, Any]], held: float) -> str:
    n = sum(offer["offers"] for offer in offers)
    said = []
    needed = sum(offer["needed_later"] for offer in offers)
    if needed:
        said.append(f"{needed} of {n}: what it overwrites is read again later")
    worse: collections.Counter[str] = collections.Counter()
    for offer in offers:
        worse.update(offer["worse_than"])
    said += [f"{times} of {n}: not faster than `{other}`, and spares nothing that this one does not spare"
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
        said.append(text)
    return "; ".join(said)


def implementations() -> str:
    """Every implementation of `remat.torch.implementations`, as Markdown."""
    from remat.torch.implementations import IMPLEMENTATIONS

    rows = []
    for name, made in IMPLEMENTATIONS.items():
        calls = " + ".join(kind.removeprefix("aten.") for kind in made.forward_kinds)
        tolerance = made.tolerance.get("float32")
        gradients = "exact" if made.exact else f"to {tolerance:.0e} of the largest" if tolerance else "to rounding"
        devices = "" if made.devices == ("cpu", "cuda") else f", {made.devices[0]} only"
        note = "what PyTorch does anyway" if made.is_default else made.family.value
        rows.append((f"`{name}`", f"{calls}{devices}", note, ", ".join(made.reads), gradients))
    table = markdown_table(("implementation", "of", "what is other", "backward reads", "gradients"), rows)
    table = table.replace("| --- | --: | --: | --: | --: |", "| --- | --- | --- | --- | --- |")
    return f"{table}\n\n{FUSED}"


def _how(run: dict[str, Any], models: list[Measured]) -> str:
    dates = sorted({measured["date"] for measured in models})
    gpu = "" if any(m["device"] == "cuda" for m in models) else " No GPU was at hand."
    return (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {run['cpu']}, {run['threads']} threads, PyTorch "
        f"{run['versions'].get('torch', '')}, eager backend, {run['time_limit_s']:g} s per plan, times as medians over "
        f"{run['rounds']} rounds of a plain and a planned step each (quartiles in brackets): the plain row says how "
        f"far a plain step is from itself.{gpu} Gradient errors are the largest, relative to the largest gradient; "
        "that of the plain row is what the plain step's gradients change by if every parameter is another in its last "
        "bit. A forward and a backward operation are two computations, and so is each repetition."
    )


def _late(row: Row) -> float:
    return row["measured_ratio"] / (1 + row["predicted_overhead"])


def _measured_overhead(row: Row) -> str:
    spread = [f"{100 * (quartile - 1):+.0f}" for quartile in row.get("ratio_quartiles", ())]  # older rows have none
    return f"{row['measured_ratio'] - 1:+.1%}" + (f" ({' to '.join(spread)})" if spread else "")


def _spread(ratios: Iterable[float]) -> str:
    ratios = sorted(ratios)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f} (median {statistics.median(ratios):.2f})"


def _range(slower: list[float]) -> str:
    low, high = 1 + min(slower), 1 + max(slower)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _counted(chosen: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in chosen.items())


def _reason(note: str) -> str:
    """Why there is no plan, in one line that does not break a table."""
    _, found, rest = note.partition(" within ")
    return (rest if found else note).replace("|", "/")[:200]
