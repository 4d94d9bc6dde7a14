"""The roofline against measured costs, for docs/results/roofline.md.

The P100 profiles published with monet-schedules have each operation's kind and time, but not its work. The project's
own graphs of the five networks have the same operations in the same order, with their work.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from analysis import figures
from experiments.documents import Drawing, LongTable, links, markdown_table
from experiments.measure_solve import MONET_COSTS, published_folder
from experiments.registry import experiment
from experiments.settings import configured_model
from remat.cost import apply_cost
from remat.cost.gpu import EFFICIENCY, Gpu, load_gpu, operation_class
from remat.cost.roofline import efficiency_keys, operation_ns
from remat.extraction import extract
from remat.frontends.monet import BATCHES, monet_graph, read_costs
from remat.graph import Work

PAGE = "results/roofline.md"
TICK_NS = 10_000  # times are rounded to this
FITTED = ("vgg16_b176", "resnet50_b184", "unet_b11")  # networks to which the default efficiencies were fitted
OF_CONVOLUTIONS = ("convolution traffic", "weight gradients")
APART = "the same, convolutions' traffic apart"
Rates = Mapping[str, float]
Keys = Callable[[str, bool], tuple[str | None, str]]

NETWORKS = {f"{name}_b{batch}": monet_graph(name, implementations="none").operations for name, batch in BATCHES.items()}


@dataclass(frozen=True, slots=True)
class Timed:
    """What is known of an operation, and its measured time."""

    kind: str
    work: Work
    is_backward: bool
    measured_ns: int


def timed(network: str, measured_ns: Sequence[int]) -> list[Timed]:
    """The operations with a time on both sides: no views, and no times that the profile rounds to 0."""
    return [
        Timed(op.kind.split("::")[-1], op.work, op.is_backward, ns)
        for op, ns in zip(NETWORKS[network], measured_ns, strict=True)
        if ns > 0 and op.work is not None and not op.work.is_free
    ]


def published(folder: Path, network: str) -> list[int]:
    """The times in ns of all operations by default implementations; `folder` holds monet/."""
    document = read_costs(folder / MONET_COSTS.format(network.partition("_b")[0]))
    (times,) = (each["operations"] for each in document["sets"] if each["name"] == "normal")
    return [round(own["t"][0] * 100) * TICK_NS for own in times]


def own_traffic(kind: str, is_backward: bool) -> tuple[str | None, str]:
    """As `efficiency_keys`, but convolutions move data at rates of their own, and gradients of weights at another."""
    arithmetic, traffic = efficiency_keys(kind, is_backward)
    if arithmetic == "convolution":
        traffic = OF_CONVOLUTIONS[kind.endswith("_param_grad")]
    return arithmetic, traffic


def predict_ns(pairs: Iterable[Timed], gpu: Gpu, rates: Rates | None = None) -> np.ndarray:
    """[pairs] roofline times in ns; with `rates`, by these fractions of the peak rates."""
    if rates is None:
        return np.array([operation_ns(p.kind, p.work, gpu, p.is_backward) for p in pairs], dtype=float)
    seconds = []
    for pair in pairs:
        arithmetic, traffic = own_traffic(pair.kind, pair.is_backward)
        flops_s, bytes_s = at_peak_s(pair, gpu)
        seconds.append(max(flops_s / rates.get(arithmetic or "", 1.0), bytes_s / rates[traffic]))
    return 1e9 * (np.array(seconds) + gpu.launch_overhead_s)


def at_peak_s(pair: Timed, gpu: Gpu) -> tuple[float, float]:
    """Seconds of arithmetic and of traffic at the peak rates."""
    work = pair.work
    return (work.flops or 0) / gpu.peak_flops["float32"], work.bytes_moved / gpu.bandwidth_bytes_per_s


def fit(
    pairs: Sequence[Timed], gpu: Gpu, rounds: int = 20, *, keys: Keys = efficiency_keys, by_time: bool = False
) -> dict[str, float]:
    """Achieved fractions of the peak rates: each is the median over the operations that it bounds, in `rounds` rounds.

    A fraction that bounds no operation of `pairs` keeps its value in `EFFICIENCY`, or that of memory.

    Args:
        by_time: an operation counts by its time in the median.
    """
    rates = {key: EFFICIENCY["memory"] for pair in pairs for key in keys(pair.kind, pair.is_backward) if key}
    rates |= EFFICIENCY
    for _ in range(rounds):
        found: dict[str, list[tuple[float, float]]] = {key: [] for key in rates}
        for pair in pairs:
            arithmetic, traffic = keys(pair.kind, pair.is_backward)
            busy_s = pair.measured_ns * 1e-9 - gpu.launch_overhead_s
            if busy_s <= 4 * gpu.launch_overhead_s:
                continue  # launch and rounding dominate
            flops_s, bytes_s = at_peak_s(pair, gpu)
            if arithmetic and flops_s / rates[arithmetic] > bytes_s / rates[traffic]:
                found[arithmetic].append((flops_s / busy_s, busy_s))
            else:
                found[traffic].append((bytes_s / busy_s, busy_s))
        for key, own in found.items():
            if own:
                ratios, seconds = np.array(own).T
                middle = (
                    np.quantile(ratios, 0.5, weights=seconds, method="inverted_cdf") if by_time else np.median(ratios)
                )
                rates[key] = min(1.0, float(middle))
    return rates


def scores(pairs: Sequence[Timed], gpu: Gpu, rates: Rates | None = None) -> tuple[float, float, float]:
    """(rank correlation, median relative error, total predicted / total measured); arguments as `predict_ns`."""
    measured, predicted = np.array([p.measured_ns for p in pairs], dtype=float), predict_ns(pairs, gpu, rates)
    error = np.abs(predicted - measured) / measured
    with warnings.catch_warnings(action="ignore"):  # of a side that is constant: NaN
        rank = spearmanr(measured, predicted).statistic  # pyright: ignore[reportAttributeAccessIssue]
    return float(rank), float(np.median(error)), float(predicted.sum() / measured.sum())


def compared(folder: Path) -> dict[str, list[Timed]]:
    """[network] its compared operations; `folder` holds monet/."""
    return {name: timed(name, published(folder, name)) for name in NETWORKS}


def comparison(folder: Path) -> tuple[str, list[LongTable]]:
    """The table of the page (how well the roofline predicts each network), and the long tables."""
    gpu = load_gpu("p100")
    found = compared(folder)
    everything = [pair for pairs in found.values() for pair in pairs]
    ideal = replace(gpu, efficiency=dict.fromkeys(EFFICIENCY, 1.0))
    rows, fits = list[list[str]](), list[tuple[str, Rates]]()
    for name, pairs in found.items():
        others = [pair for other, them in found.items() if other != name for pair in them]
        rest = fit(others, gpu)
        fits.append((f"without {name}", rest))
        how = {"peak rates": (ideal,), "defaults": (gpu,), "fitted on the other four": (replace(gpu, efficiency=rest),),
               APART: (gpu, fit(others, gpu, keys=own_traffic, by_time=True))}  # fmt: skip
        rows += [[name, label, *_cells(scores(pairs, *given))] for label, given in how.items()]
    fits += [("all five", fit(everything, gpu)), (APART, fit(everything, gpu, keys=own_traffic, by_time=True)),
             ("the first three", fit([pair for name in FITTED for pair in found[name]], gpu)),
             ("defaults", gpu.efficiency)]  # fmt: skip
    kinds = []
    for kind in sorted({_group(pair) for pair in everything}):
        group = [pair for pair in everything if _group(pair) == kind]
        share = sum(p.measured_ns for p in group) / sum(p.measured_ns for p in everything)
        kinds.append([kind, str(len(group)), f"{share:.1%}", *_cells(scores(group, gpu))])
    score_heads = ["rank correlation", "median relative error", "total / measured"]
    columns = [*EFFICIENCY, *OF_CONVOLUTIONS]
    rates = [[label, *(f"{rates[key]:.2f}" if key in rates else "" for key in columns)] for label, rates in fits]
    long = [
        LongTable("roofline_efficiencies", ("fitted on", *columns), rates),
        LongTable("roofline_kinds", ("operations (defaults)", "count", "time", *score_heads), kinds),
    ]  # fmt: skip
    return markdown_table(["network", "efficiencies", *score_heads], rows), long


def _cells(scored: tuple[float, float, float]) -> list[str]:
    rank, error, total = scored
    return ["-" if math.isnan(rank) else f"{rank:.3f}", f"{error:.1%}", f"{total:.2f}"]


def frontend_table(folder: Path) -> str:
    """Roofline totals of this project's own PyTorch graphs beside the measured totals, as Markdown."""
    gpu, rows = load_gpu("p100"), []
    for name in NETWORKS:
        model, _, batch = name.partition("_b")
        spec = replace(configured_model(f"torch_{model}"), batch_size=int(batch))
        graph = apply_cost(extract(spec), "roofline", gpu)
        measured = [*zip(NETWORKS[name], published(folder, name), strict=True)]
        row = [name, str(len(graph))]
        for directions in ((False,), (True,), (False, True)):
            ours = sum(op.cost for op in graph.operations if op.is_backward in directions)
            theirs = sum(ns for op, ns in measured if op.is_backward in directions)
            row.append(f"{ours / theirs:.2f}")
        rows.append(row)
    return markdown_table(
        ["through the PyTorch frontend", "operations", "forward", "backward", "total / measured"], rows
    )


def _group(pair: Timed) -> str:
    kind = pair.kind
    if operation_class(kind) in ("convolution", "matmul"):
        return kind.lstrip("_")
    return f"{kind.split('_ip_')[0].rstrip('_')} {'backward' if pair.is_backward else 'forward'}"


@experiment(page=PAGE, measures=False)
def roofline() -> Drawing:
    """Page: the roofline beside published P100 times (REMAT_INSTANCES has them)."""
    folder = published_folder("monet")
    gpu = load_gpu("p100")
    times = {name: (np.array([pair.measured_ns for pair in pairs], dtype=float), predict_ns(pairs, gpu))
             for name, pairs in compared(folder).items()}  # fmt: skip
    text, long = comparison(folder)
    text = "\n\n".join([text, frontend_table(folder), f"Tables: {links(PAGE, *long)}."])
    return Drawing(text, long, {"roofline": figures.roofline(times)})
