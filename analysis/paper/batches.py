"""The largest batches (Figure 6), and the reasons to want one: samples a second, resolution, depth, a GiB's price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from analysis import max_batch_size
from analysis.charts import legend_below, panels
from analysis.max_batch_size import ENCODERS, continuous_limit, found_rows, limit_rows, network_label
from analysis.parts import Part, Study, Table, percent, prose
from analysis.style import style_of
from analysis.throughput import KINDS, plot, sizes

OPTIMUM = "checkmate_milp"  # its published batches are the paper's own
CAPTION = "Largest batch as a share of its proven limit"


def fig6(document: Mapping[str, Any], _: Study) -> Part:
    """The bars, and found and proven batches as tables."""
    documents = document["documents"]
    others = {ENCODERS[d["network"]]: d["network"] for d in documents if d["network"] in ENCODERS}
    networks = {others.get(d["network"], d["network"]) for d in documents}  # one with two encoders counts once
    open_ = {
        others.get(d["network"], d["network"]) for d in documents
        if any(max_found(d, rule["name"]) != d["proven"][rule["name"]] for rule in d["rules"])
    }  # fmt: skip
    missed = [
        f"{network_label(d)}'s {p['batch']} (at most {d['proven'][p['rule']]} whole samples; one operation allows "
        f"{continuous_limit(d):.2f})"
        for d in documents for p in d["published"]
        if p["strategy"] == OPTIMUM and max_found(d, p["rule"]) < p["batch"]
    ]  # fmt: skip
    missed_words = f"Below a published batch: {'; '.join(missed)}." if missed else "No published batch is larger."
    return Part(
        *prose(__file__, "fig6", closed=len(networks - open_), networks=len(networks), missed=missed_words),
        [("fig6", CAPTION, max_batch_size.draw(documents))] if documents else [],
        [_batches(documents, rule) for rule in documents[0]["rules"]] if documents else [],
    )  # fmt: skip


def max_found(document: Mapping[str, Any], rule: str) -> int:
    """The largest batch of any strategy; 0 if none found any."""
    return max((record["found"][rule] or 0 for record in document["records"]), default=0)


def _batches(documents: list[dict[str, Any]], rule: Mapping[str, str]) -> Table:
    def label(strategy: str) -> str:
        return style_of(strategy).label

    rows = [row for row in found_rows(documents, rule["name"], label) if any(row[1:])]
    rows += limit_rows(documents, rule["name"], label)
    return Table(f"fig6_{rule['name']}", ["strategy", *map(network_label, documents)], rows)


def throughput(document: Mapping[str, Any], _: Study) -> Part:
    """A curve for each network, and the sizes that fit."""
    networks = [d for d in document["throughput"] if d["best"] is not None]
    searches = [search for search in document["searches"] if search["trials"]]
    figures, tables = [], []
    if networks:
        figures.append(("throughput", f"Samples a second against batch size, {document['gpu']}, roofline costs",
                        _curves(networks)))  # fmt: skip
        tables += [_speeds(networks), _prices(networks)]
    if searches:
        figures.append(("largest_model", "Sizes tried, and their peaks without recomputation",
                        sizes(searches, document["memory_bytes"])))  # fmt: skip
        tables += [_trials(search, number) for number, search in enumerate(searches)]
    return Part(*prose(__file__, "throughput", found=_words(networks, searches)), figures, tables)


def _words(networks: Sequence[Mapping[str, Any]], searches: Sequence[Mapping[str, Any]]) -> str:
    """Where recomputation pays, where it is proven not to, and the largest sizes."""
    at_plain = [d for d in networks if d["best"] <= d["plain_batch"]]
    closed = [network_label(d) for d in at_plain if _is_closed(d)]
    open_ones = [network_label(d) for d in at_plain if not _is_closed(d)]
    beyond = [f"{network_label(d)} (batch {d['best']}, {_gain(d)} over the best batch without)"
              for d in networks if d["best"] > d["plain_batch"]]  # fmt: skip
    sentences = []
    if closed:
        sentences.append(f"On {', '.join(closed)} no batch tried that needs recomputation is faster than the best "
                         "without: this is proven.")  # fmt: skip
    if open_ones:
        sentences.append(f"On {', '.join(open_ones)} none was found; the bounds do not rule one out.")
    if beyond:
        sentences.append(f"Recomputation pays on {', '.join(beyond)}.")
    for s in searches:
        limit = f"{s['ruled_out_label']} is proven impossible." if s["ruled_out"] else "no limit was proven."
        sentences.append(f"The largest {s['what']} at batch {s['batch']}: {s['found_label'] or 'none found'}; {limit}")
    return " ".join(sentences)


def _is_closed(document: Mapping[str, Any]) -> bool:
    """Whether the bounds prove that no batch tried is faster than the best found."""
    best = _point(document, document["best"])["samples_per_s"]
    return all(point["most_per_s"] <= best * (1 + 1e-9) for point in document["points"])


def _best_plain(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fastest of the batches that fit without recomputation."""
    plain = [p for p in document["points"] if p["batch"] <= document["plain_batch"] and p["samples_per_s"] is not None]
    return max(plain, key=lambda point: point["samples_per_s"], default=None)


def _gain(document: Mapping[str, Any]) -> str:
    best, plain = _point(document, document["best"]), _best_plain(document)
    return "alone" if plain is None else f"{best['samples_per_s'] / plain['samples_per_s']:.3f}x"


def _point(document: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
    return next(point for point in document["points"] if point["batch"] == batch)


def _curves(networks: Sequence[Mapping[str, Any]]) -> Figure:
    figure, grid = panels(len(networks), (2.9, 2.6), 3, xlabel="batch size", ylabel="samples / s")
    for axes, document in zip(grid, networks, strict=True):
        plot(axes, document)
        axes.set_title(network_label(document), fontweight="bold")
    legend_below(figure)
    return figure


def _speeds(networks: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for document in networks:
        for point in document["points"]:
            found = point["samples_per_s"]
            plain = point["batch"] <= document["plain_batch"]
            rows.append([
                network_label(document), str(point["batch"]), "yes" if plain else "no",
                point["status"], "" if found is None else f"{found:.2f}",
                f"{point['most_per_s']:.2f}" if point["most_per_s"] else "none",
                "" if point["overhead"] is None else percent(point["overhead"]),
                "best" if point["batch"] == document["best"] else "",
            ])  # fmt: skip
    return Table("throughput", [
        "network", "batch", "fits without recomputation", "status", "samples/s", "at most (proven)", "overhead", "",
    ], rows)  # fmt: skip


def _prices(networks: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [network_label(d), str(p["batch"]), *(
            ("not solved in time", "") if p["ms_per_gib"] is None
            else (f"{p['ms_per_gib']:.3f}", f"{p['bound_ns'] / 1e6:.2f}")
        )]
        for d in networks for p in d["prices"]
    ]  # fmt: skip
    return Table("memory_price", [
        "network", "batch", "ms for each GiB", "bound of a step, ms",
    ], rows)  # fmt: skip


def _trials(search: Mapping[str, Any], number: int) -> Table:
    trials = sorted(search["trials"], key=lambda trial: trial["size"])
    rows = [[
        trial["label"], str(trial["operations"]), f"{trial['plain_peak_bytes'] / 1e9:.2f}",
        KINDS[trial["kind"]][2], trial["status"],
        "" if trial["cost"] is None else f"{100 * trial['cost'] / trial['cost_cap']:.1f} %",
    ] for trial in trials]  # fmt: skip
    return Table(f"largest_model_{number + 1}", [
        "size", "operations", "GB without recomputation", "found", "status", "share of the allowed cost",
    ], rows)  # fmt: skip
