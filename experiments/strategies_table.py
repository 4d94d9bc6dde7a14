"""Every strategy with its options, for docs/reference/strategies.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from experiments.documents import DOCS, Document, Drawing, markdown_table
from remat.errors import InvalidInput
from remat.registry import Strategy, get_strategy, strategies

HEADS = ("strategy", "what it does", "options, with their defaults")


def draw(arguments: Sequence[str]) -> Drawing:
    """A line for each strategy, from the registry.

    Raises:
        InvalidInput: an argument is given.
    """
    if arguments:
        raise InvalidInput("'strategies' takes no arguments")
    rows = [[f"`{one.name}`", one.summary, "<br>".join(_options(one))] for one in map(get_strategy, strategies())]
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


DOCUMENT = Document("strategies", DOCS / "reference" / "strategies.md", draw)
