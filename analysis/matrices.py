"""R and S of a plan: the operations that each stage computes, and those resident when it starts."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.results import ShownPlan
from analysis.style import AGAIN, FIRST, HELD, HELD_FULL
from remat.graph import Graph
from remat.plan import Plan

MAX_OPERATIONS = 4000  # the dense matrices of a larger graph take gigabytes
MOST_CELLS = 420  # about the pixels of a panel
NOTHING, RESIDENT, COMPUTED, RECOMPUTED = range(4)
COLOURS = ("#FFFFFF", HELD, FIRST, AGAIN)


def cells(graph: Graph, plan: Plan, most: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(R, S, operations per cell), with at most `most` x `most` cells.

    R [cells, cells] uint8: `NOTHING`, `COMPUTED` or `RECOMPUTED`; one recomputation marks the whole cell, so that
    none is lost. S [cells, cells] float: the share of (stage, operation) pairs in the cell for which an output of the
    operation is resident when the stage starts.
    """
    R_TN, S_TV = plan.matrices(graph)
    n = len(graph)
    S_TN = np.zeros((n, n), dtype=bool)
    for v, k in enumerate(graph.producer):
        S_TN[:, k] |= S_TV[:, v]
    kind = np.where(R_TN > 0, RECOMPUTED, NOTHING).astype(np.uint8)
    first = (R_TN > 0).argmax(axis=0), np.arange(n)
    kind[first] = np.where(R_TN[first] == 1, COMPUTED, RECOMPUTED)
    block = -(-n // most)
    starts = np.arange(0, n, block)
    R = np.maximum.reduceat(np.maximum.reduceat(kind, starts, axis=0), starts, axis=1)
    held = np.add.reduceat(np.add.reduceat(S_TN, starts, axis=0, dtype=int), starts, axis=1)
    lengths = np.diff(starts, append=n)
    return R, held / np.outer(lengths, lengths), block


def draw(graph: Graph, shown: ShownPlan) -> Figure:
    """R left, S right; rows are stages, columns operations."""
    n = len(graph)
    R, S, block = cells(graph, shown.plan, MOST_CELLS)
    extent = (-0.5, R.shape[1] * block - 0.5, R.shape[0] * block - 0.5, -0.5)
    figure = Figure(figsize=(8.2, 4.9))
    figure.set_layout_engine("constrained", h_pad=0.09)
    left, right = figure.subplots(1, 2, sharey=True)
    left.imshow(R, cmap=ListedColormap(list(COLOURS)), vmin=0, vmax=3, interpolation="nearest", extent=extent)
    if R.shape[0] > 100:  # single cells would be too small to see
        stage, operation = np.nonzero(R == RECOMPUTED)
        middle = (block - 1) / 2
        left.plot(operation * block + middle, stage * block + middle, ls="", marker="s", ms=2.2, color=AGAIN, mew=0)
    shades = LinearSegmentedColormap.from_list("held", ["#FFFFFF", HELD_FULL])
    right.imshow(S, cmap=shades, vmin=0, vmax=1, interpolation="nearest", extent=extent)
    left.set_title("R: computed in the stage", loc="left")
    right.set_title("S: resident when the stage starts", loc="left")
    left.set_ylabel("Stage (ends with a first computation)")
    first_backward = next((k for k, op in enumerate(graph.operations) if op.is_backward), None)
    for axes in (left, right):
        axes.set(xlabel="Operation, in graph order", xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5))
        axes.grid(visible=False)
        if first_backward is not None:
            axes.axvline(first_backward - 0.5, color="#555555", lw=0.7, ls=":")
            axes.axhline(first_backward - 0.5, color="#555555", lw=0.7, ls=":")
    again = int(shown.plan.n_computations - n)
    handles: list[Patch | Line2D] = [
        Patch(color=FIRST, label="first computation"),
        Patch(color=AGAIN, label=f"recomputation ({again})"),
        Patch(color=HELD_FULL, label="resident" if block == 1 else "resident (darker: larger share)"),
    ]
    if first_backward is not None:
        handles.append(Line2D([], [], color="#555555", lw=0.8, ls=":", label="first backward operation"))
    note = f"one cell is {block} stages x {block} operations" if block > 1 else None
    figure.legend(handles=handles, loc="outside lower center", ncols=4, title=note, title_fontsize=8)
    figure.suptitle(shown.title, x=0.01, ha="left", fontsize=10, fontweight="bold", parse_math=False)
    return figure
