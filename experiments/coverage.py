"""Which architectures of transformers train under a plan, see docs/results/any-model.md."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from experiments.arguments import one_of, pattern
from experiments.config import read_conf
from experiments.documents import Drawing, LongTable, links, made, markdown_table, values_of
from experiments.registry import Case, Row, experiment
from remat.cost import COST_MODELS

PAGE = "results/any-model.md"
COLUMNS = ("name", "group", "trains", "budget", "seconds", "operations", "recomputed", "difference", "masks", "message")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of ``conf/architectures.yaml``, which describes the attributes."""

    name: str
    group: str
    model: str
    inputs: str
    settings: Mapping[str, Any]


ARCHITECTURES = {
    name: Architecture(name, group, **of)
    for group, members in read_conf("architectures").items()
    for name, of in members.items() if group != "settings"
}  # fmt: skip


@experiment(page=PAGE)
def coverage(only: str = "", time_limit_s: float = 2.0, costs: str = "roofline") -> Iterator[Case]:
    """Some 80 small architectures of transformers that train under a plan, beside the plain steps."""
    for name in ARCHITECTURES:
        if re.search(pattern(only), name):
            what = {"name": name, "time_limit_s": time_limit_s, "cost": one_of("cost model", costs, COST_MODELS)}
            code = [version("transformers")]
            yield Case("experiments.steps.training.covered", what, code, on_this_machine=True)


@coverage.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each group, what is refused, and a file with every architecture."""
    every = LongTable("coverage", COLUMNS, [[_text(row[name]) for name in COLUMNS] for row in rows])
    refused, masks = [row for row in rows if not row["trains"]], [row["masks"] for row in rows if row["masks"]]
    kinds = masks[0] if masks else ()
    text = "\n\n".join([
        f"{made(rows, 'torch', 'transformers')}: **{len(rows) - len(refused)} of {len(rows)} architectures train**, "
        f"{_same(rows)} of them with the plain model's bits ({values_of(rows, 'cost')} costs, "
        f"{values_of(rows, 'time_limit_s')} s of search). With the plain model's bits under a mask: "
        f"{', '.join(f'{kind} {sum(mask[kind] == 0 for mask in masks)} of {len(masks)}' for kind in kinds)}.",
        markdown_table(["group", "architectures", "train", "the plain model's bits", "seconds to plan, median"],
                       [_group(rows, name) for name in dict.fromkeys(row["group"] for row in rows)]),
        "\n".join(f"- **{row['name']}** is refused: {row['message']}" for row in refused) or "None is refused.",
        f"Every architecture: {links(PAGE, every)}.",
    ])  # fmt: skip
    return Drawing(text, [every])


def _same(rows: Sequence[Row]) -> int:
    return sum(row["trains"] and row["difference"] == 0 for row in rows)


def _group(rows: Sequence[Row], name: str) -> list[str]:
    own = [row for row in rows if row["group"] == name]
    trained = [row["seconds"] for row in own if row["trains"]]
    median = f"{statistics.median(trained):.1f}" if trained else ""
    return [name, str(len(own)), str(len(trained)), str(_same(own)), median]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(each)}" for name, each in value.items())
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
