"""The networks of Checkmate's Figure 6, for docs/results/largest-batch.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.charts import save_in_run
from analysis.max_batch_size import draw, rows_of, summary
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
    text = "\n\n".join([
        lead,
        markdown_table(*summary(documents)),
        f"Table: {link_to(every, DOCS / PAGE)}.",
    ])  # fmt: skip
    return Drawing(text, [every], {"max_batch_size": figure})
