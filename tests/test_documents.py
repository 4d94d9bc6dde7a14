"""Tables in documents: written between their marks, and what they say is what the commands compute."""

from __future__ import annotations

from pathlib import Path

import pytest

import remat
from experiments import checkmate, documents
from remat.errors import InvalidInput


def test_text_between_the_marks_is_replaced(tmp_path: Path) -> None:
    first, last = documents.marks("a command")
    document = tmp_path / "x.md"
    document.write_text(f"before\n{first}\nold\n{last}\nafter\n")
    documents.write_between_marks(document, "a command", documents.markdown_table(["a", "b"], [["1", "2"]]))
    assert document.read_text() == f"before\n{first}\n\n| a | b |\n| --- | --: |\n| 1 | 2 |\n\n{last}\nafter\n"
    with pytest.raises(InvalidInput, match="another"):
        documents.write_between_marks(document, "another", "")


def test_published_values_are_met() -> None:
    """The document holds what was computed, and it equals what was published."""
    pytest.importorskip("keras", reason="keras is not installed: pip install 'remat[tensorflow]'")
    graph = checkmate.vgg19("published")
    assert graph.total_cost == 58_896_187_392
    document = (documents.DOCS / "results/checkmate.md").read_text()
    for row in checkmate.NOTEBOOK:
        line = next(text for text in document.splitlines() if text.startswith(f"| {row.label} |"))
        published, ours = line.split("|")[2:4]
        assert published.strip() == ours.strip()
    members = remat.family(graph, "griewank", accounting="published")
    griewank = next(m for m in members if m.parameters["slots"] == 5)
    assert f"{griewank.cost / 1e9:.3f}" == "108.267"
