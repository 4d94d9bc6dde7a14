"""The tables and the figure of docs/results/compiled-steps.md: plans under Inductor beside PyTorch's knob."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.compiled import draw_compiled
from experiments.compiled import DROPOUT, MODELS, RESULTS, SOLVERS
from experiments.documents import DOCS, Document, Drawing, markdown_table
from experiments.settings import RUNS_FOLDER
from remat.errors import InvalidInput
from remat.files import read_json

FOLDER = RUNS_FOLDER / "compiled"


def draw(arguments: Sequence[str]) -> Drawing:
    """The tables and the figure, from the stored results of ``make compiled``.

    Raises:
        InvalidInput: nothing is stored.
    """
    models = [read_json(RESULTS / f"{name}.json") for name in MODELS if (RESULTS / f"{name}.json").is_file()]
    if not models or not (RESULTS / DROPOUT).is_file():
        raise InvalidInput(f"nothing in {RESULTS}; run make compiled")
    parts = []
    for model in models:
        parts += [
            f"**{model['model']}**, {model['date']}, PyTorch {model['torch']}, {model['cpu']}, {model['threads']} "
            f"threads, {model['rounds']} paired rounds, {model['time_limit_s']:g} s of search:",
            markdown_table(["step", "peak", "of the plain peak", "step time / plain's: median, quartiles", "predicted",
                            "measured − predicted peak"], _rows(model)),
            _promised(model), *_against(model), *_rising(model),
        ]  # fmt: skip
    dropped = read_json(RESULTS / DROPOUT)
    parts += [
        "Dropout: the loss against the product of the last weight and its gradient, which are equal if both passes "
        "drop the same elements:",
        markdown_table(["step", "share or budget", "relative error"], [_dropout(row) for row in dropped["rows"]]),
    ]  # fmt: skip
    drawn = next(path for path in draw_compiled(models, FOLDER) if path.suffix == ".png")
    return Drawing("\n\n".join(parts), figures={"compiled": drawn})


def _rows(model: Mapping[str, Any]) -> Iterator[list[str]]:
    """The plain step, distinct points of the knob, and remat's; the largest peak first."""
    plain = next(row for row in model["rows"] if row["variant"] == "plain")
    seen = set[tuple[str, int]]()
    for row in sorted(model["rows"], key=lambda row: (_place(row), -row["peak_bytes"])):
        key = row["variant"], row["peak_bytes"]
        if key in seen:
            continue
        seen.add(key)
        name = f"knob {row['share']:g} ({row['variant']})" if row["variant"] in SOLVERS else row["variant"]
        predicted = f"{1 + row['overhead']:.3f}" if "overhead" in row else ""
        differs = f"{row['peak_bytes'] - row['predicted_bytes']} B" if "predicted_bytes" in row else ""
        yield [
            name, _megabytes(row["peak_bytes"]), f"{row['peak_bytes'] / plain['peak_bytes']:.1%}",
            _quartiles(row["ratios"]), predicted, differs,
        ]  # fmt: skip


def _place(row: Mapping[str, Any]) -> int:
    return ("plain", "eager", *SOLVERS, "remat").index(row["variant"])


def _against(model: Mapping[str, Any]) -> Iterator[str]:
    """For each point of the knob, the fastest of remat's plans that needs no more."""
    ours = [row for row in model["rows"] if row["variant"] == "remat"]
    lines, seen = [], set[int]()
    for row in model["rows"]:
        fitting = [each for each in ours if each["peak_bytes"] <= row["peak_bytes"]]
        if row["variant"] not in SOLVERS or not fitting or row["peak_bytes"] in seen:
            continue
        seen.add(row["peak_bytes"])
        best = min(fitting, key=lambda each: statistics.median(each["ratios"]))
        ratios = [mine / theirs for mine, theirs in zip(best["ratios"], row["ratios"], strict=True)]
        lines.append([
            f"{row['share']:g} ({row['variant']})", _megabytes(row["peak_bytes"]),
            _megabytes(best["peak_bytes"]), _quartiles(ratios),
        ])  # fmt: skip
    if lines:
        yield markdown_table(["the knob's share", "its peak", "remat's peak", "remat's time / the knob's"], lines)


def _promised(model: Mapping[str, Any]) -> str:
    """How many plans are as fast as promised, within the quartiles of their rounds."""
    ours = {row["peak_bytes"]: row for row in model["rows"] if row["variant"] == "remat"}.values()
    quartiles = [(1 + row["overhead"], *statistics.quantiles(row["ratios"], n=4)) for row in ours]
    within = sum(low <= promised <= high for promised, low, _, high in quartiles)
    slower = sum(promised < low for promised, low, _, _ in quartiles)
    return (f"1 + the promised overhead lies within the quartiles in {within} of {len(quartiles)} plans; "
            f"{slower} are slower than that, {len(quartiles) - within - slower} faster.")  # fmt: skip


def _rising(model: Mapping[str, Any]) -> Iterator[str]:
    """Peaks of the knob that rise as its share falls, and the lowest peaks of both."""
    for solver in SOLVERS:
        rows = [row for row in model["rows"] if row["variant"] == solver]
        pairs = [(a, b) for a, b in itertools.pairwise(rows) if b["peak_bytes"] > 1.002 * a["peak_bytes"]]
        if pairs:
            rises = ", ".join(
                f"{a['share']:g} to {b['share']:g}: {_megabytes(a['peak_bytes'])} to "
                f"{_megabytes(b['peak_bytes'])}" for a, b in pairs
            )  # fmt: skip
            yield f"The knob's peak rises as its share falls ({solver}): {rises}."
    lowest = {
        variant: min((row["peak_bytes"] for row in model["rows"] if row["variant"] in group), default=0)
        for variant, group in (("knob", SOLVERS), ("remat", ("remat",)))
    }
    yield (f"Lowest peak: {_megabytes(lowest['remat'])} with remat, "
           f"{_megabytes(lowest['knob'])} with the knob.")  # fmt: skip


def _quartiles(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _dropout(row: Mapping[str, Any]) -> list[str]:
    share = f"{row['share']:g}" if "share" in row else ""
    return [row["variant"], share, f"{row['error']:.1e}"]


DOCUMENT = Document("compiled", DOCS / "results" / "compiled-steps.md", draw)
