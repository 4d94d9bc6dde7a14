"""Draws the table, the figures and the self-contained HTML page of one run; all text from results is escaped."""

import json
import shlex
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis import html_page, interactive, matrices, memory, network, overhead, scales
from analysis.charts import save, style_context
from analysis.html_page import Html
from analysis.overhead_data import overhead_data
from analysis.results import WITH_PLAN, Run, chosen_plan, distinct, load_run, store_all
from analysis.style import order_of, style_of
from analysis.table import pick, write_csv
from remat.files import write_text
from remat.incumbent import GAP_TOLERANCE
from remat.units import format_size

FIGURES = ("overhead", "memory", "matrices", "network")
COMMAND_KEYS = (  # the keys of the configuration that a command gives
    "graph", "model", "gpu", "cost", "experiment", "budget", "strategies", "points", "time_limit", "seed", "threads",
    "scope", "accounting", "batch_size", "granularity", "input_size", "target", "dtype", "device", "work_limit",
    "deterministic", "solver", "formulation", "target_gap",
)  # fmt: skip
USUAL = {"deterministic": False, "target_gap": GAP_TOLERANCE}  # values that a command leaves out


def draw_run(folder: Path) -> list[Path]:
    """See `analysis.draw_run`."""
    run = load_run(folder)
    written = [write_csv(run, folder / "table.csv")]
    target = folder / "figures"
    drawn = set()
    with style_context():
        for name, figure in figures(run):
            written += save(figure, target / name)
            drawn.add(name)
    for name in set(FIGURES) - drawn:  # an earlier call drew it, but these results do not support it
        for ending in (".png", ".pdf"):
            (target / name).with_suffix(ending).unlink(missing_ok=True)
    write_text(folder / "page.html", page(run))
    return [*written, folder / "page.html"]


def figures(run: Run) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every figure that the run's results support."""
    data = overhead_data(run)
    if data is not None:
        yield "overhead", overhead.draw(data, run)
    if run.graph is None:
        return
    shown = chosen_plan(run)
    if shown is not None:
        yield "memory", memory.draw(run.graph, shown, store_all(run.graph, str(shown.row.accounting)))
        if len(run.graph) <= matrices.MAX_OPERATIONS:
            yield "matrices", matrices.draw(run.graph, shown)
    yield "network", network.draw(run.graph)


def page(run: Run) -> str:
    """The page as HTML, with plotly's script (4.8 MB) and the data as JSON inside; ``run.html`` has its sections."""
    from plotly.offline import get_plotlyjs

    data, payload, plots = overhead_data(run), interactive.plan_payload(run), dict[str, Any]()
    values = header(run) | provenance(run) | {"folder": shlex.quote(f"runs/{run.folder.name}")}
    if len(run.rows):
        values |= {"summary": summary_table(run), **results_table(run), "failures": failures(run)}
    if data is not None:
        plots["overhead"] = interactive.overhead_figure(data, run)
        beyond = ", ".join(f"{label} up to {100 * v:,.0f} %" for label, v in data.above.items())
        values["above"] = f" Above the axis: {beyond} (double-click the plot to see all)." if beyond else ""
    if plans := payload["plans"]:
        values |= {"plans": _options(enumerate(plan["title"] for plan in plans), payload["first"]), "planned": ""}
        if "cells" in plans[0]:
            block = plans[0]["block"]
            values["cell"] = f" One cell stands for {block} x {block}." if block > 1 else ""
    if run.graph is not None:
        plots["network"] = interactive.network_figure(run.graph)
        values["network"] = ""
    shared = {"figures": plots, "font": interactive.FONT, "grid": interactive.GRID} | payload
    scripts = get_plotlyjs(), html_page.read("page.js")
    return html_page.page(run.title, html_page.filled("run.html", values), shared, scripts)


def header(run: Run) -> dict[str, str]:
    """Title, facts about the run, and what to warn of."""
    rows, graph, facts = run.rows, run.graph, list[str]()
    if graph is not None:
        facts.append(f"{graph.name}: {len(graph)} operations, {graph.n_edges} edges")
        facts += [f"{format_size(graph.fixed_bytes)} fixed"] if graph.fixed_bytes else []
    if len(rows):
        first = rows.iloc[0]
        facts.append(f"checkpoint-all peak {format_size(int(first['store_all_peak_bytes']))}")
        facts.append(f"one pass costs {scales.show_cost(run.total_cost, run.cost_unit)} ({first['cost_source']})")
        if isinstance(first.get("dtype"), str):  # rows of earlier versions have none
            facts.append(first["dtype"])
        facts.append(f"scope {first['scope']}, {first['accounting']} accounting")
    if run.gpu_memory_bytes:
        facts.append(f"GPU {run.gpu_name} with {format_size(run.gpu_memory_bytes)}")
    n_plans, n_proven = int(rows["status"].isin(WITH_PLAN).sum()), int((rows["status"] == "OPTIMAL").sum())
    counts = (
        f"{scales.show_count(len(rows), 'solve')} of {scales.show_count(rows['strategy'].nunique(), 'strategy')} at "
        f"{scales.show_count(rows['budget_bytes'].nunique(), 'budget')}: {scales.show_count(n_plans, 'plan')}, "
        f"{n_proven} of them"
    )
    values = {"title": run.title, "counts": counts} | ({"facts": "; ".join(facts)} if facts else {})
    if not n_plans:
        values["planless" if len(rows) else "unsolved"] = ""
    if run.missing:
        values["missing"] = f"{len(run.missing)} of {len(rows) + len(run.missing)}"
    return values


def summary_table(run: Run) -> Html:
    """One row per strategy: overhead at the budgets of the terminal's table, plans, proofs, smallest budget, time."""
    rows = run.rows
    budgets = sorted({int(b) for b in rows["budget_bytes"]})
    scale, columns = scales.budget_scale(budgets), pick(budgets)
    heads = ["Strategy", *(f"{scales.show_bytes(budget, scale)} {scale.unit}" for budget in columns)]
    heads += ["Plans", "Proven", f"Smallest budget met ({scale.unit})", "Slowest solve"]
    body = []
    for strategy in run.strategies:
        solves = rows[rows["strategy"] == strategy]
        planned = solves[solves["status"].isin(WITH_PLAN)]
        at = {int(row.budget_bytes): row for row in solves.itertuples()}
        body.append([
            _name(strategy), *(_overhead(at.get(budget)) for budget in columns), f"{len(planned)} of {len(solves)}",
            str(int((solves["status"] == "OPTIMAL").sum())),
            scales.show_bytes(planned["budget_bytes"].min() if len(planned) else None, scale),
            scales.show_seconds(solves["wall_s"].max()),
        ])  # fmt: skip
    return html_page.table(heads, body, [head != "Strategy" for head in heads])


def _overhead(row: Any) -> str:
    if row is None:
        return "–"
    if row.status not in WITH_PLAN:
        return str(row.status).lower().replace("_", " ")
    return scales.show_percent(row.overhead) + (" ✓" if row.status == "OPTIMAL" else "")


def results_table(run: Run) -> dict[str, str]:
    """Every row, with the headings, whose click sorts, and the choices of the filters (page.js)."""
    rows = run.rows.assign(_order=run.rows["strategy"].map(order_of))
    rows = rows.sort_values(["_order", "budget_bytes", "key"], kind="stable")
    scale = scales.budget_scale(rows["budget_bytes"])
    cost = scales.cost_scale(float(rows["cost"].max()), run.cost_unit) if rows["cost"].notna().any() else None
    per = f" ({cost.unit})" if cost else ""
    heads = [
        ("Strategy", ""), (f"Budget ({scale.unit})", "n"), ("Status", ""), ("Overhead", "n"), (f"Cost{per}", "n"),
        (f"Bound{per}", "n"), ("Gap", "n"), (f"Peak ({scale.unit})", "n"), ("Wall", "n"), ("Message", ""),
    ]  # fmt: skip

    def costs(number: Any) -> str:
        return "–" if cost is None else scales.show_bytes(number, cost)

    body = []
    for row in rows.itertuples():
        cells = [
            _td(_name(row.strategy), value=style_of(row.strategy).label),
            _td(scales.show_bytes(row.budget_bytes, scale), "n", row.budget_bytes),
            _td(_status(str(row.status))),
            _td(scales.show_percent(row.overhead), "n", row.overhead), _td(costs(row.cost), "n", row.cost),
            _td(costs(row.bound), "n", row.bound), _td(scales.show_percent(row.gap), "n", row.gap),
            _td(scales.show_bytes(row.peak_bytes, scale), "n", row.peak_bytes),
            _td(scales.show_seconds(row.wall_s), "n", row.wall_s),
        ]  # fmt: skip
        reused = (
            "" if pd.isna(row.plan_from) else f"plan found at {scales.show_bytes(row.plan_from, scale)} {scale.unit}"
        )
        cells.append(_td("; ".join(filter(None, (reused, _text(row.message)))), "why"))
        strategy, status = escape(str(row.strategy)), escape(str(row.status))
        body.append(f'<tr data-strategy="{strategy}" data-status="{status}">{"".join(cells)}</tr>')
    head = "".join(
        f'<th class="{kind}" aria-sort="none"><button type="button">{escape(text)}</button></th>'
        for text, kind in heads
    )
    names = sorted(rows["strategy"].unique(), key=order_of)
    return {
        "heads": Html(head), "results": Html("".join(body)),
        "strategies": _options((name, style_of(name).label) for name in names),
        "statuses": _options((status, status) for status in sorted(rows["status"].unique())),
    }  # fmt: skip


def failures(run: Run) -> Html:
    """Every solve without a plan; equal reasons of a strategy share a row."""
    rows = run.rows[~run.rows["status"].isin(WITH_PLAN)]
    if not len(rows):
        return Html("<p>Every solve has a plan.</p>")
    scale = scales.byte_scale(float(rows["budget_bytes"].max()))
    grouped: dict[tuple[str, str, str], list[int]] = {}
    for row in rows.sort_values("budget_bytes", kind="stable").itertuples():
        grouped.setdefault((row.strategy, str(row.status), _text(row.message)), []).append(int(row.budget_bytes))
    body = []
    ordered = sorted(grouped.items(), key=lambda item: (order_of(item[0][0]), item[1]))
    for (strategy, status, message), budgets in ordered:
        span = scales.show_bytes(budgets[0], scale)
        if len(budgets) > 1:
            span += f" to {scales.show_bytes(budgets[-1], scale)} ({len(budgets)} budgets)"
        body.append([_name(strategy), _status(status), span, message or "no reason was recorded"])
    return html_page.table(
        ["Strategy", "Status", f"Budget ({scale.unit})", "Reason"], body, [False] * 4, name="failures"
    )


def _status(status: str) -> Html:
    return Html(f'<span class="s s-{escape(status)}">{escape(status)}</span>')


def _name(strategy: str) -> Html:
    style = style_of(strategy)
    swatch = f'<span class="swatch" style="background:{style.colour}"></span>'
    return Html(f'<span class="name" title="{escape(strategy)}">{swatch}{escape(style.label)}</span>')


def _text(message: Any) -> str:
    return "" if message is None or pd.isna(message) else str(message)


def _td(text: str, kind: str = "", value: Any = ...) -> str:
    attributes = f' class="{kind}"' if kind else ""
    if value is not ...:
        attributes += f' data-v="{"" if pd.isna(value) else escape(str(value))}"'
    return f"<td{attributes}>{html_page.escaped(text)}</td>"


def _options(pairs: Iterable[tuple[object, str]], selected: object = None) -> Html:
    """The options of a choice, from (value, text) of each."""
    return Html("".join(
        f'<option value="{escape(str(value))}"{" selected" * (value == selected)}>{escape(text)}</option>'
        for value, text in pairs
    ))  # fmt: skip


def command_of(info: dict[str, Any]) -> str:
    """The command that repeats a run, made from its configuration."""
    words = ["python", "run.py"]
    config = info.get("config") or {}
    for key in COMMAND_KEYS:
        value = config.get(key)
        if key == "model" and config.get("graph"):
            continue
        if isinstance(value, dict):
            value = value.get("name")
        if isinstance(value, list):
            value = f"[{','.join(map(str, value))}]" if value else None
        if value not in (None, "") and value != USUAL.get(key):
            words.append(f"{key}={value}")
    for strategy, options in (config.get("options") or {}).items():
        words += [f"options.{strategy}.{name}={value}" for name, value in options.items()]
    return shlex.join(words)


def provenance(run: Run) -> dict[str, str]:
    """Where the numbers come from: code, versions, machine, cost model, GPU figures; and how to repeat them."""
    rows = run.rows
    facts: list[tuple[str, str]] = []
    if run.graph is not None:
        facts += [("Graph", run.graph.name), ("Graph SHA-256", run.graph.sha256()), ("Graph source", run.graph.source)]

    def column(name: str) -> str:
        return ", ".join(distinct(rows, name))

    dirty = "git_dirty" in rows and rows["git_dirty"].fillna(False).astype(bool).any()
    facts.append(("Code", column("git_commit") + (" with uncommitted changes" if dirty else "")))
    facts += [("Versions", scales.show_mapping(versions, " ")) for versions in distinct(rows, "versions")]
    seconds = sorted(set(rows["time_limit_s"].dropna())) if "time_limit_s" in rows else ()
    limits = ", ".join(f"{limit:g} s" for limit in seconds)
    costs = f"{column('cost_model')} ({column('cost_source')}), unit {run.cost_unit}" if len(rows) else ""
    facts += [
        ("CPU", column("cpu")), ("Costs", costs),
        ("Solver builds", column("solver_build")), ("Time limit per solve", limits),
        ("Seeds", column("seed")), ("Threads", column("threads")),
        ("Last result", column("finished_at").split(", ")[-1]),
    ]  # fmt: skip
    for key, value in (run.info.get("gpu") or {}).items():
        if key == "memory_bytes" and isinstance(value, int):
            value = format_size(value)
        facts.append(
            (f"GPU {str(key).replace('_', ' ')}", json.dumps(value) if isinstance(value, dict) else str(value))
        )
    config = json.dumps(run.info.get("config") or {}, indent=2, sort_keys=True, default=str)
    return {"provenance": html_page.facts(facts), "config": config, "command": command_of(run.info)}
