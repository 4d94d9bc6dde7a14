"""The roofline against measured costs, for docs/results/roofline.md.

The P100 profiles published with monet-schedules have each operation's kind, bytes and time, but no shapes. This
module rebuilds the three networks as lists of operations with shapes, aligns them with the profiles by kind and
bytes, and compares each aligned operation's roofline time with the measured one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from analysis import figures
from analysis.charts import save_in_run
from experiments.documents import DOCS, Drawing, LongTable, link_to, markdown_table
from experiments.measure_solve import graph_of, published_folder
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER, configured_model
from remat.cost import apply_cost
from remat.cost.gpu import EFFICIENCY, Gpu, load_gpu, operation_class
from remat.cost.roofline import efficiency_keys, operation_ns
from remat.extraction import extract
from remat.files import read_json
from remat.frontends.monet import BATCHES, monet_graph
from remat.graph import Work

PAGE = "results/roofline.md"
RUN = RUNS_FOLDER / "roofline"
PUBLISHED_MULTIPLE_BYTES = 1024  # the profiles' sizes are rounded up to this


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a rebuilt network: its kind and bytes in the profiles' terms, and its work."""

    kind: str
    bytes: int
    work: Work
    is_backward: bool = False


def rebuilt(name: str) -> list[Node]:
    """The training graph of a network with its published batch, with default implementations only."""
    graph = monet_graph(name, implementations="none")
    nodes = []
    for op, value in zip(graph.operations, graph.values, strict=True):
        assert op.work is not None
        nodes.append(Node(op.kind.split("::")[-1], value.bytes, op.work, op.is_backward))
    return nodes


NETWORKS = {"vgg16_b176": rebuilt("vgg16"), "resnet50_b184": rebuilt("resnet50"), "unet_b11": rebuilt("unet")}


@dataclass(frozen=True, slots=True)
class Pair:
    """An operation of a rebuilt network and its measured time."""

    node: Node
    measured_ns: int


def align(nodes: Sequence[Node], published: Sequence[dict]) -> list[Pair]:
    """Pairs of operations with equal kind, bytes and direction, in order (longest matching blocks)."""
    rounded = [-(-node.bytes // PUBLISHED_MULTIPLE_BYTES) * PUBLISHED_MULTIPLE_BYTES for node in nodes]
    ours = [(node.kind, size, node.is_backward) for node, size in zip(nodes, rounded, strict=True)]
    theirs = [(p["op"].split("::")[-1], p["bytes"], p["backward"]) for p in published]
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return [Pair(nodes[b.a + i], published[b.b + i]["cost"]) for b in blocks for i in range(b.size)]


def comparable(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs with a time on both sides: no views, and no times that the profile (10 us steps) rounds to 0."""
    return [pair for pair in pairs if pair.measured_ns > 0 and not pair.node.work.is_free]


def predict_ns(pairs: Iterable[Pair], gpu: Gpu) -> np.ndarray:
    """[pairs] roofline times in ns."""
    return np.array([operation_ns(p.node.kind, p.node.work, gpu, p.node.is_backward) for p in pairs], dtype=float)


def fit(pairs: Sequence[Pair], gpu: Gpu, rounds: int = 20) -> dict[str, float]:
    """Achieved fractions of the peak rates: each is the median over the operations that it bounds, in `rounds` rounds.

    A fraction that bounds no operation of `pairs` keeps its value in `EFFICIENCY`.
    """
    rates = dict(EFFICIENCY)
    for _ in range(rounds):
        ratios: dict[str, list[float]] = {key: [] for key in rates}
        for pair in pairs:
            arithmetic, traffic = efficiency_keys(pair.node.kind, pair.node.is_backward)
            busy_s = pair.measured_ns * 1e-9 - gpu.launch_overhead_s
            if busy_s <= 4 * gpu.launch_overhead_s:
                continue  # launch and rounding dominate
            flops_s = (pair.node.work.flops or 0) / gpu.peak_flops["float32"]
            bytes_s = pair.node.work.bytes_moved / gpu.bandwidth_bytes_per_s
            if arithmetic and flops_s / rates[arithmetic] > bytes_s / rates[traffic]:
                ratios[arithmetic].append(flops_s / busy_s)
            else:
                ratios[traffic].append(bytes_s / busy_s)
        rates |= {key: min(1.0, float(np.median(found))) for key, found in ratios.items() if found}
    return rates


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation, where ties share their mean rank; NaN where one side is constant."""
    ranks = [rankdata(x), rankdata(y)]
    return float(np.corrcoef(ranks)[0, 1]) if all(np.ptp(r) > 0 for r in ranks) else math.nan


def scores(pairs: Sequence[Pair], gpu: Gpu) -> tuple[float, float, float]:
    """(rank correlation, median relative error, total predicted / total measured)."""
    measured, predicted = np.array([p.measured_ns for p in pairs], dtype=float), predict_ns(pairs, gpu)
    error = np.abs(predicted - measured) / measured
    return spearman(measured, predicted), float(np.median(error)), float(predicted.sum() / measured.sum())


def compared(folder: Path) -> tuple[dict[str, list[Pair]], list[list[str]]]:
    """([network] its compared pairs, table rows about the alignments); `folder` holds p100/*.json."""
    found, shares = {}, []
    for name, nodes in NETWORKS.items():
        published = read_json(folder / "p100" / f"{name}.json")["nodes"]
        pairs = align(nodes, published)
        found[name] = comparable(pairs)
        cost = sum(p["cost"] for p in published)
        shares.append([
            name, str(len(nodes)), str(len(published)), f"{len(pairs) / len(published):.1%}",
            f"{sum(p.measured_ns for p in pairs) / cost:.1%}", str(len(found[name])), f"{cost / 1e6:.0f}",
        ])  # fmt: skip
    return found, shares


def comparison(folder: Path) -> tuple[str, list[LongTable]]:
    """The table of the page (how well the roofline predicts each network), and the long tables."""
    gpu = load_gpu("p100")
    found, shares = compared(folder)
    everything = [pair for pairs in found.values() for pair in pairs]
    ideal = replace(gpu, efficiency=dict.fromkeys(EFFICIENCY, 1.0))
    rows, fits = [], []
    for name, pairs in found.items():
        rest = fit([pair for other, them in found.items() if other != name for pair in them], gpu)
        fits.append((f"without {name}", rest))
        devices = {"peak rates": ideal, "fitted on the other two": replace(gpu, efficiency=rest), "defaults": gpu}
        rows += [[name, label, *_cells(scores(pairs, device))] for label, device in devices.items()]
    fits += [("all three", fit(everything, gpu)), ("defaults", gpu.efficiency)]
    kinds = []
    for kind in sorted({_group(pair) for pair in everything}):
        group = [pair for pair in everything if _group(pair) == kind]
        share = sum(p.measured_ns for p in group) / sum(p.measured_ns for p in everything)
        kinds.append([kind, str(len(group)), f"{share:.1%}", *_cells(scores(group, gpu))])
    score_heads = ["rank correlation", "median relative error", "total / measured"]
    rates = [[label, *(f"{rates[key]:.2f}" for key in EFFICIENCY)] for label, rates in fits]
    long = [
        LongTable("roofline_alignment", ("network", "rebuilt", "published", "aligned nodes", "aligned time", "compared",
                                         "published ms"), shares),
        LongTable("roofline_efficiencies", ("fitted on", *EFFICIENCY), rates),
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
        published = read_json(folder / "p100" / f"{name}.json")["nodes"]
        row = [name, str(len(graph))]
        for directions in ((False,), (True,), (False, True)):
            ours = sum(op.cost for op in graph.operations if op.is_backward in directions)
            theirs = sum(node["cost"] for node in published if node["backward"] in directions)
            row.append(f"{ours / theirs:.2f}")
        rows.append(row)
    return markdown_table(
        ["through the PyTorch frontend", "operations", "forward", "backward", "total / measured"], rows
    )


def totals() -> str:
    """Totals of default implementations, modelled and as MONeT's authors published them, of all their networks."""
    rows = []
    for name in BATCHES:
        modelled = monet_graph(name, implementations="none").total_cost
        published = graph_of({"monet": name, "level": "icmn", "set": None}).total_cost
        rows.append([name, f"{modelled / 1e6:.0f}", f"{published / 1e6:.0f}", f"{modelled / published:.2f}"])
    return markdown_table(["default efficiencies, every operation", "modelled ms", "published ms", "ratio"], rows)


def _group(pair: Pair) -> str:
    kind = pair.node.kind
    if operation_class(kind) in ("convolution", "matmul"):
        return kind.lstrip("_")
    return f"{kind.split('_ip_')[0].rstrip('_')} {'backward' if pair.node.is_backward else 'forward'}"


@experiment(page=PAGE, measures=False)
def roofline() -> Iterator[Case]:
    """Page: the roofline beside published P100 times (REMAT_INSTANCES has them)."""
    yield from ()


@roofline.draws
def page(_: Sequence[Row]) -> Drawing:
    """The comparison with the published times."""
    folder = published_folder("p100")
    gpu = load_gpu("p100")
    times = {name: (np.array([pair.measured_ns for pair in pairs], dtype=float), predict_ns(pairs, gpu))
             for name, pairs in compared(folder)[0].items()}  # fmt: skip
    figure = save_in_run(RUN, "roofline", figures.roofline, times)[0]
    text, long = comparison(folder)
    links = f"Tables: {', '.join(link_to(table, DOCS / PAGE) for table in long)}."
    return Drawing("\n\n".join([text, totals(), frontend_table(folder), links]), long, {"roofline": figure})
