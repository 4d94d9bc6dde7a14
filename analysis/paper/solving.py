"""How the solvers do: seconds to a plan and to the proof, the form of the MILP with stages, rounded relaxations."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_high
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from analysis.charts import legend_below, log_numbers, panels, points
from analysis.paper.sweeps import start_of
from analysis.parts import Part, Study, percent, prose
from analysis.results import WITH_PLAN, Run, as_objects
from analysis.scales import byte_scale
from analysis.style import BLACK, BLUE, GREEN, ORANGE, OURS, PALE, PURPLE, WINE, style_of
from remat.incumbent import is_closed

LEAST_S = 0.05  # dots of faster solves are drawn here


def reached(steps: Iterable[tuple[float, int]], cost: int | None, wall_s: float, at_most: float | None) -> float | None:
    """Seconds until the solve had a plan of cost `at_most` or less (any plan, if None); None if it never had one.

    `steps` are the improvements, (seconds, cost). A plan without a step came with the final answer, at `wall_s`.
    """
    if cost is None or (at_most is not None and cost > at_most):
        return None
    return min((s for s, found in steps if at_most is None or found <= at_most), default=wall_s)


FORMS = {
    "Checkmate MILP, published form, HiGHS": (ORANGE, "s"), style_of("checkmate_milp").label: (BLUE, "o"),
    style_of(OURS).label: (WINE, "*"),
}  # fmt: skip
CAPTION = "Seconds to a plan, a good plan and the proof; hollow: not reached within the limit"
MARKS = ("first plan", "within 5 %", "within 1 %", "proof")


def solver_time(document: Mapping[str, Any], study: Study) -> Part:
    """A row for each network, budget and form."""
    cases = solver_cases(document, study)
    rows = [[
        case["network"], f"{case['budget_bytes'] / 1e9:.2f}", case["form"], case["status"],
        *("" if case[mark] is None else f"{case[mark]:.2f}" for mark in MARKS), f"{case['limit_s']:.0f}",
    ] for case in cases]  # fmt: skip
    counts = "; ".join(
        f"{form}: {sum(c[MARKS[0]] is not None for c in of)} of {len(of)} with a plan, "
        f"{sum(c[MARKS[3]] is not None for c in of)} proven"
        for form in FORMS if (of := [c for c in cases if c["form"] == form])
    )  # fmt: skip
    speeds = _lp_speed(document, study)
    ratios = {form: ", ".join(f"{name} {ratio}" for name, of, *_, ratio in speeds if of == form)
              for form in ("published", "trimmed")}  # fmt: skip
    speed = ", the ".join(f"{form} MILP takes {found} times the seconds of two-phase rounding"
                          for form, found in ratios.items() if found)  # fmt: skip
    return Part(
        *prose("solver_time", counts=counts, start=start_of(document), speed=f"The {speed}" if speed else ""),
        [("solver_time", CAPTION, _seconds(cases))],
        [("solver_time", ["network", "budget GB", "form", "status", *MARKS, "limit"], rows),
         ("lp_speed", LP_HEADS, speeds)],
    )  # fmt: skip


ROUNDED = "lp_rounding"  # the published method
LP_HEADS = ("network", "form", "LP rounding s", "MILP s", "MILP / LP")


def _lp_speed(document: Mapping[str, Any], study: Study) -> list[list[str]]:
    """Median seconds of two-phase rounding and of the MILP, whole solves, for each network and form of the program."""
    keys = {("trimmed", panel["label"]): panel["panel"]["keys"] for panel in study.panels("fig5")}
    for panel in study.panels("rounding"):
        keys["published", panel["label"]] = panel["panels"]["published"]["keys"]
    rows = []
    for (form, network), own in keys.items():
        milp = [
            study.solves[entry["key"]]
            for entry in document["rows"]
            if entry["network"] == network and form in entry["form"] and entry["key"] in study.solves
        ]
        lp = [row["wall_s"] for key in own if (row := study.solves.get(key)) and row["strategy"] == ROUNDED]
        if milp and lp:
            is_open = median_high(row["wall_s"] >= 0.95 * row["time_limit_s"] for row in milp)
            mark = ">= " if is_open else ""
            one, other = median(lp), median(row["wall_s"] for row in milp)
            rows.append([network, form, f"{one:.1f}", f"{mark}{other:.1f}", f"{mark}{other / one:.1f}"])
    return rows


def solver_cases(document: Mapping[str, Any], study: Study) -> list[dict[str, Any]]:
    """Each solve of the document that the store has, with the seconds to each of `MARKS`, None if not reached."""
    stored = study.rows(row["key"] for row in document["rows"])
    by_key = {row.key: row for row in as_objects(stored)}
    known = [(entry, by_key[entry["key"]]) for entry in document["rows"] if entry["key"] in by_key]
    costs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for entry, row in known:
        costs[entry["network"], row.budget_bytes] += [row.cost] if row.status in WITH_PLAN else []
    cases = []
    for entry, row in known:
        steps = [(s, cost) for s, cost, _ in json.loads(row.stats).get("trajectory", [])]
        cost = row.cost if row.status in WITH_PLAN else None
        case: dict[str, Any] = {"network": entry["network"], "form": entry["form"], "status": row.status,
                                "budget_bytes": row.budget_bytes, "limit_s": row.time_limit_s}  # fmt: skip
        best = min(costs[entry["network"], row.budget_bytes], default=0)
        for mark, at_most in zip(MARKS, (None, 1.05 * best, 1.01 * best), strict=False):
            case[mark] = reached(steps, cost, row.wall_s, at_most)
        case[MARKS[3]] = row.wall_s if row.status == "INFEASIBLE" or is_closed(row.gap) else None
        cases.append(case)
    return cases


def _seconds(cases: list[dict[str, Any]]) -> Figure:
    """A panel for each of `MARKS`: networks down, seconds across, a mark for each solve by a form.

    Solves that had no such plan within the limit stand in the grey strip at the right.
    """
    networks = list(dict.fromkeys(case["network"] for case in cases))
    limit_s = max((case["limit_s"] for case in cases), default=1.0)
    figure, all_axes = panels(len(MARKS), (1.95, 2.8), xlabel="Seconds", sharey=True)
    apart = 0.66 / len(FORMS)
    seen = (case[mark] for case in cases for mark in MARKS if case["form"] in FORMS and case[mark] is not None)
    least = max(LEAST_S, min(seen, default=LEAST_S))
    for axes, mark in zip(all_axes, MARKS, strict=True):
        for number, (form, (colour, marker)) in enumerate(FORMS.items()):
            shift = apart * (number - (len(FORMS) - 1) / 2)
            dots = [(case[mark], networks.index(case["network"]) + shift) for case in cases if case["form"] == form]
            points(axes, [(max(s, LEAST_S), y) for s, y in dots if s is not None], colour, marker, label=form)
            points(axes, [(1.6 * limit_s, y) for s, y in dots if s is None], colour, marker, mfc="none")
        axes.axvspan(1.3 * limit_s, 2.6 * limit_s, color=PALE, alpha=0.5, lw=0,
                     label=f"hollow: not reached in {limit_s:g} s")  # fmt: skip
        axes.set(xscale="log", xlim=(0.8 * least, 2.6 * limit_s), title=mark)
        log_numbers(axes.xaxis, *((1.0, 3.0) if limit_s < 100 else (1.0,)))
    all_axes[0].set_yticks(range(len(networks)), networks)
    all_axes[0].set_ylim(len(networks) - 0.5, -0.5)
    legend_below(figure, 4)
    return figure


def stages(document: Mapping[str, Any], _: Study) -> Part:
    """A row for each budget and form."""
    rows = [[
        str(row["budget"]), row["form"], f"{row['columns']:,}", _number(row["lp"]), f"{row['lp_s']:.2f}",
        str(row["optimum"]),
        _gap(row), _number(row["cost"]), _number(row["bound"]),
        f"{row['seconds']:.2f}" if row["proven"] else f"not proven in {row['limit_s']:.0f}",
    ] for row in document["rows"]]  # fmt: skip
    by_form = {form: [row for row in document["rows"] if row["form"] == form]
               for form in ("frontier-advancing", "unpartitioned")}  # fmt: skip
    gaps = {form: " and ".join(map(_gap, of)) for form, of in by_form.items()}
    times = ", ".join(f"{row['seconds']:.2f} s" for row in by_form["frontier-advancing"] if row["proven"])
    proven = [row for row in by_form["unpartitioned"] if row["proven"]]
    limit = document["rows"][0]["limit_s"]
    unpartitioned = (
        "the unpartitioned form took " + ", ".join(f"{row['seconds']:.0f} s" for row in proven) if proven
        else f"the unpartitioned form is not solved after {limit:.0f} s"
    )  # fmt: skip
    wider = sorted({row["budget"] for row in document["rows"] if row["optimum_fixed_order"] != row["optimum"]})
    outside = f"; at budget {wider} a plan outside the stages is cheaper" if wider else ""
    return Part(
        *prose("stages", layers=document["layers"], operations=document["operations"],
            gap_without=gaps["unpartitioned"], gap_with=gaps["frontier-advancing"], times=times or "no case",
            unpartitioned=unpartitioned, wider=outside,
        ),
        tables=[("stages", [
            "budget bytes", "form", "columns", "LP value", "LP seconds", "optimum", "integrality gap", "MILP's plan",
            "MILP's bound", "seconds",
        ], rows)],
    )  # fmt: skip


def _gap(row: Mapping[str, Any]) -> str:
    """The optimum over the relaxation's value."""
    return f"{row['optimum'] / row['lp']:.2f}" if row["lp"] else "unknown"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


KINDS = (  # relaxation, strategy, label, colour, marker
    ("trimmed", "lp_rounding_random", "random samples, trimmed LP", ORANGE, "o"),
    ("published", "lp_rounding_random", "random samples, published LP", PURPLE, "x"),
    ("trimmed", "lp_rounding", "thresholds 0.1 to 0.9, trimmed LP", BLUE, "D"),
    ("published", "lp_rounding", "thresholds 0.1 to 0.9, published LP", GREEN, "s"),
)
Runs: TypeAlias = Mapping[str, Run]  # [relaxation]


def rounding(document: Mapping[str, Any], study: Study) -> Part:
    """A scatter for each network, and how many roundings fit."""
    runs = [
        (panel["label"], {name: study.run(of) for name, of in panel["panels"].items()}) for panel in document["panels"]
    ]
    rows = [row for label, run in runs for row in _rounding_rows(label, run)]
    return Part(
        *prose("rounding", naive=_naive(document)),
        [("rounding", "Cost against peak memory of every rounding", _roundings(runs))],
        [("rounding", [
            "network", "kind", "roundings", "fit", "cheapest that fits / optimum", "optimum proven within",
            "why none fits",
        ], rows)],
    )  # fmt: skip


def _naive(document: Mapping[str, Any]) -> str:
    """How many random roundings of R and S are plans that fit."""
    parts = [
        f"{panel['label']} {panel['naive_feasible']:,} feasible of {panel['naive_samples']:,}"
        if panel["naive_feasible"] is not None else f"{panel['label']}: the relaxation was not solved in time"
        for panel in document["panels"]
    ]  # fmt: skip
    return ", ".join(parts)


def _points(run: Run, strategy: str) -> list[tuple[int, int]]:
    """(cost, peak in bytes) of every rounding."""
    rows = run.rows[run.rows["strategy"] == strategy]
    return [tuple(point) for stats in rows["stats"] for point in json.loads(stats).get("points", [])]


def _best(runs: Runs) -> Any:
    """The portfolio's row; None if it has no plan."""
    run = runs["trimmed"]
    return next(run.planned[run.planned["strategy"] == OURS].itertuples(), None)


def _roundings(runs: Sequence[tuple[str, Runs]]) -> Figure:
    figure, grid = panels(len(runs), (2.7, 2.7), ylabel="cost / plain step", sharey=True)
    for axes, (label, both) in zip(grid, runs, strict=True):
        run = both["trimmed"]
        budget = int(run.rows["budget_bytes"].iloc[0])
        scale = byte_scale(budget)
        for relaxation, strategy, words, colour, marker in KINDS:
            found = [(peak / scale.factor, cost / run.total_cost) for cost, peak in _points(both[relaxation], strategy)]
            points(axes, found, colour, marker, label=words, size=3.5, alpha=0.6)
        best = _best(both)
        if best is not None:
            points(axes, [(int(best.peak_bytes) / scale.factor, 1 + float(best.overhead))], WINE, "*",
                   label=style_of(OURS).label, size=7)  # fmt: skip
        axes.axvline(budget / scale.factor, color=BLACK, lw=1.0, ls=(0, (5, 2)), label="budget")
        axes.set(title=label, xlabel=f"Peak memory ({scale.unit})", yscale="log")
        log_numbers(axes.yaxis)
    legend_below(figure, 3)
    return figure


def _rounding_rows(label: str, runs: Runs) -> list[list[str]]:
    best, rows = _best(runs), []
    for relaxation, strategy, words, *_ in KINDS:
        run = runs[relaxation]
        budget, points = int(run.rows["budget_bytes"].iloc[0]), _points(run, strategy)
        fitting = [cost for cost, peak in points if peak <= budget]
        ratio = f"{min(fitting) / int(best.cost):.3f}" if fitting and best is not None else ""
        within = "" if best is None or best.gap is None else percent(float(best.gap))
        least = min((peak for _, peak in points), default=None)
        why = "" if fitting else _why(run, strategy) if least is None else (
            f"the least peak of all is {least / 1e9:.2f} GB, the budget {budget / 1e9:.2f} GB"
        )  # fmt: skip
        rows.append([label, words, str(len(points)), str(len(fitting)), ratio, within, why])
    return rows


def _why(run: Run, strategy: str) -> str:
    """The solver's reason for having no plan."""
    rows = run.rows[run.rows["strategy"] == strategy]
    return " ".join(str(message).partition(";")[0] for message in rows["message"].unique())
