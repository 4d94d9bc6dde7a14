"""Plans under Inductor beside PyTorch's knob for compiled steps, see docs/results/compiled-steps.md."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from operator import itemgetter

from analysis import figures
from experiments.documents import Drawing, LongTable, grouped, links, made, markdown_table, table_of
from experiments.registry import Case, Row, experiment

PAGE = "results/compiled-steps.md"
SOLVERS = ("dp", "ilp")  # of the knob
ORDER = ("plain", "eager", *SOLVERS, "remat")
DROPOUT = {"dropout": "{variant}", "share or budget": "{share:g}", "relative error": "{error:.1e}"}
HEADS = ("network", "plain peak", "lowest peak of the knob", "of remat", "remat's time / the knob's, at its peaks",
         "largest error of a peak", "plans as fast as promised / slower / faster")  # fmt: skip
STEPS = ("network", "step", "peak", "of the plain peak", "step time / plain's: median, quartiles", "predicted",
         "measured - predicted peak")  # fmt: skip
AGAINST = ("network", "the knob's share", "its peak", "remat's peak", "remat's time / the knob's")


@experiment(page=PAGE)
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
    """A line for each network, the knob's peaks that rise, the errors of dropout; long tables of all steps."""
    models = steps_of(rows)
    measured = [row for model in models.values() for row in model]
    long = [
        LongTable("compiled_steps", STEPS, [[name, *line] for name, model in models.items() for line in _rows(model)]),
        LongTable("compiled_against", AGAINST, [
            [name, *line] for name, model in models.items() for line, _ in _against(model)
        ]),
    ]  # fmt: skip
    parts = [
        made(measured, "torch", threads="threads", rounds="paired rounds", time_limit_s="s of search") + ".",
        markdown_table(HEADS, [[name, *_summary(model)] for name, model in models.items()]),
        markdown_table(["the knob's peak rises", "solver", "share: peak, then the next share and its peak"],
                       [[name, *line] for name, model in models.items() for line in _rising(model)], "lll"),
        table_of([row for row in rows if row["error"] is not None], DROPOUT),
        f"Tables: {links(PAGE, *long)}.",
    ]  # fmt: skip
    return Drawing("\n\n".join(parts), long, {"compiled": figures.compiled(models)})


def steps_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """[network] the rows of measured steps."""
    return grouped((row for row in rows if row["measured_bytes"] is not None), itemgetter("model"))


def _summary(model: Sequence[Row]) -> list[str]:
    """The cells of `HEADS` after the first."""
    peaks = {variant: min(row["measured_bytes"] for row in model if row["variant"] in group)
             for variant, group in (("plain", ("plain",)), ("knob", SOLVERS), ("remat", ("remat",)))}  # fmt: skip
    ratios = [ratio for _, ratio in _against(model)]
    ours = {row["measured_bytes"]: row for row in model if row["variant"] == "remat"}.values()
    quartiles = [(1 + row["overhead"], *statistics.quantiles(row["ratios"], n=4)) for row in ours]
    within = sum(low <= promised <= high for promised, low, _, high in quartiles)
    slower = sum(promised < low for promised, low, _, _ in quartiles)
    off = max(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in ours)
    return [
        *(_megabytes(peaks[variant]) for variant in ("plain", "knob", "remat")),
        f"{min(ratios):.3f} to {max(ratios):.3f}", f"{off} B",
        f"{within} / {slower} / {len(quartiles) - within - slower}",
    ]  # fmt: skip


def _rows(model: Sequence[Row]) -> Iterator[list[str]]:
    """The plain step, distinct points of the knob, and remat's; the largest peak first."""
    plain = next(row for row in model if row["variant"] == "plain")
    seen = set[tuple[str, int]]()
    for row in sorted(model, key=lambda row: (ORDER.index(row["variant"]), -row["measured_bytes"])):
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


def _against(model: Sequence[Row]) -> Iterator[tuple[list[str], float]]:
    """For each point of the knob, the fastest of remat's plans that needs no more, and the median ratio of times."""
    ours = [row for row in model if row["variant"] == "remat"]
    seen = set[int]()
    for row in model:
        fitting = [each for each in ours if each["measured_bytes"] <= row["measured_bytes"]]
        if row["variant"] not in SOLVERS or not fitting or row["measured_bytes"] in seen:
            continue
        seen.add(row["measured_bytes"])
        best = min(fitting, key=lambda each: statistics.median(each["ratios"]))
        ratios = [mine / theirs for mine, theirs in zip(best["ratios"], row["ratios"], strict=True)]
        yield [
            f"{row['share']:g} ({row['variant']})", _megabytes(row["measured_bytes"]),
            _megabytes(best["measured_bytes"]), _quartiles(ratios),
        ], statistics.median(ratios)  # fmt: skip


def _rising(model: Sequence[Row]) -> Iterator[list[str]]:
    """Peaks of the knob that rise as its share falls, for each solver."""
    for solver in SOLVERS:
        rows = [row for row in model if row["variant"] == solver]
        rises = ", ".join(
            f"{a['share']:g}: {_megabytes(a['measured_bytes'])} → {b['share']:g}: {_megabytes(b['measured_bytes'])}"
            for a, b in itertools.pairwise(rows) if b["measured_bytes"] > 1.002 * a["measured_bytes"]
        )  # fmt: skip
        if rises:
            yield [solver, rises]


def _quartiles(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
