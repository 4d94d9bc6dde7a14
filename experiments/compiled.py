"""Plans under Inductor beside PyTorch's knob for compiled steps, see docs/results/compiled-steps.md."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

from analysis import figures
from analysis.charts import save_in_run
from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER
from experiments.table import made, values_of

SOLVERS = ("dp", "ilp")  # of the knob


@experiment(page="results/compiled-steps.md")
def compiled(
    models: Sequence[str] = ("gpt2", "llama", "vit", "resnet50", "unet"), rounds: int = 21, time_limit_s: float = 8.0,
    threads: int = 2,
) -> Iterator[Case]:  # fmt: skip
    """Compiled steps beside PyTorch's activation_memory_budget: memory, time, and whether dropout is right."""
    for model in models:
        what = {"model": model, "rounds": rounds, "time_limit_s": time_limit_s, "threads": threads}
        yield Case("experiments.steps.knob.compared", what, on_this_machine=True)
    yield Case("experiments.steps.knob.dropout", {"threads": threads}, on_this_machine=True)


@compiled.draws
def page(rows: Sequence[Row]) -> Drawing:
    """Tables of each network, the figure, and the errors of dropout."""
    networks = dict.fromkeys(row["model"] for row in rows if row["model"] is not None)
    models = {
        name: [row for row in rows if row["model"] == name and row["measured_bytes"] is not None] for name in networks
    }
    parts = []
    for name, model in models.items():
        parts += [
            f"**{name}**, {made(model, 'torch')}, {values_of(model, 'threads')} threads, {values_of(model, 'rounds')} "
            f"paired rounds, {values_of(model, 'time_limit_s')} s of search:",
            markdown_table(["step", "peak", "of the plain peak", "step time / plain's: median, quartiles", "predicted",
                            "measured − predicted peak"], _rows(model)),
            _promised(model), *_against(model), *_rising(model),
        ]  # fmt: skip
    parts += [
        "Dropout: the loss against the product of the last weight and its gradient, which are equal if both passes "
        "drop the same elements:",
        markdown_table(["step", "share or budget", "relative error"],
                       [_dropout(row) for row in rows if row["error"] is not None]),
    ]  # fmt: skip
    drawn = save_in_run(RUNS_FOLDER / "compiled", "compiled", figures.compiled, models)[0]
    return Drawing("\n\n".join(parts), figures={"compiled": drawn})


def _rows(model: Sequence[Row]) -> Iterator[list[str]]:
    """The plain step, distinct points of the knob, and remat's; the largest peak first."""
    plain = next(row for row in model if row["variant"] == "plain")
    seen = set[tuple[str, int]]()
    for row in sorted(model, key=lambda row: (_place(row), -row["measured_bytes"])):
        key = row["variant"], row["measured_bytes"]
        if key in seen:
            continue
        seen.add(key)
        name = f"knob {row['share']:g} ({row['variant']})" if row["variant"] in SOLVERS else row["variant"]
        predicted = f"{1 + row['overhead']:.3f}" if row["overhead"] is not None else ""
        differs = f"{row['measured_bytes'] - row['predicted_bytes']} B" if row["predicted_bytes"] is not None else ""
        yield [
            name, _megabytes(row["measured_bytes"]), f"{row['measured_bytes'] / plain['measured_bytes']:.1%}",
            _quartiles(row["ratios"]), predicted, differs,
        ]  # fmt: skip


def _place(row: Row) -> int:
    return ("plain", "eager", *SOLVERS, "remat").index(row["variant"])


def _against(model: Sequence[Row]) -> Iterator[str]:
    """For each point of the knob, the fastest of remat's plans that needs no more."""
    ours = [row for row in model if row["variant"] == "remat"]
    lines, seen = [], set[int]()
    for row in model:
        fitting = [each for each in ours if each["measured_bytes"] <= row["measured_bytes"]]
        if row["variant"] not in SOLVERS or not fitting or row["measured_bytes"] in seen:
            continue
        seen.add(row["measured_bytes"])
        best = min(fitting, key=lambda each: statistics.median(each["ratios"]))
        ratios = [mine / theirs for mine, theirs in zip(best["ratios"], row["ratios"], strict=True)]
        lines.append([
            f"{row['share']:g} ({row['variant']})", _megabytes(row["measured_bytes"]),
            _megabytes(best["measured_bytes"]), _quartiles(ratios),
        ])  # fmt: skip
    if lines:
        yield markdown_table(["the knob's share", "its peak", "remat's peak", "remat's time / the knob's"], lines)


def _promised(model: Sequence[Row]) -> str:
    """How many plans are as fast as promised, within the quartiles of their rounds."""
    ours = {row["measured_bytes"]: row for row in model if row["variant"] == "remat"}.values()
    quartiles = [(1 + row["overhead"], *statistics.quantiles(row["ratios"], n=4)) for row in ours]
    within = sum(low <= promised <= high for promised, low, _, high in quartiles)
    slower = sum(promised < low for promised, low, _, _ in quartiles)
    return (f"1 + the promised overhead lies within the quartiles in {within} of {len(quartiles)} plans; "
            f"{slower} are slower than that, {len(quartiles) - within - slower} faster.")  # fmt: skip


def _rising(model: Sequence[Row]) -> Iterator[str]:
    """Peaks of the knob that rise as its share falls, and the lowest peaks of both."""
    for solver in SOLVERS:
        rows = [row for row in model if row["variant"] == solver]
        pairs = [(a, b) for a, b in itertools.pairwise(rows) if b["measured_bytes"] > 1.002 * a["measured_bytes"]]
        if pairs:
            rises = ", ".join(
                f"{a['share']:g} to {b['share']:g}: {_megabytes(a['measured_bytes'])} to "
                f"{_megabytes(b['measured_bytes'])}" for a, b in pairs
            )  # fmt: skip
            yield f"The knob's peak rises as its share falls ({solver}): {rises}."
    lowest = {
        variant: min((row["measured_bytes"] for row in model if row["variant"] in group), default=0)
        for variant, group in (("knob", SOLVERS), ("remat", ("remat",)))
    }
    yield (f"Lowest peak: {_megabytes(lowest['remat'])} with remat, "
           f"{_megabytes(lowest['knob'])} with the knob.")  # fmt: skip


def _quartiles(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _dropout(row: Row) -> list[str]:
    share = "" if row["share"] is None else f"{row['share']:g}"
    return [row["variant"], share, f"{row['error']:.1e}"]
