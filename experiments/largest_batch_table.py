"""The networks of Checkmate's Figure 6, for docs/results/largest-batch.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.charts import save_in_run
from analysis.max_batch_size import continuous_limit, load, rows_of
from analysis.max_batch_size import draw as draw_figure
from experiments.documents import DOCS, Document, Drawing, LongTable, link_to, long_table, markdown_table
from experiments.paper.fig6 import SHARE
from experiments.parts import unpacked_study
from experiments.run_documents import made
from experiments.settings import RUNS_FOLDER
from remat.files import read_json

FOLDER = RUNS_FOLDER / "max_batch_size"


def draw(_arguments: Sequence[str]) -> Drawing:
    """The table of the page, every number as CSV, and the figure, from the study in results/study.

    Raises:
        InvalidInput: there is no study.
    """
    study = unpacked_study("paper")
    scale, part = read_json(study / "paper.json")["scale"], read_json(study / "fig6.json")
    lead = f"At most {SHARE * scale['time_limit_s']:g} s for each solve; {made(study, ['fig6'])}"
    documents = load(study / part["folder"])
    figure = save_in_run(FOLDER, "max_batch_size", draw_figure, documents)[0]
    every = long_table("largest_batch", rows_of(documents))
    limits = LongTable(
        "largest_batch_limits",
        ("network", "largest working set, bytes a sample", "2P", "published", "what that needs at least"),
        _limits(documents),
    )
    text = "\n\n".join([
        lead,
        markdown_table(["largest batch", *(f"{rule['label']}: found / proven limit" for rule in documents[0]["rules"]),
                        "published"], map(_summary, documents)),
        f"Tables: {link_to(every, DOCUMENT.page)}, {link_to(limits, DOCUMENT.page)}.",
    ])  # fmt: skip
    columns = sorted(set.intersection(*map(set, documents)))
    commit = part["made"]["git_commit"]
    return Drawing(text, [every, limits], {"max_batch_size": figure}, columns=columns, commit=commit)


def _summary(document: Mapping[str, Any]) -> list[str]:
    """One network: for each rule the largest batch of any strategy and the proven limit; then Checkmate's batch."""
    cells = []
    for rule in document["rules"]:
        found = [record["found"][rule["name"]] for record in document["records"]]
        cells.append(f"{max(batch for batch in found if batch is not None)} / {document['proven'][rule['name']]}")
    return [document["network"], *cells, str(_published(document))]


def _published(document: Mapping[str, Any]) -> int:
    return next(p["batch"] for p in document["published"] if p["rule"] == "published_stated")


def _limits(documents: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each network the bytes of its largest working set and of 2P, and those that Checkmate's batch needs."""
    rows = []
    for document in documents:
        published = _published(document)
        working, fixed = document["working_set_bytes"], document["parameter_bytes"]
        needed = published * working + fixed
        most = f"one operation allows {continuous_limit(document):.2f}"
        verdict = f"above the memory; {most}" if needed > document["memory_bytes"] else "not excluded"
        rows.append([document["network"], f"{working:,}", f"{fixed:,}", str(published),
                     f"{published} x {working:,} + 2P = {needed / 1e9:.3f}e9: {verdict}"])  # fmt: skip
    return rows


DOCUMENT = Document(
    "largest_batch", DOCS / "results" / "largest-batch.md", draw, "",
    ("network", "memory_bytes", "parameter_bytes", "input_bytes", "working_set_bytes", "rules", "proven_bytes",
     "proven", "records", "published"),
)  # fmt: skip
