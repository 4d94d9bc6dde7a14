"""Largest batches, found and proven, samples per second, and the largest models (Fig. 6 of Checkmate).

A rule says how bytes of a batch are counted. Each rule has its own panel, and rules are never mixed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.charts import legend_below, panels, points
from analysis.results import PAPERS_HEURISTICS
from analysis.style import BLACK, BLUE, GREY, ORANGE, OURS, WINE, label_of, order_of, style_of

OPTIMUM = "checkmate_milp"  # its published batches are the paper's own
STATED = "published_stated"
MARKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("checkpoint all", {"colour": BLACK, "marker": "s", "size": 4}),
    ("best of the paper's heuristics", {"colour": ORANGE, "marker": "^"}),
    ("published: Checkmate", {"colour": BLUE, "marker": "o", "size": 11, "mfc": "none", "mew": 1.5}),
    ("largest found here, its number at the right", {"colour": WINE, "marker": "*"}),
)
ENCODERS = {"fcn8": "fcn8_plain"}  # the paper's FCN8 has the plain encoder; ours is fcn8

Document = Mapping[str, Any]
KINDS = {"fits": "trains within the memory", "ruled out": "proven impossible, or larger than such",
         "undecided": "no plan found, not ruled out"}  # fmt: skip
SPEED_HEADS = ("network", "batch", "fits without recomputation", "status", "step, ms", "samples/s", "at most (proven)",
               "overhead", "")  # fmt: skip
TRIAL_HEADS = ("size", "operations", "GB without recomputation", "found", "status", "share of the allowed cost")


def continuous(document: Document) -> float:
    """The largest batch found, as a real number, as the artifact's program has it: (memory - 2P) / peak of one sample.

    0 if no plan was found.
    """
    peaks = [record["found_bytes"][STATED] or 0 for record in document["records"]]
    room = document["memory_bytes"] - document["parameter_bytes"]
    return room / min(filter(None, peaks), default=0) if any(peaks) else 0.0


def found_by(document: Document, rule: str) -> dict[str, int | None]:
    """[strategy] the largest batch that it found, or None."""
    return {record["strategy"]: record["found"][rule] for record in document["records"]}


def max_found(document: Document, rule: str) -> int:
    """The largest batch of any strategy; 0 if none found any."""
    return max((batch or 0 for batch in found_by(document, rule).values()), default=0)


def summary(documents: Sequence[Document]) -> tuple[list[str], list[list[str]]]:
    """(heads, a row for each network): Checkmate's batch, ours as a real number, and found and limit by each rule."""
    rows = []
    for document in documents:
        room = document["memory_bytes"] - document["parameter_bytes"]
        found = (f"{max_found(document, rule['name'])} / {document['proven'][rule['name']]}"
                 for rule in document["rules"])  # fmt: skip
        rows.append([network_label(document), str(_published(document, STATED).get(OPTIMUM, "")),
                     f"{continuous(document):.4f}", f"{room / document['working_set_bytes']:.4f}", *found])  # fmt: skip
    rules = [f"{rule['label']}: found / proven limit" for rule in documents[0]["rules"]]
    return ["largest batch", "published", "as a real number", "the largest operation's", *rules], rows


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
                    "working_set_bytes": document["working_set_bytes"],
                    "input_bytes": document["input_bytes"], "solves": record["solves"], "wall_s": record["wall_s"],
                    "note": record["note"],
                })  # fmt: skip
    return rows


def found_rows(documents: Sequence[Document], rule: str, label: Callable[[str], str]) -> Iterator[list[str]]:
    """For every strategy: its label, then the largest batch found in each network, or ''."""
    found = [found_by(document, rule) for document in documents]
    for strategy in sorted({name for own in found for name in own}, key=order_of):
        batches = (own.get(strategy) for own in found)
        yield [label(strategy), *("" if batch is None else str(batch) for batch in batches)]


def limit_rows(documents: Sequence[Document], rule: str, label: Callable[[str], str]) -> Iterator[list[str]]:
    """The proven limit in each network, then for each strategy its published batches."""
    yield ["no plan has more (proven)", *(str(document["proven"][rule]) for document in documents)]
    known = [_published(document, rule) for document in documents]
    for strategy in dict.fromkeys(strategy for published in known for strategy in published):
        name = "Checkmate" if strategy == OPTIMUM else label(strategy)  # the label is of the form and solver used here
        yield [f"published: {name}", *(str(published.get(strategy, "")) for published in known)]


def _published(document: Document, rule: str) -> dict[str, int]:
    """[strategy] the batch published under a rule."""
    return {p["strategy"]: p["batch"] for p in document["published"] if p["rule"] == rule}


def draw(documents: Sequence[Document]) -> Figure:
    """A panel for each rule: networks down, batches across as shares of the proven limit; see `MARKS`.

    The largest batch found and the limit stand at the right as numbers. The batches of single strategies are in tables.
    """
    rules = documents[0]["rules"]
    figure, grid = panels(len(rules), (3.1, 0.3 * len(documents) + 0.6), sharey=True, xlabel="% of the proven limit")
    for axes, rule in zip(grid, rules, strict=True):
        _panel(axes, documents, rule["name"])
        axes.set_title(rule["label"].replace(", ", ",\n", 1), fontsize=8)
    grid[0].set_yticks(range(len(documents)), [network_label(d) for d in documents])
    grid[0].set_ylim(len(documents) - 0.5, -0.5)
    legend_below(figure)
    return figure


def _panel(axes: Axes, documents: Sequence[Document], rule: str) -> None:
    found = [_shown_batches(document, rule) for document in documents]
    for (label, looks), column in zip(MARKS, zip(*found, strict=True), strict=True):
        shares = [(min(100.0, 100 * batch / d["proven"][rule]), y)
                  for y, (batch, d) in enumerate(zip(column, documents, strict=True)) if batch]  # fmt: skip
        points(axes, shares, label=label, zorder=3, **looks)
    for y, (batches, document) in enumerate(zip(found, documents, strict=True)):
        limit = document["proven"][rule]
        text = f"{batches[-1]}" if batches[-1] == limit else f"{batches[-1]} of {limit}"
        axes.annotate(text, (100, y), (8, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set(xlim=(0, 124), xticks=range(0, 101, 25))
    axes.grid(visible=False, axis="y")


def _shown_batches(document: Document, rule: str) -> tuple[int, ...]:
    """The batch of each of `MARKS`; 0 for none."""
    own = found_by(document, rule)
    best = max(own.get(name) or 0 for name in PAPERS_HEURISTICS)
    published = _published(document, rule).get(OPTIMUM, 0)
    return own.get("checkpoint_all") or 0, best, published, max_found(document, rule)


def network_label(document: Document) -> str:
    """The network's name for people."""
    return label_of(str(document["network"]))


def speed_rows(document: Mapping[str, Any], network: str) -> list[list[str]]:
    """Cells of `SPEED_HEADS` for each batch of a network."""
    rows = []
    for point in document["points"]:
        cost, found = point["cost_ns"], point["samples_per_s"]
        rows.append([
            network, str(point["batch"]), "yes" if point["batch"] <= document["plain_batch"] else "no", point["status"],
            "" if cost is None else f"{cost / 1e6:.2f}", "" if found is None else f"{found:.2f}",
            f"{point['most_per_s']:.2f}" if point["most_per_s"] else "none",
            "" if point["overhead"] is None else f"{100 * point['overhead']:.2f} %",
            "best" if point["batch"] == document["best"] else "",
        ])  # fmt: skip
    return rows


def trial_rows(search: Mapping[str, Any]) -> list[list[str]]:
    """Cells of `TRIAL_HEADS` for each size that a search tried."""
    return [[
        trial["label"], str(trial["operations"]), f"{trial['plain_peak_bytes'] / 1e9:.2f}",
        KINDS[trial["kind"]], trial["status"],
        "" if trial["cost"] is None else f"{100 * trial['cost'] / trial['cost_cap']:.1f} %",
    ] for trial in sorted(search["trials"], key=lambda trial: trial["size"])]  # fmt: skip


def curves(documents: Sequence[Document]) -> Figure:
    """A panel for each network: samples per second, found and proven, and the largest batch of plain training."""
    figure, grid = panels(len(documents), (2.9, 2.6), 3, xlabel="batch size", ylabel="samples / s")
    for axes, document in zip(grid, documents, strict=True):
        _curve(axes, document)
        axes.set_title(network_label(document), fontweight="bold")
    legend_below(figure)
    return figure


def _curve(axes: Axes, document: Document) -> None:
    """The curve of one network, with batches on a logarithmic axis."""
    tried, style = document["points"], style_of(OURS)
    most = [(p["batch"], p["most_per_s"]) for p in tried if p["most_per_s"] > 0]
    points(axes, most, GREY, "_", ":", label="proven: no plan is faster")
    points(axes, [(p["batch"], p["samples_per_s"]) for p in tried if p["samples_per_s"] is not None], style.colour,
           style.marker, style.line, lw=style.width, label="fastest plan found")  # fmt: skip
    axes.axvline(document["plain_batch"], color=GREY, lw=0.9, ls="--", label="largest batch without recomputation")
    axes.set(xscale="log", ylim=(0, 1.12 * max((y for _, y in most), default=1.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(_apart([p["batch"] for p in tried]))
    axes.margins(x=0.08)


def _apart(batches: list[int]) -> list[int]:
    """The largest batch and others, far enough apart for their labels on a logarithmic axis."""
    shown: list[int] = []
    nearest = max(batches[-1] / batches[0], 2.0) ** 0.12
    for batch in reversed(batches):
        if not shown or shown[-1] / batch >= nearest:
            shown.append(batch)
    return shown[::-1]
