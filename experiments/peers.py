"""Pages drawn from rows of others: published numbers beside ours (docs/results/index.md), and the README.

A number is at the published one or better, or worse, and why. A number of a method that is reproduced for comparison (a
heuristic's cost, DTR's slowdown) is neither: it is as published, or it differs.

The numbers come from the study of Checkmate (`scale=study`), from `experiment=monet`, `dtr` and `rivals`;
nothing is solved here. A paper without a study is left out.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from analysis import figures, overhead
from analysis.batches import OPTIMUM, continuous, found_by, network_label
from analysis.overhead_data import overhead_data
from analysis.paper import sweeps
from analysis.paper.claims import FASTER_AT, FASTER_ON, LARGER
from analysis.parts import Study
from analysis.published import PUBLISHED
from analysis.results import PAPERS_HEURISTICS
from analysis.style import OURS, label_of
from experiments import checkmate, monet
from experiments.compiled import steps_of
from experiments.documents import Drawing, LongTable, grouped, links, made, markdown_table
from experiments.dtr import networks_of
from experiments.explain import answers
from experiments.registry import Row, experiment
from experiments.rivals import pairs
from experiments.store import Table

# Ours is at a published number that it misses by less, because papers print few digits: as a share, and in points of
# percent for a difference.
EQUAL, EQUAL_POINTS = 0.005, 0.05
MS = 5e-4  # the same for costs in ms, which have all their digits
HEADS = ("paper", "what", "published", "ours", "ours / published", "verdict")
AS_PUBLISHED = 0.05  # a baseline's number is as published if it differs by no more than this share
BETTER, WORSE, SAME, DIFFERS, OPEN = "at or better", "worse", "as published", "differs", "no result"
CLAIM_HEADS = ("by", "what", "claimed", "reproduced", "modelled", "measured")
RECORDED = (("resnet50_b184", "5 GiB"), ("unet_b11", "5 GiB"), ("unet_b11", "6 GiB"))
BUDGET = re.compile(r", ([\d.]+) GiB")
LARGER_ON, LARGER_RULE = "mobilenet", "published_stated"
PAGE = "results/index.md"
HEADLINES = (  # (paper, start of what) of the first table
    ("Checkmate", "VGG19: largest batch"), ("Checkmate", "MobileNet: times a larger batch than checkpoint-all"),
    ("Checkmate", "U-Net, 16 GB"), ("Checkmate", "VGG16: cost / optimum of ap_greedy"),
    ("MONeT", "VGG-16, icmn, 10 GiB"), ("MONeT", "ResNet-50, icmn, 5 GiB"), ("MONeT", "U-Net, icmn, 5 GiB"),
)  # fmt: skip
VERDICTS = (BETTER, WORSE, SAME, DIFFERS, OPEN)


@dataclass(frozen=True, slots=True)
class Number:
    """A published number and ours.

    Attributes:
        ours: None if there is no result.
        cause: why ours may be worse or differ, or why there is none, as far as it is known.
        more_is_better: as of a batch, in contrast to a cost.
        signed: both are differences in percent, which may be negative: they are compared by their difference.
        is_baseline: of a method that is reproduced for comparison.
        tolerance: the share by which a number may be worse and is still at the published one.
    """

    paper: str
    what: str
    published: float
    ours: float | None
    cause: str = ""
    more_is_better: bool = False
    signed: bool = False
    is_baseline: bool = False
    tolerance: float = EQUAL

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.ours is None:
            return OPEN
        if self.is_baseline:
            return SAME if abs(self.ours - self.published) <= AS_PUBLISHED * self.published else DIFFERS
        lead = self.ours - self.published if self.more_is_better else self.published - self.ours
        return BETTER if lead >= -(EQUAL_POINTS if self.signed else self.tolerance * self.published) else WORSE

    def cells(self) -> list[str]:
        """The cells of `HEADS`."""
        ours, unit = "" if self.ours is None else f"{self.ours:.4g}", " %" if self.signed else ""
        ratio = "" if self.ours is None or self.signed else f"{self.ours / self.published:.3f}"
        why = f": {self.cause}" if self.verdict in (WORSE, DIFFERS, OPEN) and self.cause else ""
        return [self.paper, self.what, f"{self.published:g}{unit}", f"{ours}{unit}" if ours else "", ratio,
                f"{self.verdict}{why}"]  # fmt: skip


def batches(study: Study) -> Iterator[Number]:
    """Checkmate's largest batches, each under its rule of counting."""
    for document in study.document("fig6")["documents"]:
        for published in document["published"]:
            rule, batch = published["rule"], published["batch"]
            is_theirs = published["strategy"] == OPTIMUM  # the paper's own; else a baseline's batch
            found = round(continuous(document)) if is_theirs else found_by(document, rule).get(published["strategy"])
            who = "largest batch" if is_theirs else f"largest batch of {published['strategy']}"
            how = f" ({continuous(document):.4f} as a real number, rounded as published)" if is_theirs else ""
            yield Number("Checkmate", f"{network_label(document)}: {who}{how}", batch, found, more_is_better=True,
                         is_baseline=not is_theirs)  # fmt: skip


def larger(study: Study) -> Iterator[Number]:
    """How many times larger the batch is than those of checkpoint-all and of the best heuristic, on MobileNet."""
    for document in study.document("fig6")["documents"]:
        if document["network"] == LARGER_ON:
            for claim in LARGER:
                found = claim.ours(document, LARGER_RULE)
                what, ours = f"{network_label(document)}: times {claim.words}", round(found[0], 2) if found else None
                yield Number("Checkmate", what, claim.published, ours, more_is_better=True)


def heuristics(study: Study) -> Iterator[Number]:
    """Checkmate's Table 2 as the artifact has it: V100 costs, checkpoints held to the end, every budget with a plan."""
    known = {sweep.label: sweep for sweep in sweeps.sweeps(study.document("fig5"), study)
             if sweep.source == "published"}  # fmt: skip
    for label, of in PUBLISHED["checkmate"]["table_2"].items():
        for name, published in of.items():
            what, sweep = f"{label}: cost / optimum of {name}", known.get(label)
            if sweep is None:
                yield Number("Checkmate", what, published, None, "its V100 costs are not published", is_baseline=True)
                continue
            found = sweeps.ratios(sweep.run, name, sweep.artifact if name in PAPERS_HEURISTICS else None, every=True)
            named = f"{what} (V100 costs, {len(found)} of {len(sweeps.best_costs(sweep.run))} budgets)"
            mean = geometric_mean(found) if found else None
            why = "a mean over other budgets" if found else "with checkpoints held it needs more than all budgets here"
            yield Number("Checkmate", named, published, mean, why, is_baseline=True)


def stages(study: Study) -> Iterator[Number]:
    """Checkmate's integrality gaps with and without frontier-advancing stages."""
    for row in study.document("stages")["rows"]:
        published = {"frontier-advancing": 1.18, "unpartitioned": 21.56}[row["form"]]
        if row["budget"] == 4 and row["lp"]:
            gap = round(row["optimum"] / row["lp"], 2)
            yield Number("Checkmate", f"integrality gap, {row['form']}", published, gap, is_baseline=True)
            if row["proven"]:
                yield Number("Checkmate", f"seconds to the optimum of the chain, {row['form']}", 0.23, row["seconds"],
                             "HiGHS on one thread instead of Gurobi", is_baseline=True)  # fmt: skip


def speedup(study: Study) -> Iterator[Number]:
    """Checkmate's speedup over the best heuristic, which holds its checkpoints to the end, on the published graph."""
    unet = [sweep for sweep in sweeps.sweeps(study.document("fig5"), study)
            if (sweep.network, sweep.source) == (FASTER_ON, "published")]  # fmt: skip
    gain = sweeps.largest_gain(unet, budget_bytes=FASTER_AT, artifact=True)
    what = "U-Net, 16 GB, published graph: times faster than the best heuristic with checkpoints held to the end"
    yield Number("Checkmate", what, 1.2, None if gain is None else gain.ratio, more_is_better=True)


def logged(rows: Sequence[Row]) -> Iterator[Number]:
    """Milliseconds of MONeT's logged plans, and of Checkmate's on its graphs: those of Gurobi, up to 24 h."""
    for row in rows:
        if row["kind"] == "solve" and row["strategy"] == OURS and row["logged_ms"] is not None:
            is_checkmates = row["level"] == monet.CHECKMATES
            what = f"{monet.NETWORKS[row['network']]}, {row['level']}, {row['budget_gib']:g} GiB: logged ms"
            cause = f"{row['time_limit_s']:g} s on {row['threads']} threads; Gurobi took {row['logged_s']:,.0f} s"
            yield Number("Gurobi, up to 24 h" if is_checkmates else "MONeT", what, round(row["logged_ms"], 2),
                         row["ms"], cause, tolerance=MS)  # fmt: skip


def moccasin() -> Iterator[Number]:
    """MOCCASIN's overheads in percent, by the better of its own method and the portfolio."""
    for both in pairs(Table("rivals").rows()):
        found, theirs = [row["overhead"] for row in both if row["overhead"] is not None], both[0]
        ours = round(100 * min(found), 2) if found else None
        what = f"{theirs['graph_name']}, {theirs['share']:.0%}: overhead"
        yield Number("MOCCASIN", what, theirs["published_percent"], ours, "one printed digit", signed=True)


def slowdowns() -> Iterator[Number]:
    """DTR's slowdowns: the simulated run has no overhead of its own, so that it must be below."""
    for name, network in networks_of(Table("dtr").rows()).items():
        for row in network["rows"]:
            what = f"{name}, {row['ratio']:.0%} of its memory: slowdown, ours without DTR's own overhead"
            yield Number("DTR", what, row["published"], row["online"]["exact"],
                         "published slowdowns contain the method's own time", is_baseline=True)  # fmt: skip


# (part of Checkmate's study, its numbers)
PARTS = (("fig6", batches), ("fig5", heuristics), ("stages", stages), ("fig5", speedup), ("fig6", larger))


def numbers() -> Iterator[Number]:
    """All of them, from the rows that there are."""
    study = checkmate.stored_study()
    for part, numbers_of in PARTS:
        if part in study.heads:
            yield from numbers_of(study)
    yield from logged(monet.ordered(Table("monet").rows()))
    yield from moccasin()
    yield from slowdowns()


@experiment(page=PAGE, measures=False)
def peers() -> Drawing:
    """Page: published numbers beside ours, at or better, or worse and why."""
    found = list(numbers())
    first = [number for paper, what in HEADLINES for number in found
             if number.paper == paper and number.what.startswith(what)]  # fmt: skip
    shown = [  # a baseline's number is reproduced, ours is modelled
        [paper, what, published, *((ours, "") if number.is_baseline else ("", ours)), ""]
        for number in first for paper, what, published, ours, *_ in [number.cells()]
    ]  # fmt: skip
    counts = Counter((number.paper, number.verdict) for number in found)
    papers = dict.fromkeys(number.paper for number in found)
    every = LongTable("peers", HEADS, [number.cells() for number in found])
    worse = list(_grouped([number for number in found if number.verdict == WORSE]))
    text = "\n\n".join([
        markdown_table(CLAIM_HEADS, [*_recorded(), *shown, *_rivals(), *_online(), *_executed()], "llrrrr"),
        markdown_table(["paper", "numbers", *VERDICTS],
                       [[paper, str(sum(counts[paper, v] for v in VERDICTS)),
                         *(str(counts[paper, v]) for v in VERDICTS)] for paper in papers]),
        "Those that are worse:" if worse else "None of these is worse.",
        *([markdown_table(HEADS, worse, "llrrrl")] if worse else []),
        f"Every number: {links(PAGE, every)}.",
    ])  # fmt: skip
    return Drawing(text, [every], {"resnet50_records": figures.records(solves("resnet50_b184"))})


def _grouped(worse: Sequence[Number]) -> Iterator[list[str]]:
    """The cells of these numbers; one line for those of several budgets that have one cause."""
    groups = grouped(worse, lambda number: (number.paper, BUDGET.sub("", number.what), number.cause))
    for (_, what, _), own in groups.items():
        cells = [number.cells() for number in own]
        if len(own) == 1:
            yield cells[0]
            continue
        budgets = ", ".join(found[1] for number in own if (found := BUDGET.search(number.what)))
        joined = [" / ".join(cell.removesuffix(" %") for cell in column) for column in zip(*cells, strict=True)]
        unit = " %" if own[0].signed else ""
        ratio = "" if own[0].signed else joined[4]
        yield [own[0].paper, f"{what} at {budgets} GiB", joined[2] + unit, joined[3] + unit, ratio, cells[0][5]]


def solves(network: str) -> list[Row]:
    """The portfolio's shortest solve at each budget with a record, on a graph of the P100."""
    rows = [row for row in Table("solvers").rows() if row["instance"] == f"p100/{network}" and row["strategy"] == OURS]
    first = min(row["time_limit_s"] for row in rows)
    return [row for row in rows if row["time_limit_s"] == first]


def _recorded() -> Iterator[list[str]]:
    for network, budget in RECORDED:
        for row in solves(network):
            if row["budget"] == budget:
                model, _, batch = network.partition("_b")
                what = f"{label_of(model)}, batch {batch}, {budget} of a P100: overhead, gap, seconds"
                yield ["Checkmate's MILP in Gurobi, 12 threads", what,
                       _solved(row["record_cost"], row["total_cost"], row["record_gap"], row["record_s"]), "",
                       _solved(row["cost"], row["total_cost"], row["gap"], row["wall_s"]), ""]  # fmt: skip


def _solved(cost: int, total: int, gap: float, seconds: float) -> str:
    return f"{cost / total - 1:.2%}, {gap:.3%}, {seconds:,.0f} s"


def _rivals() -> Iterator[list[str]]:
    for theirs, ours in pairs(Table("rivals").rows())[-1:]:
        what = f"{Path(theirs['graph']).stem}, {theirs['share']:.0%} of the peak: overhead, seconds to the plan"
        here = [f"{row['overhead']:.2%}, {row['found_s']:,.0f} s" for row in (theirs, ours)]
        claimed = f"{theirs['published_percent']:g}%, {theirs['published_s']:g} s"
        yield ["MOCCASIN, 16 threads", what, claimed, *here, ""]


def _online() -> Iterator[list[str]]:
    name, network = next(iter(networks_of(Table("dtr").rows()).items()))
    row = network["rows"][-1]
    what = f"{name}, {row['ratio']:.0%} of its memory: step time / plain's"
    numbers = [f"{number:.3f}" for number in (row["online"]["exact"], row["offline"])]
    yield ["DTR, measured on a Titan V", what, f"{row['published']:g}", *numbers, ""]


def _executed() -> Iterator[list[str]]:
    """GPT-2 at the peak of checkpoints on every block, and the lowest peak of a compiled one."""
    rows = [row for row in Table("executed_steps").rows() if (row["steps"], row["model"]) == ("peers", "gpt2")]
    every = next(row for row in rows if row["method"] == "checkpoint_blocks")
    plain = next(row for row in rows if row["method"] == "plain")
    own = [row for row in rows if row["method"] == OURS and row["measured_peak_bytes"] <= every["measured_peak_bytes"]]
    best = min(own, key=lambda row: row["predicted_ns"])
    what = f"GPT-2 at {every['measured_peak_bytes'] / 1e6:.0f} MB: step time / plain's"
    yield ["PyTorch's checkpoints", what, "", "",
           f"{best['predicted_ns'] / plain['predicted_ns']:.3f}",
           f"{best['measured_ratio']:.3f}, theirs {every['measured_ratio']:.3f} ({made([best])})"]  # fmt: skip
    rows = steps_of(Table("compiled").rows())["gpt2"]
    lowest = {is_ours: min((row for row in rows if (row["variant"] == "remat") is is_ours),
                           key=lambda row: row["measured_bytes"]) for is_ours in (True, False)}  # fmt: skip
    theirs, ours = lowest[False], lowest[True]
    sizes = (ours["predicted_bytes"], ours["measured_bytes"], theirs["measured_bytes"])
    promised, mine, other = (f"{size / 1e6:.1f} MB" for size in sizes)
    yield ["PyTorch's memory budget", "GPT-2, compiled: lowest peak", "", "", promised,
           f"{mine}, theirs {other} ({made([ours])})"]  # fmt: skip


README_NETWORKS = ("gpt2", "llama")
# Of the README: what `remat explain` says, networks as compiled steps, and the sweep of VGG19.
EXPLAINED = ("plain peak", "smallest budget", "overhead at 80% of the peak", "overhead at 60% of the peak",
         "largest batch at 0%", "largest batch at 10%", "largest length at 0%", "largest length at 10%")  # fmt: skip


@experiment(page="../README.md", measures=False)
def readme() -> Drawing:
    """Page: the README's table and figures."""
    columns = answers(Table("explain").rows())
    told = [[name, *(column.get(name, "") for column in columns.values())] for name in EXPLAINED]
    models = {name: rows for name, rows in steps_of(Table("compiled").rows()).items() if name in README_NETWORKS}
    study = checkmate.stored_study()
    run = next(sweep.run for sweep in sweeps.sweeps(study.document("fig5"), study) if sweep.label == "VGG19")
    data = overhead_data(run)
    assert data is not None
    drawn = {"training": figures.compiled(models), "vgg19_sweep": overhead.draw(data, run)}
    return Drawing(markdown_table(["`remat explain`, on an H100", *columns], told), figures=drawn)
