"""The README's table and figures, from stored rows: GPT-2 and Llama first, then VGG19 under every strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis import figures, overhead
from analysis.charts import save_in_run
from analysis.overhead_data import overhead_data
from analysis.paper.sweeps import sweeps
from experiments import checkmate
from experiments.compiled import steps_of
from experiments.documents import Drawing, markdown_table
from experiments.explain import answers
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER
from experiments.table import Table

RUN = RUNS_FOLDER / "readme"
NETWORKS = ("gpt2", "llama")
SHOWN = ("plain peak", "smallest budget", "overhead at 80% of the peak", "overhead at 60% of the peak",
         "largest batch at 0%", "largest batch at 10%", "largest length at 0%", "largest length at 10%")  # fmt: skip


@experiment(page="../README.md", measures=False)
def readme() -> Iterator[Case]:
    """Page: the README's table and figures."""
    yield from ()


@readme.draws
def page(_: Sequence[Row]) -> Drawing:
    """What `remat explain` says; GPT-2 and Llama as compiled steps; VGG19's sweep of the study."""
    columns = answers(Table("explain").rows())
    told = [[name, *(column.get(name, "") for column in columns.values())] for name in SHOWN]
    models = {name: rows for name, rows in steps_of(Table("compiled").rows()).items() if name in NETWORKS}
    study = checkmate.stored_study()
    run = next(sweep.run for sweep in sweeps(study.document("fig5"), study) if sweep.label == "VGG19")
    data = overhead_data(run)
    assert data is not None
    drawn = {
        "training": save_in_run(RUN, "training", figures.compiled, models)[0],
        "vgg19_sweep": save_in_run(RUN, "vgg19_sweep", overhead.draw, data, run)[0],
    }
    return Drawing(markdown_table(["`remat explain`, on an H100", *columns], told), figures=drawn)
