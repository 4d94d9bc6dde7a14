"""The networks of Checkmate's Figure 6, for docs/results/largest-batch.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.charts import save_in_run
from analysis.max_batch_size import continuous_limit, draw, rows_of
from experiments.checkmate import stored_study
from experiments.documents import DOCS, Drawing, LongTable, link_to, markdown_table
from experiments.paper.sizes import SHARE
from experiments.parts import made
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER

PAGE = "results/largest-batch.md"


@experiment(page=PAGE, measures=False)
def largest_batch() -> Iterator[Case]:
    """Page: the largest batch of every strategy on Checkmate's networks, of the study."""
    yield from ()


@largest_batch.draws
def page(_: Sequence[Row]) -> Drawing:
    """The table of the page, every number as CSV, and the figure."""
    study = stored_study()
    limit_s = SHARE * study.heads["fig6"]["amount"]["time_limit_s"]
    lead = f"At most {limit_s:g} s for each solve; {made(study, 'fig6')}"
    documents = study.document("fig6")["documents"]
    figure = save_in_run(RUNS_FOLDER / "largest_batch", "max_batch_size", draw, documents)[0]
    flat = rows_of(documents)
    every = LongTable("largest_batch", list(flat[0]), [["" if cell is None else str(cell) for cell in row.values()]
                                                       for row in flat])  # fmt: skip
    limits = LongTable(
        "largest_batch_limits",
        ("network", "largest working set, bytes a sample", "2P", "published", "what that needs at least"),
        _limits(documents),
    )
    text = "\n\n".join([
        lead,
        markdown_table(["largest batch", *(f"{rule['label']}: found / proven limit" for rule in documents[0]["rules"]),
                        "published"], map(_summary, documents)),
        f"Tables: {link_to(every, DOCS / PAGE)}, {link_to(limits, DOCS / PAGE)}.",
    ])  # fmt: skip
    return Drawing(text, [every, limits], {"max_batch_size": figure})


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
