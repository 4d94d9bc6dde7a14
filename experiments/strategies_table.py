"""Every strategy with its options, for docs/reference/strategies.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, Row, experiment
from remat import registry
from remat.registry import Strategy, get_strategy

HEADS = ("strategy", "what it does", "options, with their defaults")


@experiment(page="reference/strategies.md", measures=False)
def strategies() -> Iterator[Case]:
    """Page: every strategy with its options."""
    yield from ()


@strategies.draws
def page(_: Sequence[Row]) -> Drawing:
    """A line for each strategy, from the registry."""
    known = map(get_strategy, registry.strategies())
    rows = [[f"`{one.name}`", one.summary, "<br>".join(_options(one))] for one in known]
    return Drawing(markdown_table(HEADS, rows, "lll"))


def _options(chosen: Strategy) -> list[str]:
    """Each option with its default, and what its docstring says of it."""
    said = meanings(inspect.getdoc(chosen.run) or "")
    return [f"`{name}={default}`: {said[name]}" for name, default in chosen.options.items()]


def meanings(docstring: str) -> dict[str, str]:
    """[argument] its text in the section ``Args`` of a docstring, in one line of Markdown."""
    section = re.search(r"^Args:\n((?: {4}.*\n?)+)", docstring, re.MULTILINE)
    entries = re.split(r"^ {4}(?=\w+: )", section[1] if section else "", flags=re.MULTILINE)[1:]
    pairs = (" ".join(entry.split()).replace("``", "`").partition(": ") for entry in entries)
    return {name: text for name, _, text in pairs}
