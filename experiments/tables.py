"""Every table of README and docs: ``python -m experiments.tables [NAME ... | NAME ARGUMENT ...] [--write]``.

Without a name it lists all tables: page, files, date, and whether the current code made their rows. With names it
draws and prints these; ``--write`` puts the text into the page, the long tables into results/tables and the figures
into docs/figures. Arguments after one name belong to that table, e.g. the folder of a run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import (
    largest_batch_table,
    models_table,
    peers,
    published_numbers,
    readme_table,
    roofline_check,
    run_documents,
)
from experiments.arguments import one_of, run
from experiments.cli import complain
from experiments.documents import ROOT, Document, Drawing, markdown_table, other_schema, records, write_document
from experiments.registry import experiments
from experiments.runner import document_of
from remat.errors import RematError

DOCUMENTS = {
    document.name: document
    for document in (
        readme_table.DOCUMENT, run_documents.CHECKMATE, run_documents.MONET, largest_batch_table.DOCUMENT,
        published_numbers.DOCUMENT, roofline_check.DOCUMENT, models_table.DOCUMENT,
        models_table.STRATEGIES, peers.DOCUMENT,
    )
}  # fmt: skip
DOCUMENTS |= {
    document.name: document
    for name, listed in experiments().items()
    if (document := document_of(name, listed.load())) is not None
}
MAKES_ROWS = ("remat", "baselines")  # the packages that determine a row


def listing() -> str:
    """Each document's page, date, code and tables."""
    written = records()
    lines = []
    for document in DOCUMENTS.values():
        record = written.get(document.name)
        page = document.page.relative_to(ROOT).as_posix()
        lines += [f"{document.name:<18} {page}", f"{'':<18}   {state(document, record)}"]
        if record is not None and record["tables"]:
            lines.append(f"{'':<18}   {', '.join(f'{name}.csv' for name in record['tables'])}")
    return "\n".join(lines)


def state(document: Document, record: Mapping[str, Any] | None) -> str:
    """The date of a document, and the version of the code that made its rows."""
    if record is None:
        return f"never drawn; {document.command}"
    if lacking := other_schema(document, record):
        return f"drawn {record['drawn']} from rows of another schema (without {', '.join(lacking)}); {document.command}"
    commit = record["commit"]
    changed = None if commit is None else changed_since(commit)
    version = {True: "an older", False: "this", None: "an unknown"}[changed]
    suffix = "" if commit is None else f" ({commit[:12]})"
    return f"drawn {record['drawn']}, rows of {version} version of the code{suffix}"


def changed_since(commit: str) -> bool | None:
    """Whether the packages that make rows differ from those of a commit; None if the commit is unknown here."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *MAKES_ROWS], capture_output=True, check=False
    )
    return {0: False, 1: True}.get(done.returncode)


def printed(drawing: Drawing) -> str:
    """The text of the page, then every long table."""
    tables = [f"{table.name}.csv:\n\n{markdown_table(table.heads, table.rows)}" for table in drawing.tables]
    return "\n\n".join([drawing.text, *tables])


def main(arguments: Sequence[str]) -> int:
    """List, or draw and write; returns the exit code."""
    write, rest = "--write" in arguments, [argument for argument in arguments if argument != "--write"]
    if not rest:
        print(listing())
        return 0
    if {"-h", "--help"} & set(rest):
        print(__doc__)
        return 0
    names = rest if all(name in DOCUMENTS for name in rest) else rest[:1]
    given = rest[len(names) :]
    failed = False
    try:
        for name in names:
            drawing = DOCUMENTS[one_of("table", name, DOCUMENTS)].draw(given)
            if write:
                write_document(DOCUMENTS[name], drawing)
            print(printed(drawing))
            failed = failed or drawing.failed
    except RematError as error:
        return complain(error)
    return 1 if failed else 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
