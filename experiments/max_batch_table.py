"""The six networks of Checkmate's Figure 6: ``python -m experiments.max_batch_table``.

Options: ``[--write] [--draw-only | --only=NETWORK,...] [OVERRIDE ...]``.

Solves what the store does not have (``time_limit=30`` and the like change how), writes
``runs/max_batch_size`` and prints the tables. ``--write`` puts the documents into results/max_batch_size.json and the
tables and the figure into docs/; ``--draw-only`` takes the documents from there, ``--only`` those of other networks.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.max_batch_size import DIRECT, draw_runs, strategies_of
from experiments.cli import check, complain
from experiments.config import register
from experiments.documents import DOCS, markdown_table, write_between_marks
from experiments.engines import make_engine
from experiments.max_batch_size import max_batches, write_run
from experiments.progress import SolveProgress, make_console
from experiments.settings import RUNS_FOLDER, STORE_FOLDER
from experiments.store import Store, write_json
from remat.errors import RematError, unknown_name
from remat.files import read_json

COMMAND = "python -m experiments.max_batch_table --write"
NETWORKS = ("unet", "fcn8", "segnet", "vgg19", "resnet50", "mobilenet")
FOLDER = RUNS_FOLDER / "max_batch_size"
RESULTS = DOCS.parent / "results" / "max_batch_size.json"


def solve(overrides: Sequence[str], networks: Sequence[str]) -> list[dict[str, Any]]:
    """Documents of these networks."""
    register()
    settings = [
        check(["experiment=max_batch_size", f"model={name}", *overrides], multirun=False)[0] for name in networks
    ]
    console, first = make_console(), settings[0]
    engine = make_engine(first.engine, first.jobs, first.threads, first.address)
    with engine, SolveProgress(console, engine.at_once) as progress:
        return max_batches(settings, Store(STORE_FOLDER), engine, progress, console=console)


def tables(documents: Sequence[Mapping[str, Any]]) -> str:
    """What limits each network, then a Markdown table for each rule."""
    heads = ["network", "largest working set, bytes a sample", "2P", "published", "what that needs at least"]
    parts = [markdown_table(heads, _limits(documents))]
    for rule in documents[0]["rules"]:
        name = rule["name"]
        rows = []
        for strategy in strategies_of(documents):
            found = [_found(document, strategy, name) for document in documents]
            if any(found):
                rows.append([_label(strategy), *(found_one or "–" for found_one in found)])
        rows.append(["**no plan has more (proven)**", *(f"**{document['proven'][name]}**" for document in documents)])
        published = dict.fromkeys(p["strategy"] for d in documents for p in d["published"] if p["rule"] == name)
        rows += [[f"published, {_label(s)}", *(_published(d, s, name) for d in documents)] for s in published]
        heads = [rule["label"], *(document["network"] for document in documents)]
        parts += [markdown_table(heads, rows)]
    return "\n\n".join(parts)


def _limits(documents: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """[network] bytes of one sample's largest operation and of the parameters, and Checkmate's batch with both."""
    rows = []
    for document in documents:
        published = next(p["batch"] for p in document["published"] if p["rule"] == "published_stated")
        working, fixed = document["working_set_bytes"], document["parameter_bytes"]
        needed = published * working + fixed
        verdict = "impossible" if needed > document["memory_bytes"] else "not excluded"
        rows.append([document["network"], f"{working:,}", f"{fixed:,}", str(published),
                     f"{published} x {working:,} + 2P = {needed / 1e9:.3f}e9: {verdict}"])  # fmt: skip
    return rows


def _label(strategy: str) -> str:
    return "direct MILP" if strategy == DIRECT else f"`{strategy}`"


def _found(document: Mapping[str, Any], strategy: str, rule: str) -> str:
    record = next((r for r in document["records"] if r["strategy"] == strategy), None)
    batch = None if record is None else record["found"][rule]
    return "" if batch is None else str(batch)


def _published(document: Mapping[str, Any], strategy: str, rule: str) -> str:
    known = [p["batch"] for p in document["published"] if (p["strategy"], p["rule"]) == (strategy, rule)]
    return str(known[0]) if known else ""


def _networks(flags: Sequence[str]) -> Sequence[str]:
    """Those that ``--only=`` names, all without it."""
    only = next((flag.removeprefix("--only=").split(",") for flag in flags if flag.startswith("--only=")), NETWORKS)
    for name in only:
        if name not in NETWORKS:
            raise unknown_name("network", name, NETWORKS)
    return only


def main(arguments: Sequence[str]) -> int:
    """Solve or read, write, draw, print."""
    flags = [a for a in arguments if a.startswith("--")]
    try:
        networks = () if "--draw-only" in flags else _networks(flags)
        documents = solve([a for a in arguments if not a.startswith("--")], networks) if networks else []
        if len(documents) < len(NETWORKS):
            known = {document["network"]: document for document in (*read_json(RESULTS)["networks"], *documents)}
            documents = [known[name] for name in NETWORKS]
        write_run(FOLDER, documents)
        drawn = draw_runs([FOLDER], FOLDER)
        print(tables(documents))
        if "--write" in flags:
            write_json(RESULTS, {"experiment": "max_batch_size", "networks": documents})
            write_between_marks(DOCS / "results" / "largest-batch.md", COMMAND, tables(documents))
            png = next(path for path in drawn if path.suffix == ".png")
            shutil.copy(png, DOCS / "figures" / "max_batch_size.png")
        print(*drawn, sep="\n")
    except RematError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
