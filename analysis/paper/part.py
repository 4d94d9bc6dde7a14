"""What one part of the paper shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table as text: `heads` above `rows`; numbers to the right."""

    name: str
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A section of the page.

    Attributes:
        published, ours, why: what was published, what we got, why they differ.
        figures: (name of the file, caption, figure).
    """

    title: str
    published: str
    ours: str
    why: str
    figures: Sequence[tuple[str, str, Figure]] = field(default=())
    tables: Sequence[Table] = field(default=())


def percent(share: float, digits: int = 2) -> str:
    """``12.34 %``."""
    return f"{100 * share:.{digits}f} %"
