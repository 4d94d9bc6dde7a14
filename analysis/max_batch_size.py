"""Largest batch of every strategy, found and proven (Fig. 6 of Checkmate, Jain et al., MLSys 2020).

A rule says how bytes are counted. Each rule has its own panel, and rules are never mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from analysis.charts import heatmap
from analysis.style import BLACK, order_of, style_of

DIRECT = "max_batch_milp"
COLOURS = "cividis"
_LABELS = {
    "unet": "U-Net", "fcn8": "FCN8", "fcn8_plain": "FCN8, plain encoder", "segnet": "SegNet", "vgg19": "VGG19",
    "resnet50": "ResNet50", "mobilenet": "MobileNet",
}  # fmt: skip

ENCODERS = {"fcn8": "fcn8_plain"}  # networks that a published batch may be of, because the paper gives no encoder

Document = Mapping[str, Any]


def continuous_limit(document: Document) -> float:
    """The batch, as a fraction, at which the largest working set and 2P fill the memory: no plan exceeds it."""
    return (document["memory_bytes"] - document["parameter_bytes"]) / document["working_set_bytes"]


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
    """A table for each rule: networks down, strategies across, after the proven limit and the published batches.

    A cell has the largest batch found. Its colour is the share of the proven limit, because the batches of the networks
    differ by a factor of twenty.
    """
    rules = documents[0]["rules"]
    names = [
        name for name in strategies_of(documents)
        if any(batch is not None for document in documents for batch in _found(document, name).values())
    ]  # fmt: skip
    size = (max(7.5, 0.36 * (len(names) + 2) + 1.4), len(rules) * (0.23 * len(documents) + 0.35) + 2.6)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rules), 1, sharex=True, squeeze=False)[:, 0]
    for axes, rule in zip(panels, rules, strict=True):
        _panel(axes, documents, names, rule)
    heads = ["no plan has more (proven)", "published, the largest", *(style_of(name).label for name in names)]
    panels[-1].set_xticklabels(heads, rotation=45, ha="right", rotation_mode="anchor")
    bar = ScalarMappable(Normalize(0, 100), COLOURS)
    figure.colorbar(bar, ax=panels, location="bottom", shrink=0.5, aspect=40, label="batch, % of the proven limit")
    memory = documents[0]["memory_bytes"] / 1e9
    figure.suptitle(
        f"Largest batch in {memory:g} GB at the cost of at most one more forward pass", fontsize=10, fontweight="bold"
    )
    return figure


def _panel(axes: Axes, documents: Sequence[Document], names: Sequence[str], rule: Mapping[str, str]) -> None:
    batches = []
    for document in documents:
        published = max(_published(document, rule["name"]).values(), default=None)
        found = (_found(document, name).get(rule["name"]) for name in names)
        batches.append([document["proven"][rule["name"]], published, *found])
    shares = [[np.nan if batch is None else min(100.0, 100 * batch / row[0]) for batch in row] for row in batches]
    texts = np.array([["" if batch is None else str(batch) for batch in row] for row in batches], dtype=object)
    columns = [""] * (len(names) + 2)
    heatmap(axes, np.array(shares), texts, [network_label(d) for d in documents], columns, colours=COLOURS, top=100)
    axes.axvline(2, color=BLACK, lw=1.0)
    axes.set_title(rule["label"], loc="left", fontsize=9)


def network_label(document: Document) -> str:
    """The network's name for people."""
    name = str(document["network"])
    return _LABELS.get(name, name)
