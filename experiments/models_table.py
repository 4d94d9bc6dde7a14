"""Every configured model at each granularity, and every strategy with its options, for docs/reference."""

import inspect
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from experiments.arguments import names_of
from experiments.build import extracted
from experiments.config import group_options
from experiments.documents import Column, Drawing, grouped, links, long_table, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.settings import configured_model
from remat import registry
from remat.errors import RematError
from remat.frontends.spec import ModelSpec
from remat.registry import Strategy, get_strategy
from remat.simulator import plain_peak

PAGE = "reference/models.md"
FAILED = "FAILED"
COLUMNS: Mapping[str, Column] = {
    "model": "{model}", "framework": "{framework}", "granularity": "{granularity}", "batch": "{batch}",
    "nodes": lambda row: FAILED if row["error"] else str(row["nodes"]), "edges": "{edges}",
    "fixed GB": "{fixed_gb:.3f}", "store-all peak GB": "{plain_peak_gb:.3f}", "seconds": "{seconds:.1f}",
}  # fmt: skip


def specs(names: Sequence[str]) -> Iterator[ModelSpec]:
    """Every configured model at each of its granularities, except those that need a target."""
    for name in names:
        spec = configured_model(name)
        if spec.target:
            for granularity in ("layer", "operation") if spec.framework == "keras" else (spec.granularity,):
                yield replace(spec, granularity=granularity)


@experiment(page=PAGE)
def models(names: Sequence[str] = ()) -> Iterator[Case]:
    """Every configured model, extracted: nodes, edges, bytes, seconds."""
    known = group_options("model")
    for spec in specs(names_of("model", names or known, known)):
        yield Case(measure, {"model": spec.name, "granularity": spec.granularity})


def measure(model: str, granularity: str) -> Iterator[Row]:
    """One row: an extraction without a cache, in a child process where a framework is needed.

    A model that cannot be extracted has a row, too, with the `error`.
    """
    spec = replace(configured_model(model), granularity=granularity)
    row: dict[str, object] = {"framework": spec.framework, "batch": spec.batch_size, "error": ""}
    began = time.monotonic()
    try:
        graph = extracted(spec, None)
        row |= {"nodes": len(graph), "edges": graph.n_edges, "fixed_gb": graph.fixed_bytes / 1e9,
                "plain_peak_gb": plain_peak(graph) / 1e9}  # fmt: skip
    except RematError as error:
        row["error"] = str(error)
    yield row | {"seconds": time.monotonic() - began}


@models.draws
def page(rows: Sequence[Row]) -> Drawing:
    """For each framework and granularity, the models and the range of their graphs' sizes."""
    lines, kinds = [], grouped(rows, itemgetter("framework", "granularity"))
    for (framework, granularity), members in kinds.items():
        sizes = [row["nodes"] for row in members if not row["error"]]
        operations = f"{min(sizes):,} to {max(sizes):,} operations" if sizes else FAILED
        names = ", ".join(f"`{row['model']}`" for row in members)
        lines.append(f"- **{framework}, by {granularity}** ({operations}): {names}")
    every = long_table("models", rows, COLUMNS)
    return Drawing("\n".join([*lines, f"\nEvery graph: {links(PAGE, every)}."]), [every])


@experiment(page="reference/strategies.md", measures=False)
def strategies() -> Drawing:
    """Page: every strategy with its options."""
    known = map(get_strategy, registry.strategies())
    rows = [[f"`{one.name}`", one.summary, "<br>".join(_options(one))] for one in known]
    return Drawing(markdown_table(["strategy", "what it does", "options, with their defaults"], rows, "lll"))


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
