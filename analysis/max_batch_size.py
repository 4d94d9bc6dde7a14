"""Largest batch of every strategy, found and proven (Fig. 6 of Checkmate, Jain et al., MLSys 2020).

``python -m analysis.max_batch_size RUN [RUN ...]`` redraws stored results; several runs become one figure in the
folder of the first. A rule says how bytes are counted. Each rule has its own panel, and rules are never mixed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich import box
from rich.console import Console
from rich.table import Table

from analysis.command import command
from analysis.results import read_json
from analysis.saving import save_in_run
from analysis.style import BLACK, GREY, order_of, style_of
from analysis.table import write_frame
from remat.errors import InvalidInput

DIRECT = "max_batch_milp"
PALE = ("checkpoint_all_ap", "ap_sqrtn", "ap_greedy", "lp_rounding_random")  # they share a colour with another strategy
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
LOW = 13  # percent; up to this height a bar is too short for its number
_LABELS = {
    "unet": "U-Net", "fcn8": "FCN8", "fcn8_plain": "FCN8, plain encoder", "segnet": "SegNet", "vgg19": "VGG19",
    "resnet50": "ResNet50", "mobilenet": "MobileNet",
}  # fmt: skip

Document = Mapping[str, Any]


def draw_runs(folders: Sequence[Path], target: Path) -> list[Path]:
    """Write ``table.csv`` and ``figures/max_batch_size.png`` and ``.pdf`` of these runs in `target`; returns the paths.

    Raises:
        InvalidInput: a folder is not a run of this experiment.
    """
    documents = [document for folder in folders for document in load(folder)]
    frame = pd.DataFrame(rows_of(documents))
    for column in ("found", "proven_by_it", "proven", "published", "sample_peak_bytes"):
        frame[column] = frame[column].astype("Int64")  # whole numbers that may be missing
    table = write_frame(frame, target / "table.csv")
    return [table, *save_in_run(target, "max_batch_size", lambda: draw(documents))]


def load(folder: Path) -> list[dict[str, Any]]:
    """The documents of a run; `experiments.max_batch_size` describes them."""
    path = Path(folder) / "run.json"
    run = read_json(path)
    if run.get("experiment") != "max_batch_size":
        raise InvalidInput(f"{path}: not a run of experiment=max_batch_size")
    if not isinstance(run.get("networks"), list):
        raise InvalidInput(f"{path}: has no list 'networks'; run the experiment again")
    return run["networks"]


def rows_of(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """The rows of table.csv: one for each network, strategy and rule."""
    rows = []
    for document in documents:
        for record in sorted(document["records"], key=lambda r: order_of(r["strategy"])):
            for rule in document["rules"]:
                name = rule["name"]
                rows.append({
                    "network": document["network"], "rule": name, "strategy": record["strategy"],
                    "found": record["found"][name], "proven_by_it": record["proven"][name],
                    "proven": document["proven"][name], "published": _published(document, name).get(record["strategy"]),
                    "sample_peak_bytes": record["found_bytes"][name], "sample_bound_bytes": document["proven_bytes"],
                    "memory_bytes": document["memory_bytes"], "parameter_bytes": document["parameter_bytes"],
                    "input_bytes": document["input_bytes"], "solves": record["solves"], "wall_s": record["wall_s"],
                    "note": record["note"],
                })  # fmt: skip
    return rows


def terminal_table(documents: Sequence[Document]) -> list[Table]:
    """A table for each rule: strategies down, networks across; the proven limit and published batches below."""
    tables = []
    for rule in documents[0]["rules"]:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(f"largest batch: {rule['label']}", no_wrap=True)
        for document in documents:
            table.add_column(document["network"], justify="right")
        for row in found_rows(documents, rule["name"], str):
            table.add_row(*(cell or "–" for cell in row))
        table.add_section()
        for row in limit_rows(documents, rule["name"], str):
            table.add_row(*row)
        tables.append(table)
    return tables


def found_rows(documents: Sequence[Document], rule: str, label: Callable[[str], str]) -> Iterator[list[str]]:
    """For every strategy: its label, then the largest batch found in each network, or ''."""
    for strategy in strategies_of(documents):
        found = [_found(document, strategy).get(rule) for document in documents]
        yield [label(strategy), *("" if batch is None else str(batch) for batch in found)]


def limit_rows(documents: Sequence[Document], rule: str, label: Callable[[str], str]) -> Iterator[list[str]]:
    """The proven limit in each network, then for each strategy its published batches."""
    yield ["no plan has more (proven)", *(str(document["proven"][rule]) for document in documents)]
    known = [_published(document, rule) for document in documents]
    for strategy in dict.fromkeys(strategy for published in known for strategy in published):
        yield [f"published: {label(strategy)}", *(str(published.get(strategy, "")) for published in known)]


def strategies_of(documents: Sequence[Document]) -> list[str]:
    """Names in the order of the figures."""
    names = {record["strategy"] for document in documents for record in document["records"]}
    return sorted(names, key=order_of)


def _found(document: Document, strategy: str) -> dict[str, int | None]:
    """[rule] the largest batch found, or None; empty without a record of the strategy."""
    return next((record["found"] for record in document["records"] if record["strategy"] == strategy), {})


def _published(document: Document, rule: str) -> dict[str, int]:
    """[strategy] the batch published under a rule."""
    return {p["strategy"]: p["batch"] for p in document["published"] if p["rule"] == rule}


def draw(documents: Sequence[Document]) -> Figure:
    """Bars for each network and strategy, one panel for each rule.

    A bar is the largest batch found, in percent of the proven limit, because the batches of the networks differ by a
    factor of twenty and would not fit one axis. The numbers on the bars are batches.
    """
    rules = documents[0]["rules"]
    names = [
        name for name in strategies_of(documents)
        if any(batch is not None for document in documents for batch in _found(document, name).values())
    ]  # fmt: skip
    width = max(7.5, 2.6 + 0.125 * (len(names) + 2) * len(documents))
    figure = Figure(figsize=(width, 2.5 * len(rules) + 0.7), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(rules), 1, sharex=True))
    for axes, rule in zip(panels, rules, strict=True):
        _panel(axes, documents, names, rule)
    panels[-1].set_xticks(range(len(documents)), [network_label(document) for document in documents])
    handles: list[Any] = [Patch(label=style_of(name).label, **_face(name)) for name in names]
    handles.append(Line2D([], [], color=BLACK, lw=1.0, label="proven: no plan has more"))
    handles.append(Line2D([], [], ls="", marker="D", ms=4.5, mfc="white", mec=BLACK, label="published"))
    figure.legend(handles=handles, loc="outside right upper")
    memory = documents[0]["memory_bytes"] / 1e9
    figure.suptitle(
        f"Largest batch in {memory:g} GB at the cost of at most one more forward pass", fontsize=10, fontweight="bold"
    )
    return figure


def _face(strategy: str) -> dict[str, Any]:
    """Colours of its bars."""
    colour = style_of(strategy).colour
    if strategy not in PALE:
        return {"facecolor": colour}
    return {"facecolor": [0.45 + 0.55 * x for x in to_rgb(colour)], "edgecolor": colour, "linewidth": 0.7}


def network_label(document: Document) -> str:
    """The network's name for people."""
    name = str(document["network"])
    return _LABELS.get(name, name)


def _panel(axes: Axes, documents: Sequence[Document], names: Sequence[str], rule: Mapping[str, str]) -> None:
    step = 0.86 / len(names)
    for x, document in enumerate(documents):
        most, published = document["proven"][rule["name"]], _published(document, rule["name"])
        for i, name in enumerate(names):
            batch = _found(document, name).get(rule["name"])
            at = x - 0.43 + step * (i + 0.5)
            if batch is None:
                axes.text(at, 1.0, "–", ha="center", va="bottom", fontsize=8, color=GREY)
                continue
            share = 100 * batch / most
            axes.bar(at, share, width=0.92 * step, zorder=2, **_face(name))
            inside = share > LOW
            axes.text(
                at, 2.0 if inside else share + 2.0, str(batch), rotation=90, ha="center", va="bottom", fontsize=6,
                zorder=4, color="white" if inside and name not in PALE else BLACK,
            )  # fmt: skip
            if batch < most:  # a whisker from found to proven
                axes.plot([at, at], [share, 100], color=GREY, lw=0.6, ls=":", zorder=1)
            if name in published:
                height = 100 * published[name] / most
                axes.plot(at, height, marker="D", ms=4, mfc="white", mec=BLACK, zorder=5, clip_on=False)
                axes.annotate(str(published[name]), (at, height), xytext=(0, 4), textcoords="offset points",
                              ha="center", fontsize=6.5, zorder=6, bbox=LABEL_BOX)  # fmt: skip
        axes.plot([x - 0.45, x + 0.45], [100, 100], color=BLACK, lw=1.0, zorder=3)
        axes.text(x - 0.45, 101.5, f"≤ {most}", ha="left", va="bottom", fontsize=7)
    axes.set(xlim=(-0.55, len(documents) - 0.45), ylim=(0, 120), ylabel="batch, % of proven limit")
    axes.set_yticks(range(0, 101, 20))
    axes.grid(visible=False, axis="x")
    axes.set_title(rule["label"], loc="left", fontsize=9)


def redraw(*folders: Path) -> list[Path]:
    """Draw the runs as one figure, in the folder of the first, and print their tables."""
    written = draw_runs(folders, folders[0])
    for table in terminal_table([document for folder in folders for document in load(folder)]):
        Console().print(table)
    return written


if __name__ == "__main__":
    sys.exit(command("analysis.max_batch_size", "RUN [RUN ...]", redraw, sys.argv[1:], several=True))
