"""The parts of Checkmate's page: each has prose, figures and tables, made from the rows of ``experiment=paper``.

A part is a function of (document, study). Its prose is in the Markdown file of its name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from analysis.results import FAMILY_COLUMNS, ROW_COLUMNS, Frame, Run, frame_of
from remat.files import write_text
from remat.frontends.json import graph_from_dict

PROSE = Path(__file__).with_name("paper")
DOCUMENT, SOLVE = "document", "solve"  # kinds of row


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A section of the page.

    Attributes:
        text: Markdown: the published result, ours, and why they differ.
        figures: (name of the file, caption, figure) of each.
        tables: (name, heads, rows of text) of each.
    """

    title: str
    text: str
    figures: Sequence[tuple[str, str, Figure]] = ()
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """The rows of a paper's experiment.

    Attributes:
        heads: [part] the row of its last document.
        solves: [key] the row of each solve.
        folder: where figures are drawn, and plans are written to be replayed.
    """

    heads: dict[str, Mapping[str, Any]]
    solves: Mapping[str, Mapping[str, Any]]
    folder: Path

    def document(self, part: str) -> dict[str, Any]:
        """The last document of a part."""
        return self.heads[part]["document"]

    def panels(self, part: str) -> list[dict[str, Any]]:
        """The panels of a part's document; none without the part."""
        return self.heads[part]["document"]["panels"] if part in self.heads else []

    def rows(self, keys: Iterable[str]) -> Frame:
        """The solves with these keys, without missing ones."""
        return frame_of([dict(self.solves[key]) for key in dict.fromkeys(keys) if key in self.solves], ROW_COLUMNS)

    def run(self, panel: Mapping[str, Any]) -> Run:
        """The solves of one graph, as `experiments.paper.graphs.panel_of` describes them."""
        rows = self.rows(panel["keys"]).sort_values(
            ["strategy", "budget_bytes", "key"], kind="stable", ignore_index=True
        )
        graph = None
        if "graph" in panel:
            graph = graph_from_dict(panel["graph"])
            for row in (self.solves[key] for key in panel["keys"] if key in self.solves):
                if row["plan"] is not None:
                    write_text(self.folder / row["plan_file"], row["plan"])
        families = frame_of(panel["members"], FAMILY_COLUMNS)
        return Run(self.folder, dict(panel), rows, families, graph, self.folder)


Report: TypeAlias = Callable[[Any, Study], Part]


def prose(part: str, /, **values: object) -> tuple[str, str]:
    """(title, text) from ``paper/PART.md``; `values` fill in ``{name}``. A file without paragraphs is all title."""
    text = (PROSE / f"{part}.md").read_text(encoding="utf-8").format(**values)
    title, *texts = (" ".join(paragraph.split()).removeprefix("# ") for paragraph in text.strip().split("\n\n"))
    return title, "\n\n".join(texts)


def percent(share: float | None) -> str:
    """``12.34 %``; '' for None."""
    return "" if share is None else f"{100 * share:.2f} %"
