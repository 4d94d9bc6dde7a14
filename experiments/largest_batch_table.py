"""The networks of Checkmate's Figure 6, for docs/results/largest-batch.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.max_batch_size import draw_runs, rows_of
from experiments.arguments import names_of, one_of
from experiments.cli import check
from experiments.config import register
from experiments.documents import DOCS, Document, Drawing, LongTable, link_to, markdown_table
from experiments.engines import make_engine
from experiments.max_batch_size import max_batches, write_run
from experiments.progress import SolveProgress, make_console
from experiments.provenance import provenance
from experiments.settings import RUNS_FOLDER, STORE_FOLDER
from experiments.store import Store
from remat.files import read_json

NETWORKS = ("unet", "fcn8", "fcn8_plain", "segnet", "vgg19", "resnet50", "mobilenet")
FOLDER = RUNS_FOLDER / "max_batch_size"
RESULTS = DOCS.parent / "results" / "max_batch_size.json"


def solve(overrides: Sequence[str], networks: Sequence[str]) -> list[dict[str, Any]]:
    """Solve these networks; returns their documents."""
    register()
    settings = [
        check(["experiment=max_batch_size", f"model={name}", *overrides], multirun=False)[0] for name in networks
    ]
    console, first = make_console(), settings[0]
    engine = make_engine(first.engine, first.jobs, first.threads, first.address)
    with engine, SolveProgress(console, engine.at_once) as progress:
        return max_batches(settings, Store(STORE_FOLDER), engine, progress, console=console)


def draw(arguments: Sequence[str]) -> Drawing:
    """Draw the stored networks. ``--solve`` or an override solves all of them first, ``--only=NETWORK,...`` some.

    Raises:
        InvalidInput: no such network or option.
    """
    flags = [argument for argument in arguments if argument.startswith("--")]
    for flag in flags:
        one_of("option", flag.partition("=")[0], ("--solve", "--only"))
    overrides = [argument for argument in arguments if not argument.startswith("--")]
    documents = stored = read_json(RESULTS)["networks"] if RESULTS.is_file() else []
    if arguments:
        solved = {document["network"]: document for document in solve(overrides, _networks(flags))}
        known = {document["network"]: document for document in stored} | solved
        commit = provenance().git_commit
        documents = [known[name] | ({"git_commit": commit} if name in solved else {})
                     for name in NETWORKS if name in known]  # fmt: skip
    return drawing(documents)


def drawing(documents: Sequence[Mapping[str, Any]]) -> Drawing:
    """The table of the page, every number as CSV, and the figure; keeps `documents` under results/."""
    write_run(FOLDER, documents)
    figure = next(path for path in draw_runs([FOLDER], FOLDER) if path.suffix == ".png")
    flat = rows_of(documents)
    every = LongTable("largest_batch", list(flat[0]), [["" if cell is None else str(cell) for cell in row.values()]
                                                       for row in flat])  # fmt: skip
    limits = LongTable(
        "largest_batch_limits",
        ("network", "largest working set, bytes a sample", "2P", "published", "what that needs at least"),
        _limits(documents),
    )
    text = "\n\n".join([
        markdown_table(["largest batch", *(f"{rule['label']}: found / proven limit" for rule in documents[0]["rules"]),
                        "published"], map(_summary, documents)),
        f"Tables: {link_to(every, DOCUMENT.page)}, {link_to(limits, DOCUMENT.page)}.",
    ])  # fmt: skip
    commits = {document.get("git_commit") for document in documents}
    return Drawing(
        text, [every, limits], {"max_batch_size": figure}, sorted(set.intersection(*map(set, documents))),
        commits.pop() if len(commits) == 1 else None,
        stores={RESULTS: {"experiment": "max_batch_size", "networks": documents}},
    )  # fmt: skip


def _summary(document: Mapping[str, Any]) -> list[str]:
    """One network: for each rule the largest batch of any strategy and the proven limit; then Checkmate's batch."""
    cells = []
    for rule in document["rules"]:
        found = [record["found"][rule["name"]] for record in document["records"]]
        cells.append(f"{max(batch for batch in found if batch is not None)} / {document['proven'][rule['name']]}")
    return [document["network"], *cells, str(_published(document))]


def _published(document: Mapping[str, Any]) -> int:
    return next(p["batch"] for p in document["published"] if p["rule"] == "published_stated")


def _limits(documents: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each network the bytes of its largest working set and of 2P, and those that Checkmate's batch needs."""
    rows = []
    for document in documents:
        published = _published(document)
        working, fixed = document["working_set_bytes"], document["parameter_bytes"]
        needed = published * working + fixed
        verdict = "impossible" if needed > document["memory_bytes"] else "not excluded"
        rows.append([document["network"], f"{working:,}", f"{fixed:,}", str(published),
                     f"{published} x {working:,} + 2P = {needed / 1e9:.3f}e9: {verdict}"])  # fmt: skip
    return rows


def _networks(flags: Sequence[str]) -> Sequence[str]:
    """The networks that ``--only=`` names; all of them without it."""
    only = next((flag.removeprefix("--only=") for flag in flags if flag.startswith("--only=")), None)
    return names_of("network", NETWORKS if only is None else only, NETWORKS)


DOCUMENT = Document(
    "largest_batch", DOCS / "results" / "largest-batch.md", draw, "",
    ("network", "memory_bytes", "parameter_bytes", "input_bytes", "working_set_bytes", "rules", "proven_bytes",
     "proven", "records", "published"),
)  # fmt: skip
