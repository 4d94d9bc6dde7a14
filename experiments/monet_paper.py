"""MONeT (Shah et al., ICLR 2021) reproduced, beside the published numbers.

See `experiments.parts` for the meaning of a part; `analysis.monet` draws the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import analysis.monet
from analysis.monet import REPORTS
from analysis.parts import Study, draw_parts, lead_of
from experiments.arguments import names_of
from experiments.documents import Drawing
from experiments.monet import implementations
from experiments.monet import parts as parts_of
from experiments.monet.cases import Context, Scale
from experiments.monet.published import NETWORKS
from experiments.parts import RunPart, drawing_of_parts, instances_folder, measured, wanted_parts
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER, Settings
from experiments.solving import Solves
from experiments.store import code_of
from experiments.table import Table
from remat.errors import InvalidInput
from remat.frontends.monet import LEVELS
from remat.registry import get_strategy, strategies

PAGE = "results/monet.md"
PARTS: dict[str, tuple[RunPart, ...]] = {  # [part] it, and the parts whose rows it reads
    "overhead": (parts_of.overhead,), "ablation": (parts_of.ablation,),
    "ten_percent": (parts_of.ten_percent, parts_of.overhead), "records": (parts_of.records,),
    "implementations": (implementations.run, parts_of.overhead),
}  # fmt: skip
QUICK = Scale(time_limit_s=5.0, joint_factor=1.6, all_budgets=False, ablation_budgets=1, monet_columns=10_000,
              halvings=3)  # fmt: skip
STUDY = Scale(time_limit_s=30.0, joint_factor=1.0, all_budgets=True, ablation_budgets=3, monet_columns=100_000,
              halvings=4)  # fmt: skip
FULL = Scale(time_limit_s=300.0, joint_factor=1.0, all_budgets=True, ablation_budgets=6, monet_columns=1_000_000,
             halvings=6)  # fmt: skip
FIGURES = ("overhead", "ablation", "ten_percent", "solver_time", "records", "implementations_no_winograd")


@experiment(page=PAGE, has_graphs=True)
def monet(
    settings: Settings, scale: str = "full", time_limit: float = 300.0, networks: list[str] | None = None,
    parts: list[str] | None = None, levels: list[str] | None = None,
) -> Iterator[Case]:  # fmt: skip
    """MONeT (Shah et al., ICLR 2021): implementations and checkpoints together; scale=quick for 10 minutes.

    ``parts=`` are of overhead, ablation, ten_percent, records, implementations; ``levels=`` are those of the ablation.
    """
    if settings.cost != "roofline":
        raise InvalidInput("experiment=monet takes published P100 costs or the roofline's; leave out cost")
    if (settings.scope, settings.accounting) != ("staged", "exact"):
        raise InvalidInput("experiment=monet compares staged plans, counted exactly; leave out scope, accounting")
    asked = names_of("level of implementations", LEVELS if levels is None else levels, LEVELS)
    less = {"study": STUDY, "quick": QUICK}.get(scale)
    amount = replace(
        less or FULL, time_limit_s=time_limit if less is None else min(time_limit, less.time_limit_s),
        levels=tuple(level for level in LEVELS if level in asked),
    )  # fmt: skip
    settings = replace(_with_own_implementations(settings), time_limit_s=amount.time_limit_s)
    what = {"networks": names_of("network", NETWORKS if networks is None else networks, NETWORKS), "scale": scale,
            "amount": asdict(amount) | {"levels": list(amount.levels)}, "settings": settings.determining(),
            "has_published": instances_folder(settings) is not None}  # fmt: skip
    for part in wanted_parts(parts, PARTS):
        yield Case(measure, {"part": part, **what}, code_of(*settings.strategies), name=part, solves=settings)


def measure(run: Solves, part: str, networks: Sequence[str], amount: dict[str, Any], **_: Any) -> Iterator[Row]:
    """The rows of a part, see `experiments.parts.measured`."""
    given: dict[str, Any] = {**amount, "levels": tuple(amount["levels"])}
    run_part, *needs = PARTS[part]
    yield from measured(Context(run, Scale(**given), tuple(NETWORKS[name] for name in networks)), run_part, needs)


def _with_own_implementations(settings: Settings) -> Settings:
    """The settings with every strategy, if the command line names none: the default ones lack some that run here."""
    names = strategies()
    if settings.strategies != tuple(name for name in names if get_strategy(name).implementations != "own"):
        return settings
    return replace(settings, strategies=tuple(names), options={name: {} for name in names} | settings.options)


def stored_study() -> Study:
    """The study of the rows in the repository, and of those of runs here."""
    return Study.of(Table("monet").rows(), RUNS_FOLDER / "monet")


@monet.draws
def page(rows: Sequence[Row]) -> Drawing:
    """The page of MONeT."""
    study = Study.of(rows, RUNS_FOLDER / "monet")
    head = next(iter(study.heads.values()))
    amount, threads = head["amount"], head["settings"]["threads"]
    joint = amount["time_limit_s"] * amount["joint_factor"]
    longer = "" if amount["joint_factor"] == 1 else f" ({joint:g} s for the portfolio's with implementations)"
    lead = lead_of(
        analysis.monet.__file__, scale=head["scale"], limit=f"{amount['time_limit_s']:g} s for each solve{longer}",
        threads=threads, s="s" * (threads > 1), cores=head["cores"], cpu=head["cpu"],
    )  # fmt: skip
    return drawing_of_parts(study, *draw_parts(REPORTS, study), lead, "monet", PAGE, FIGURES)
