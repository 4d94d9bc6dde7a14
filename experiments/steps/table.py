"""Columns of tables of executed steps, whose rows are those of `experiments.steps.measure`."""

from collections.abc import Iterable, Sequence

from experiments.documents import Column
from experiments.registry import Row
from experiments.steps.job import PLAIN, PORTFOLIO

MODEL, METHOD, BUDGET = "model, batch (operations)", "method", "budget"
REMARK = "remark"  # why there is no measurement, for one
STEPS = (  # of the steps of every framework
    MODEL, METHOD, "always there MB", "plain MB", BUDGET, "predicted MB", "measured MB", "measured / predicted",
    "predicted overhead", "measured overhead", "wall over plain", "repeats", "bits of", REMARK,
)  # fmt: skip
BESIDE = (
    "at the peak of", "MB", "its predicted time", "the portfolio's", "its measured time", "the portfolio's",
)  # fmt: skip


def beside(rows: Iterable[Row]) -> list[list[str]]:
    """Each other method beside the fastest plan within its peak, as cells of the columns `BESIDE`.

    Times are over the plain step's.
    """
    timed = [(row, row["predicted_peak_bytes"], row["predicted_ns"], row["measured_ratio"]) for row in rows]
    known = [(row, peak, ns, ratio) for row, peak, ns, ratio in timed if peak and ns and ratio is not None]
    plain_ns = next(ns for row, _, ns, _ in known if row["method"] == PLAIN)
    lines = []
    for row, limit, ns, ratio in known:
        ours = [(of, found) for plan, peak, of, found in known if plan["method"] == PORTFOLIO and peak <= limit]
        if row["method"] != PORTFOLIO and ours:
            best_ns, best_ratio = min(ours, key=lambda plan: plan[0])
            lines.append([
                f"{row['method']} {row['parameter']}".rstrip(), f"{limit / 1e6:.1f}",
                *(f"{number:.3f}" for number in (ns / plain_ns, best_ns / plain_ns, ratio, best_ratio)),
            ])  # fmt: skip
    return lines


def columns(heads: Sequence[str]) -> dict[str, Column]:
    """The columns with these heads."""
    return {head: COLUMNS[head] for head in heads}


def _model(row: Row) -> str:
    where = "" if row["device"] == "cpu" else f" on {row['device']}"
    batch = "" if row["batch"] is None else f", {row['batch']}"
    return f"{row['model']}{where}{batch} ({row['operations']})"


def _budget(row: Row) -> str:
    if row["method"] == PLAIN:
        return PLAIN
    if row["budget_bytes"] is None:
        return row["parameter"]
    size = f"{row['budget_bytes'] / 1e6:.1f} MB"
    if row["plain_bytes"] is None or row["fixed_bytes"] is None or row["plain_bytes"] <= row["fixed_bytes"]:
        return f"{row['parameter']}: {size}"
    of_activations = (row["budget_bytes"] - row["fixed_bytes"]) / (row["plain_bytes"] - row["fixed_bytes"])
    return f"{size}: {of_activations:.2f} of activations, {row['budget_bytes'] / row['plain_bytes']:.2f} of the peak"


def _accuracy(row: Row) -> str:
    if row["predicted_peak_bytes"] is None or row["measured_peak_bytes"] is None:
        return ""
    return f"{row['measured_peak_bytes'] / row['predicted_peak_bytes']:.4f}"


def _predicted_overhead(row: Row) -> str:
    return "" if row["predicted_overhead"] is None or row["method"] == PLAIN else f"{row['predicted_overhead']:+.1%}"


def _over_predicted(row: Row) -> str:
    """The step over the plain one, as measured and as predicted: 1.000 where the makespan is the judge's."""
    if row["measured_ratio"] is None or row["predicted_overhead"] is None or row["method"] == PLAIN:
        return ""
    return f"{row['measured_ratio'] / (1 + row['predicted_overhead']):.3f}"


def _measured_overhead(row: Row) -> str:
    """Over the step that predictions compare with: TensorFlow's as written, PyTorch's own."""
    if row["as_written_s"] is not None and row["measured_s"] is not None:
        return _over(row["measured_s"], row["as_written_s"])
    if row["measured_ratio"] is None:
        return ""
    spread = [f"{100 * (quartile - 1):+.0f}" for quartile in row["ratio_quartiles"] or ()]  # old rows have none
    return f"{row['measured_ratio'] - 1:+.1%}" + (f" ({' to '.join(spread)})" if spread else "")


def _over(ours: float | None, base: float | None, unit: str = "") -> str:
    if ours is None or base is None:
        return ""
    return f"{ours / base - 1:+.1%}" + (f" ({base * 1e3:.0f} to {ours * 1e3:.0f}{unit})" if unit else "")


def _bits(row: Row) -> str:
    if row["measured_peak_bytes"] is None:
        return ""
    return "the plain step differs from itself" if row["same_as"] is None else row["same_as"] or "nobody"


def _gradient_error(row: Row) -> str:
    if row["measured_peak_bytes"] is None:
        return ""
    if row["method"] == PLAIN:
        return f"{row['gradient_error'] or 0.0:.1e} by rounding"
    if row["gradient_error"]:
        return f"{row['gradient_error']:.1e}"
    return {None: "0", "": "0, other bits elsewhere"}.get(row["same_as"], "same bits")


COLUMNS: dict[str, Column] = {
    MODEL: _model,
    METHOD: "{method}",
    "implementations": lambda row: row["implementations"] if row["method"] == PORTFOLIO else "",
    BUDGET: _budget,
    "always there MB": "{fixed_bytes:.1f/MB}",
    "plain MB": "{plain_bytes:.1f/MB}",
    "predicted MB": "{predicted_peak_bytes:.1f/MB}",
    "measured MB": "{measured_peak_bytes:.1f/MB}",
    "measured / predicted": _accuracy,
    "predicted overhead": _predicted_overhead,
    "measured overhead": _measured_overhead,
    "link": "{link}",
    "time over the judge's": _over_predicted,
    "wall over plain": lambda row: _over(row["measured_s"], row["plain_s"], " ms"),
    "repeats": "{recomputed}",
    "gradient error": _gradient_error,
    "bits of": _bits,
    "computations by other implementations": lambda row: ", ".join(
        f"{k} {n}" for k, n in (row["chosen"] or {}).items()
    ),
    REMARK: lambda row: "" if row["note"] == row["parameter"] else row["note"],
}
