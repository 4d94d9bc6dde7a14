"""MONeT (Shah et al., ICLR 2021) on its own costs: its networks, levels of implementations, budgets and solver logs.

Files of ``monet-costs``, ``monet-solutions`` and ``monet-records`` have what its authors published. They have no
licence, and are therefore read from where REMAT_INSTANCES points. Four kinds of case: a solve, beside what the log of
MONeT's program (Gurobi, up to 24 h, 12 threads) has of the same problem; the published schedules, judged by our
simulator; what each implementation costs beside the default one; and the sizes of both integer programs.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import remat
from analysis import figures
from analysis.style import OURS
from experiments.arguments import names_of, one_of
from experiments.documents import Column, Drawing, links, long_table, made, table_by_heads, table_of, values_of
from experiments.measure_solve import LIMITS, graph_of, published_folder, row_of, solve_case, solved
from experiments.registry import Case, Row, experiment
from experiments.settings import SCALES
from experiments.store import code_of
from remat.errors import InvalidInput
from remat.files import read_json
from remat.frontends.monet import KEPT_INDICES, LEVELS_PUBLISHED, STATISTICS, load_schedules, read_costs
from remat.graph import Graph
from remat.implementation import DEFAULT
from remat.programs.monet import build_model
from remat.programs.published import build
from remat.simulator import simulate

NETWORKS = {"resnet50": "ResNet-50", "googlenet": "GoogLeNet", "unet": "U-Net", "mobilenet_v2": "MobileNet-V2",
            "vgg16": "VGG-16"}  # fmt: skip
CHECKMATES = "n"  # the level of default implementations: Checkmate's program, on graphs of its own
SIZES = ("columns", "rows")
OF_RECORDS = {"objective_ms": "cost_ns", "bound_ms": "bound_ns"}
PROFILES = {"resnet50": "resnet50_b184", "unet": "unet_b11", "vgg16": "vgg16_b176"}
GIB = 2**30
ALGORITHM = "algorithm_"  # begins the name of a convolution's algorithm
QUICK_S = 5.0
NEAR = 0.05  # percent: at the logged objective
# [network, level, GiB] a log of other costs than those of the schedule that is published for it: the logged root
# relaxations of this level fall by 4.0 ms a GiB up to 8 GiB, by 5.8 from there to 9, and by 3.8 above.
SET_OF_LOG = {("resnet50", "im", 9.0): "inplace_multiway@1"}


PAGE = "results/monet.md"
SHOWN = "icmn"  # the level of the first table: all implementations
WITH_INDICES = SHOWN + KEPT_INDICES  # and PyTorch's pooling, which is no part of MONeT's set
LEVELS = [*LEVELS_PUBLISHED, WITH_INDICES]
SHORT = {"time_limit": "limit", "infeasible_or_unbounded": "infeasible", "log_ends": "log ends", None: "no log"}


@experiment(page=PAGE, has_graphs=True)
def monet(
    networks: Sequence[str] = (), levels: Sequence[str] = (), budgets: Sequence[float] = (),
    strategies: Sequence[str] = ("portfolio",), time_limit: float = 60.0, threads: int = 2, seed: int = 0,
    scale: str = "full", instances: str | None = None,
) -> Iterator[Case]:  # fmt: skip
    """MONeT (Shah et al., ICLR 2021) on its published costs: five networks, every level and budget (three hours).

    ``levels=`` are of n (Checkmate's), i, ic, im, in, icmn, and icmn+int64; ``budgets=`` are in GiB; scale=quick takes
    three budgets and 5 s. REMAT_INSTANCES, or ``instances=``, has the folder monet/.
    """
    if instances is not None:
        os.environ["REMAT_INSTANCES"] = instances  # the processes of the cases read it, too
    names = names_of("network", networks or NETWORKS, NETWORKS)
    asked = names_of("level", levels or LEVELS, LEVELS)
    folder = published_folder("monet") / "monet"
    is_quick = one_of("scale", scale, SCALES) == "quick"
    limits = {"time_limit_s": min(time_limit, QUICK_S) if is_quick else time_limit, "threads": threads, "seed": seed}
    known = [each for each in names if (folder / f"costs_{each}.json.gz").is_file()]
    for name in known:
        yield Case(ratios, {"kind": "ratios", "network": name}, code_of())
        yield Case(programs, {"kind": "programs", "network": name}, code_of())
        if (folder / f"solutions_{name}.json.gz").is_file():
            yield Case(schedules, {"kind": "schedules", "network": name}, code_of())
    for name in known:
        for level in asked:
            found = [each for each in problems(folder, name, level) if not budgets or each["budget_gib"] in budgets]
            if is_quick:
                found = [found[i] for i in sorted({0, len(found) // 2, len(found) - 1})] if found else []
            for each in found:
                graph = graph_of(each["source"])
                for strategy in strategies:
                    beside = {key: value for key, value in each.items() if key != "source"}
                    case = solve_case(each["source"], graph, strategy, round(each["budget_gib"] * GIB), **limits,
                                      kind="solve", network=name, level=level, **beside)  # fmt: skip
                    yield replace(case, measure=measured)
    if not known:
        raise InvalidInput(f"{folder} has no costs of {', '.join(names)}")


def problems(folder: Path, network: str, level: str) -> list[dict[str, Any]]:
    """The budgets of a network at a level, the largest first, with what is logged and published of each.

    Those of the logs; also those of the published overheads, if the file has costs of that level. `WITH_INDICES` has
    the budgets of `SHOWN`, for the networks with profiles, and nothing published.
    """
    theirs = level.removesuffix(KEPT_INDICES)
    document = read_json(folder / "records.json")
    published = {each["budget_gib"]: each for each in document["published"][network]["monet"]}
    logged = {each["budget_gib"]: each["outcome"] for each in document["records"]
              if (each["network"], each["ablation"]) == (network, theirs)}  # fmt: skip
    if level == CHECKMATES:
        logged |= _recorded(folder.parent, network)
        budgets = set(logged) if network in PROFILES else set[float]()
    else:
        modes = {each["mode"] for each in read_costs(folder / f"costs_{network}.json.gz")["sets"]}
        is_there = LEVELS_PUBLISHED[theirs] in modes and (level == theirs or network in PROFILES)
        budgets = {*logged, *published} if is_there else set[float]()
    sets = _sets(folder, network, theirs)
    sets |= {budget: name for (own, of, budget), name in SET_OF_LOG.items() if (own, of) == (network, theirs)}
    found = []
    for budget in sorted(budgets, reverse=True):
        outcome, own = (logged.get(budget, {}), published.get(budget, {})) if level == theirs else ({}, {})
        source = {"monet": network, "level": level, "set": sets.get(budget)}
        found.append({
            "source": f"p100/{PROFILES[network]}.json" if level == CHECKMATES else source, "budget_gib": float(budget),
            "logged_ms": outcome.get("objective_ms"), "logged_bound_ms": outcome.get("bound_ms"),
            "logged_s": outcome.get("seconds"), "logged_status": outcome.get("status"),
            "logged_found_s": outcome.get("best_incumbent_first_seen_s"),
            "measured_gib": own.get("measured_gib"), "measured_overhead_percent": own.get("overhead_percent"),
        })  # fmt: skip
    return found


def _recorded(folder: Path, network: str) -> dict[float, dict[str, Any]]:
    """[GiB] the results of Checkmate's program in the folder's own records, in the words of the logs."""
    file = folder / "records.json"
    return {
        each["budget_gib"]: {
            "seconds": each["solve_s"], "status": each["status"],
            **{name: each[key] and each[key] / 1e6 for name, key in OF_RECORDS.items()},
        }
        for each in (read_json(file) if file.is_file() else []) if each["instance"] == f"p100/{PROFILES.get(network)}"
    }  # fmt: skip


def _sets(folder: Path, network: str, level: str) -> dict[float, str]:
    """[GiB] the set of costs with which the published schedule of that budget was solved."""
    file = folder / f"solutions_{network}.json.gz"
    found = read_json(file)["solutions"] if file.is_file() else []
    return {each["budget_gib"]: each["set"] for each in found if each["mode"] == LEVELS_PUBLISHED[level]}


def measured(graph: Any, strategy: str, budget_bytes: int, options: Mapping[str, Any], **others: Any) -> Iterator[Row]:
    """One row: a solve, its graph's plain step, and how often the plan runs a backward operation again.

    MONeT's program cannot do that. If a plan does, `once_ms` is what the solver finds without it.
    """
    costs, how = graph_of(graph), {**{name: others[name] for name in LIMITS}, **options}
    solution = solved(costs, strategy, budget_bytes, **how)
    plain = simulate(costs, plain_step(costs))
    calls = Counter(solution.plan.order.tolist()) if solution.plan else {}
    again = sum(n - 1 for k, n in calls.items() if costs.operations[k].is_backward)
    operations = tuple(replace(op, run_once=op.run_once or op.is_backward) for op in costs.operations)
    once = solved(replace(costs, operations=operations), strategy, budget_bytes, **how).cost if again else None
    yield {
        **row_of(solution, costs), "plain_ms": plain.cost / 1e6, "plain_bytes": plain.peak_bytes,
        "backward_repeats": again, "once_ms": once and once / 1e6, "program_columns": solution.stats.get("columns"),
    }  # fmt: skip


def plain_step(graph: Graph) -> remat.Plan:
    """Every operation once, by default implementations, and each convolution by its fastest algorithm."""
    names = [
        min((each for each in op.all_implementations if each.name == DEFAULT or ALGORITHM in each.name),
            key=lambda each: each.cost).name
        for op in graph.operations
    ]  # fmt: skip
    return remat.Plan.from_order(graph, range(len(graph)), implementations=names)


def schedules(kind: str, network: str) -> Iterator[Row]:
    """A row for each published schedule: its stored objective, and cost and peak by our simulator."""
    for each in load_schedules(published_folder("monet") / f"monet/solutions_{network}.json.gz"):
        trace = simulate(each.graph, each.plan)
        yield {
            "file": each.file, "level": each.level, "budget_bytes": each.budget_bytes,
            "stored_ms": None if each.cost is None else each.cost / 1e6, "ours_ms": trace.cost / 1e6,
            "peak_bytes": trace.peak_bytes,
        }  # fmt: skip


def programs(kind: str, network: str) -> Iterator[Row]:
    """Sizes of MONeT's program at all implementations, and of Checkmate's: in the logs, and as built here."""
    known = read_json(published_folder("monet") / "monet/records.json")["records"]
    for level in (SHOWN, CHECKMATES):
        graph = graph_of({"monet": network, "level": level, "set": None})
        program = build_model(graph, 10 * GIB).program() if level == SHOWN else build(graph).program(1.0)
        log = [solve for each in known if (each["network"], each["ablation"]) == (network, level)
               for solve in each["solves"]]  # fmt: skip
        yield {
            "level": level, "operations": len(graph), "columns": len(program.cost), "rows": len(program.row_lower),
            **{f"logged_{key}": log[0][key] if log else None for key in SIZES},
        }  # fmt: skip


def ratios(kind: str, network: str) -> Iterator[Row]:
    """A row for each kind of operation and implementation: milliseconds beside those of the default, in sum."""
    graph = graph_of({"monet": network, "level": "icmn", "set": None})
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    once = {op.name.removesuffix(f":{STATISTICS}"): op.cost for op in graph.operations if STATISTICS in op.kind}
    cheaper_again = {op.kind for op in graph.operations if op.name in once}
    for op in graph.operations:
        pairs = [(each.name, each.cost, op.cost) for each in op.implementations if ALGORITHM not in each.name]
        if op.kind in cheaper_again:
            pairs.append(("again", op.cost, op.cost + once.get(op.name, 0)))
        for name, cost, default in pairs:
            own, of = sums.get((op.kind, name), (0, 0))
            sums[op.kind, name] = own + cost, of + default
    for (operation, name), (own, default) in sums.items():
        if default:
            yield {"operation": operation, "implementation": name, "ms": own / 1e6, "default_ms": default / 1e6}


@monet.draws
def page(rows: Sequence[Row]) -> Drawing:
    """Tables for the holes of the page, and both figures."""
    solves = ordered(rows)
    of_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("programs", "schedules", "ratios")}
    every = long_table("monet_solves", solves, SOLVES)
    theirs = long_table("monet_schedules", of_kind["schedules"], SCHEDULES)
    ours = [row for row in solves if row["strategy"] == OURS]
    shown = [row for row in ours if row["level"] not in (CHECKMATES, WITH_INDICES)]
    with_all = [row for row in shown if row["level"] == SHOWN]
    drawn = {
        name: draw(of_networks(own))
        for name, draw, own in (("monet_overhead", figures.monet_overhead, with_all),
                                ("monet_ablation", figures.monet_ablation, shown)) if own
    }  # fmt: skip
    limits = f"{values_of(solves, 'threads')} threads, {values_of(solves, 'time_limit_s')} s for each solve"
    holes = {
        "made": f"{made(solves)}; {limits}." if solves else "",
        "budgets": table_of(with_all, BUDGETS), "levels": table_by_heads(_levels(ours)),
        "repeats": table_of([row for row in ours if row["backward_repeats"]], REPEATS),
        "pooling": table_of(_with_indices(ours), POOLING),
        "schedules": table_by_heads(_reproduced(of_kind["schedules"])),
        "programs": table_by_heads(_programs(of_kind["programs"])),
        "ratios": table_by_heads(_ratios(of_kind["ratios"])),
        "solves": f"{links(PAGE, every, theirs)}.",
    }  # fmt: skip
    return Drawing("\n\n".join(filter(None, holes.values())), [every, theirs], drawn, holes=holes)


def ordered(rows: Sequence[Row]) -> list[Row]:
    """The last row of each problem and strategy, by network, level and budget, with percents and milliseconds."""
    last = {
        (row["network"], row["level"], row["budget_gib"], row["strategy"]): row
        for row in rows
        if row["kind"] == "solve"
    }
    networks = [*NETWORKS]
    return [_with_percents(last[key]) for key in sorted(
        last, key=lambda key: (networks.index(key[0]), LEVELS.index(key[1]), -key[2], key[3] != OURS, key[3])
    )]  # fmt: skip


def _with_percents(row: Row) -> Row:
    ms, bound = (None if row["cost"] is None or ns is None else ns / 1e6 for ns in (row["cost"], row["bound"]))
    return {
        **row, "ms": ms, "bound_ms": bound, "to_logged": above(ms, row["logged_ms"]),
        "above": above(ms, row["plain_ms"]), "logged_above": above(row["logged_ms"], row["plain_ms"]),
    }  # fmt: skip


def above(cost: float | None, other: float | None) -> float | None:
    """By how many percent a cost exceeds another one."""
    return None if cost is None or other is None else 100 * (cost / other - 1)


def of_networks(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """[name for people] its rows."""
    return {label: own for name, label in NETWORKS.items() if (own := [row for row in rows if row["network"] == name])}


def _columns(heads: str, *columns: Column) -> list[tuple[str, Column]]:
    return list(zip(heads.split(" | "), columns, strict=True))


def _found(row: Row) -> str:
    """Milliseconds of our plan, or why there is none."""
    return row["status"].lower().replace("_", " ") if row["ms"] is None else f"{row['ms']:.2f}"


PLACE = (lambda row: NETWORKS[row["network"]], "{level}", "{budget_gib:g}")
LOGGED = ("{logged_ms:.2f}", "{logged_bound_ms:.2f}", "{logged_s:,.0f}",
          lambda row: str(SHORT.get(row["logged_status"], row["logged_status"])))  # fmt: skip
SOLVED = (_found, "{to_logged:+.2f} %", "{bound_ms:.2f}", "{found_s:.1f}")
BUDGETS = _columns(
    "network | GiB | logged ms | bound | s | ended | modelled ms | to logged | bound | s | above plain, logged | "
    "above plain, ours | peak GiB | measured overhead | measured GiB",
    PLACE[0], PLACE[2], *LOGGED, *SOLVED, "{logged_above:+.2f} %", "{above:+.2f} %", "{peak_bytes:.2f/GiB}",
    "{measured_overhead_percent:.2f} %", "{measured_gib:.2f}",
)  # fmt: skip
POOLING = _columns(
    "network | GiB | logged ms | modelled ms, MONeT's set | with PyTorch's pooling | to MONeT's set | bound | peak GiB",
    PLACE[0], PLACE[2], "{theirs[logged_ms]:.2f}", lambda row: _found(row["theirs"]), _found, "{to_theirs:+.2f} %",
    "{bound_ms:.2f}", "{peak_bytes:.2f/GiB}",
)  # fmt: skip
REPEATS = _columns(
    "network | level | GiB | repeats | logged ms | modelled ms | without repeats",
    *PLACE, "{backward_repeats}", "{logged_ms:.2f}", "{ms:.2f}", "{once_ms:.2f}",
)  # fmt: skip
SOLVES = _columns(
    "network | level | GiB | strategy | limit s | logged ms | logged bound | logged s | logged status | ours ms | "
    "to logged | bound | s to the plan | status | peak GiB | plain ms | plain GiB | backward operations run again | "
    "columns of MONeT's program | load | date",
    *PLACE, "{strategy}", "{time_limit_s:g}", *LOGGED, *SOLVED, "{status}", "{peak_bytes:.2f/GiB}", "{plain_ms:.2f}",
    "{plain_bytes:.2f/GiB}", "{backward_repeats}", "{program_columns}", "{load:.1f}", "{date}",
)  # fmt: skip
SCHEDULES = _columns(
    "network | schedule | level | budget GiB | stored ms | ours ms | our peak GiB",
    PLACE[0], "{file}", "{level}", "{budget_bytes:g/GiB}", "{stored_ms:.2f}", "{ours_ms:.2f}", "{peak_bytes:.4f/GiB}",
)  # fmt: skip


def _with_indices(rows: Sequence[Row]) -> list[Row]:
    """The solves with PyTorch's pooling, with those of the same budget in MONeT's set."""
    in_set = {(row["network"], row["budget_gib"]): row for row in rows if row["level"] == SHOWN}
    pairs = [(row, in_set.get((row["network"], row["budget_gib"]))) for row in rows if row["level"] == WITH_INDICES]
    return [{**row, "theirs": theirs, "to_theirs": above(row["ms"], theirs["ms"])} for row, theirs in pairs if theirs]


def _levels(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """A line for each network and level: at or below the logged objective, the largest excess, seconds."""
    for label, mine in of_networks(rows).items():
        for level in LEVELS_PUBLISHED:
            own = [row for row in mine if row["level"] == level]
            known = [row["to_logged"] for row in own if row["to_logged"] is not None]
            times = [row["found_s"] for row in own if row["found_s"] is not None]
            logged = [row["logged_s"] for row in own if row["logged_ms"]]
            if own:
                yield {
                    "network": label, "level": level, "budgets": str(len(own)),
                    "at or below the log": f"{sum(x <= NEAR for x in known)} of {len(known)}" if known else "no log",
                    "least": f"{min(known):+.2f} %" if known else "", "most": f"{max(known):+.2f} %" if known else "",
                    "repeat backward operations": str(sum(row["backward_repeats"] > 0 for row in own)),
                    "s to our plan, at most": f"{max(times):.1f}" if times else "",
                    "logged s, at most": f"{max(logged):,.0f}" if logged else "",
                }  # fmt: skip


def _reproduced(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """A line for each network: schedules, how many cost what is stored, the largest difference, peak to budget."""
    for label, own in of_networks(rows).items():
        apart = [abs(row["stored_ms"] - row["ours_ms"]) for row in own if row["stored_ms"] is not None]
        within = sum(row["peak_bytes"] <= row["budget_bytes"] for row in own)
        yield {
            "network": label, "published schedules": str(len(own)),
            "equal to a hundredth of a ms": f"{sum(x < 0.005 for x in apart)} of {len(apart)}",
            "largest difference": f"{max(apart):.2f} ms", "peak within the budget": f"{within} of {len(own)}",
        }  # fmt: skip


def _programs(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """A line for each network, the smallest first: columns by rows of both programs, logged and ours."""
    for label, own in sorted(of_networks(rows).items(), key=lambda each: each[1][0]["operations"]):
        yield {"network": label, "operations": str(own[0]["operations"])} | {
            f"{of} program, {by}": " by ".join(f"{row[start + key]:,}" for key in SIZES) if row[start + "rows"] else ""
            for of, row in zip(("MONeT's", "Checkmate's"), own, strict=True)
            for by, start in (("logged", "logged_"), ("ours", ""))
        }


def _ratios(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """A line for each operation and implementation, a column for each network."""
    of = {(row["network"], row["operation"], row["implementation"]): row["ms"] / row["default_ms"] for row in rows}
    networks = {name: label for name, label in NETWORKS.items() if any(row["network"] == name for row in rows)}
    for operation, implementation in sorted({(row["operation"], row["implementation"]) for row in rows}):
        ratios = ((label, of.get((name, operation, implementation))) for name, label in networks.items())
        yield {"operation": operation.rpartition("::")[2], "implementation": implementation} | {
            label: "" if ratio is None else f"{ratio:.2f}" for label, ratio in ratios
        }
