"""Experiments made of parts: each a module with ``run(context)``, whose document is kept as soon as it has finished."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from experiments.progress import SolveProgress
from experiments.provenance import provenance
from experiments.store import write_json
from remat.errors import InvalidInput, unknown_name
from remat.files import read_json


class Context(Protocol):
    """What the parts of a run share, as far as running them needs it."""

    progress: SolveProgress
    console: Console
    folder: Path

    def say(self, line: str) -> None:
        """A line to the user."""
        ...


def asked_parts(given: Iterable[Any] | None, known: Collection[str], needs: Mapping[str, Sequence[str]]) -> list[str]:
    """The parts asked for (None: all), each after what it needs.

    Raises:
        UnknownName: there is no such part.
    """
    asked = list(known) if given is None else [str(part) for part in given]
    for part in asked:
        if part not in known:
            raise unknown_name("part", part, known)
    wanted = {need for part in asked for need in needs.get(part, ())} | set(asked)
    return [part for part in known if part in wanted]


def run_parts(
    parts: Mapping[str, Callable[[Any], dict[str, Any]]], wanted: Iterable[str], context: Context
) -> list[dict[str, Any]]:
    """Run the parts wanted one after the other and write each one's document into the folder; the documents."""
    documents = []
    for part in wanted:
        context.say(f"--- {part}")
        started, before = time.monotonic(), context.progress.n_finished
        document = parts[part](context)
        path = context.folder / f"{part}.json"
        made = _made_now(path, time.monotonic() - started, context.progress.n_finished - before)
        write_json(path, document | {"made": made})
        documents.append(document)
    return documents


def _made_now(path: Path, seconds: float, solved: int) -> dict[str, Any]:
    """When a part was made, by which code and in what time: what stood there if nothing had to be solved now."""
    if not solved and path.is_file():
        with contextlib.suppress(InvalidInput, KeyError, TypeError):  # damaged: it is written anew
            return read_json(path)["made"]
    source = provenance()
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": seconds, "solved": solved,
            "git_commit": source.git_commit, "git_dirty": source.git_dirty}  # fmt: skip


def draw_and_say(draw: Callable[[Path], list[Path]], context: Context, refuted: Iterable[str]) -> int:
    """Draw the run, say where everything is and which claims were refuted; the exit code."""
    with context.console.status("drawing ..."):
        drawn = draw(context.folder)
    for what, ending in (("tables", ".csv"), ("figures", ".pdf"), ("page", ".html")):
        for path in sorted({path if ending == ".html" else path.parent for path in drawn if path.suffix == ending}):
            context.say(f"{what:<8} {path}")
    lines = list(dict.fromkeys(refuted))
    for line in lines:
        context.say(f"error: contradicted: {line}")
    return 1 if lines else 0
