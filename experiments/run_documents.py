"""The pages of the two papers, from finished runs: ``experiment=paper`` and ``experiment=paper/monet``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis import monet, paper
from analysis.charts import style_context
from analysis.parts import Part
from analysis.results import read_json
from experiments.documents import DOCS, Drawing, LongTable, link_to
from experiments.parts import unpacked_study
from experiments.registry import Case, experiment
from remat.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PaperPage:
    """How a run of a paper becomes a page.

    Attributes:
        prefix: of the names of this paper's figures and tables.
        head_file: file in the run's folder with its configuration and provenance.
        head: the first sentence of the page, from the run's folder and the content of `head_file`.
        draw_run: draws the figures in the run's folder.
        figures: file names of the figures on the page.
    """

    prefix: str
    page: Path
    head_file: str
    parts_of: Callable[[Path], Sequence[tuple[str, Part]]]
    head: Callable[[Path, dict[str, Any]], str]
    draw_run: Callable[[Path], object]
    figures: Collection[str]

    def draw(self, arguments: Sequence[str]) -> Drawing:
        """The run in a folder, the only argument; without one, the study whose rows are in the repository.

        Raises:
            InvalidInput: there are several arguments, the folder has no run of this paper, or there is no study.
        """
        if len(arguments) > 1:
            raise InvalidInput("name the folder of one finished run, or none for the study in results/study")
        folder = Path(arguments[0]) if arguments else unpacked_study(Path(self.head_file).stem)
        if not arguments:
            self.draw_run(folder)
        head = read_json(folder / self.head_file)
        with style_context():
            parts = self.parts_of(folder)
        tables = {name: self._tables(part) for name, part in parts}
        lead = f"{self.head(folder, head)} {made(folder, [name for name, _ in parts])}"
        texts = [self.part_text(part, tables[name], folder) for name, part in parts]
        return Drawing(
            "\n\n".join([lead, *texts]),
            [table for ours in tables.values() for table in ours],
            {f"{self.prefix}_{name}": path for name in self.figures
             if (path := folder / "figures" / f"{name}.png").is_file()},
        )  # fmt: skip

    def _tables(self, part: Part) -> list[LongTable]:
        """The part's tables; their names begin with the prefix."""
        return [
            LongTable(f"{self.prefix}_{table.name.removeprefix(f'{self.prefix}_')}", table.heads, table.rows)
            for table in part.tables
        ]

    def part_text(self, part: Part, tables: Sequence[LongTable], folder: Path) -> str:
        """A part, folded: published results, ours, why they differ, figures, links to its tables."""
        shown = [f"![{caption}](../figures/{self.prefix}_{file}.png)" for file, caption, _ in part.figures
                 if file in self.figures and (folder / "figures" / f"{file}.png").is_file()]  # fmt: skip
        lines = [f'<details markdown="1"><summary>{part.title}</summary>', f"**Published.** {part.published}",
                 f"**Ours.** {part.ours}", f"**Why they differ.** {part.why}", *shown]  # fmt: skip
        if tables:
            lines.append(f"Tables: {', '.join(link_to(table, self.page) for table in tables)}.")
        return "\n\n".join([*lines, "</details>"])


def made(folder: Path, names: Iterable[str]) -> str:
    """Dates of a run's parts, number of their solves, and the sum of their minutes."""
    parts = [read_json(folder / f"{name}.json")["made"] for name in names]
    return (
        f"{', '.join(sorted({part['at'][:10] for part in parts}))}; {sum(part['solved'] for part in parts):,} solves, "
        f"which take {sum(part['seconds'] for part in parts) / 60:.0f} minutes one after another."
    )


def _checkmate_head(folder: Path, head: dict[str, Any]) -> str:
    scale = head["scale"]
    return (
        f"`scale={head['config']['scale']}`: {scale['points']} budgets of a sweep, {scale['time_limit_s']:g} s for "
        f"each solve, {head['cores']} cores ({head['provenance'].get('cpu', 'unknown CPU')}),"
    )


def _monet_head(folder: Path, head: dict[str, Any]) -> str:
    return f"{monet.front(folder).lead} {head['provenance'].get('cpu', 'Unknown CPU')},"


CHECKMATE_RUN = PaperPage(
    "paper", DOCS / "results" / "checkmate.md", "paper.json", paper.parts_of, _checkmate_head,
    paper.draw_paper,
    ("fig5_unet", "fig5_mobilenet", "fig5_vgg16", "fig5_vgg19", "fig5_resnet50", "fig5_fcn8", "fig5_segnet",
     "throughput", "solver_time", "rounding", "cost_models", "memory_over_time", "layers", "schedules"),
)  # fmt: skip
MONET_RUN = PaperPage(
    "monet", DOCS / "results" / "monet.md", "monet.json", monet.parts_of, _monet_head,
    monet.draw_monet,
    ("overhead", "ablation", "ten_percent", "solver_time", "records", "implementations_no_winograd"),
)  # fmt: skip


@experiment(page="results/checkmate.md", measures=False)
def checkmate() -> Iterator[Case]:
    """Page: Checkmate, from the study."""
    yield from ()


@experiment(page="results/monet.md", measures=False)
def monet_page() -> Iterator[Case]:
    """Page: MONeT, from the study."""
    yield from ()


checkmate.draws(lambda _: CHECKMATE_RUN.draw([]))
monet_page.draws(lambda _: MONET_RUN.draw([]))
