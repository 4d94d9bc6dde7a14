"""``python -m experiments.tables`` lists every page that an experiment draws, and whether this code made its rows."""

import subprocess
from pathlib import Path

from experiments.arguments import run
from experiments.documents import DOCS, ROOT
from experiments.registry import Experiment, experiments
from experiments.store import Table

MAKES_ROWS = ("remat", "baselines")  # the packages that determine a row


def drawn_pages() -> dict[str, tuple[Experiment, Path]]:
    """[name] every experiment that has a page, and the page."""
    loaded = {name: listed.load() for name, listed in experiments().items()}
    return {name: (one, DOCS / one.page) for name, one in loaded.items() if one.page is not None}


def listing() -> str:
    """Each experiment's page, and the version of the code that made its rows."""
    return "\n".join(
        f"{name:<18} {page.resolve().relative_to(ROOT).as_posix()}\n{'':<18}   {state(name, one)}"
        for name, (one, page) in drawn_pages().items()
    )


def state(name: str, experiment: Experiment) -> str:
    """The date of an experiment's rows, and the version of the code that made them."""
    if not experiment.measures:
        return "drawn from other rows"
    rows = Table(name).rows()
    if not rows:
        return "no rows"
    last = max(rows, key=lambda row: row["date"])
    changed = None if last["git_commit"] is None else changed_since(last["git_commit"])
    version = {True: "an older", False: "this", None: "an unknown"}[changed]
    return f"rows of {last['date']} and earlier, by {version} version of the code"


def changed_since(commit: str) -> bool | None:
    """Whether the packages that make rows differ from those of a commit; None if the commit is unknown here."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *MAKES_ROWS], capture_output=True, check=False
    )
    return {0: False, 1: True}.get(done.returncode)


if __name__ == "__main__":
    run(lambda: print(listing()))
