"""The page's plots: plotly figures as plain dicts, and the plans in its chooser."""

import html
import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analysis.matrices import COLOURS, COMPUTED, MAX_OPERATIONS, NOTHING, RECOMPUTED, RESIDENT, cells
from analysis.memory import Timeline, time_axis, timeline
from analysis.network import bars_of
from analysis.overhead import STRIP
from analysis.overhead_data import Curve, OverheadData, bend, beyond, ticks
from analysis.results import WITH_PLAN, Run, ShownPlan, chosen_plan, page_plans, store_all
from analysis.scales import Scale, byte_scale, show_cost, show_mapping, show_percent
from analysis.style import BACKWARD, FORWARD, GREY, Style, style_of
from remat.graph import Graph
from remat.plan import OFFLOAD, PREFETCH
from remat.simulator import Trace
from remat.units import format_size

FONT = {"family": 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif', "size": 13, "color": "#1b1f24"}
GRID = {"gridcolor": "#e6e6e6", "zeroline": False, "linecolor": "#333333", "ticks": "outside"}
CELL_WORDS = {NOTHING: "not held", RESIDENT: "resident", COMPUTED: "first computed", RECOMPUTED: "recomputed"}
MOST_CELLS = 220
STRIP_SYMBOLS = {
    "OPTIMAL": "circle", "FEASIBLE": "circle-open", "NO_PLAN": "x-thin", "INFEASIBLE": "x", "TIMEOUT": "y-down",
    "SKIPPED": "line-ew", "FAILED": "square-x",
}  # fmt: skip


def overhead_figure(data: OverheadData, run: Run) -> dict[str, Any]:
    """The overhead plot with a status strip below; a click in the legend hides or shows a strategy."""
    figure = go.Figure()
    if data.bound is not None:
        at, over = data.bound
        figure.add_scatter(
            x=_list(at / data.scale.factor), y=_height(data, 100 * over), text=[show_percent(share) for share in over],
            mode="lines", name="proven lower bound", fill="tozeroy",
            line={"color": GREY, "dash": "dot", "width": 1, "shape": "vh"}, fillcolor="rgba(0,0,0,0.06)",
            hovertemplate="at least %{text}<extra>lower bound</extra>",
        )  # fmt: skip
    for curve in data.curves:
        if curve.steps is not None and curve.members is not None:
            _family(figure, data, curve)
        if len(curve.rows) or curve.steps is not None:
            _solves(figure, data, curve, run.cost_unit)
    _strip(figure, data)
    _marks(figure, data, run)
    _axes(figure, data)
    return figure.to_plotly_json()


def _height(data: OverheadData, percent: Any) -> list[float]:
    return _list(bend(percent) if data.is_bent else percent)


def _family(figure: go.Figure, data: OverheadData, curve: Curve) -> None:
    """The members of a family, and the best one at each budget."""
    assert curve.steps is not None
    assert curve.members is not None
    style, scale = curve.style, data.scale
    at, over = curve.steps
    at, over = np.append(at, max(at[-1], data.x_range[1])), np.append(over, over[-1])
    figure.add_scatter(
        x=_list(at / scale.factor), y=_height(data, 100 * over), mode="lines", line=_line(style) | {"shape": "hv"},
        legendgroup=curve.strategy, showlegend=False, hoverinfo="skip",
    )  # fmt: skip
    figure.add_scatter(
        x=_list(curve.members["peak_bytes"].astype(float) / scale.factor),
        y=_height(data, 100 * curve.members["overhead"].astype(float)),
        text=[
            f"{shown_as_it_is(show_mapping(m.parameters, ' = '))}<br>{show_percent(m.overhead)}"
            for m in curve.members.itertuples()
        ], mode="markers", legendgroup=curve.strategy,
        showlegend=False, marker={"color": style.colour, "size": 4, "opacity": 0.4, "symbol": style.symbol},
        hovertemplate=f"%{{text}}<br>peak %{{x:.3f}} {scale.unit}<extra>{style.label} member</extra>",
    )  # fmt: skip


def _solves(figure: go.Figure, data: OverheadData, curve: Curve, cost_unit: str) -> None:
    """The plan at each budget; a hollow mark is not proven optimal."""
    style, rows = curve.style, curve.rows
    figure.add_scatter(
        x=_list(rows["budget_bytes"].astype(float) / data.scale.factor) if len(rows) else [None],
        y=_height(data, 100 * rows["overhead"].astype(float)) if len(rows) else [None],
        text=[_hover(row, cost_unit) for row in rows.itertuples()],
        mode="markers" if curve.steps is not None else "lines+markers",
        name=style.label + beyond([data], style.label), legendgroup=curve.strategy,
        line=_line(style) | {"shape": "hv"},
        marker={
            "symbol": [style.symbol + ("" if s == "OPTIMAL" else "-open") for s in rows["status"]] or style.symbol,
            "size": 9, "color": style.colour, "line": {"width": 1.6, "color": style.colour},
        },
        hovertemplate=f"%{{text}}<extra>{style.label}</extra>",
    )  # fmt: skip


def _line(style: Style) -> dict[str, Any]:
    return {"color": style.colour, "width": 1.3 * style.width, "dash": style.dash}


def _axes(figure: go.Figure, data: OverheadData) -> None:
    n, scale = len(data.curves), data.scale
    tall = 470 + 22 * n
    split = (22 * n + 10) / (tall - 110)
    low, high = _height(data, [-3 * data.y_top if not data.is_bent else -0.06, 100 * data.y_top])
    y_axis: dict[str, Any] = {"title": {"text": "Compute overhead (%)"}, "range": [low, high]}
    if data.is_bent:
        y_axis["title"] = {"text": "Compute overhead (%, arcsinh scale)"}
        y_axis |= {"tickvals": _height(data, ticks(data)), "ticktext": [f"{t:g}" for t in ticks(data)]}
    x_axis = GRID | {
        "title": {"text": f"Memory budget ({scale.unit}, everything included)"},
        "range": [v / scale.factor for v in data.x_range], "anchor": "y2",
    }  # fmt: skip
    figure.update_layout(
        template="none", font=FONT, height=tall, margin={"l": 190, "r": 20, "t": 25, "b": 50}, hovermode="closest",
        xaxis=x_axis, legend={"y": 1, "tracegroupgap": 2},
        yaxis=GRID | y_axis | {"domain": [split + 0.03, 1]},
        yaxis2={"domain": [0, split], "range": [n - 0.5, -0.5], "showgrid": False, "zeroline": False,
                "tickvals": list(range(n)), "ticktext": [c.style.label for c in data.curves],
                "tickfont": {"size": 11}},
    )  # fmt: skip


def _strip(figure: go.Figure, data: OverheadData) -> None:
    """The status of every solve; one legend entry for each status without a plan."""
    in_legend: set[str] = set()
    for level, curve in enumerate(data.curves):
        for status, group in curve.all_rows.groupby("status", sort=True):
            status = str(status)
            lacks = status not in WITH_PLAN
            colour = "#b00020" if status == "FAILED" else GREY if lacks else curve.style.colour
            x = _list(group["budget_bytes"].astype(float) / data.scale.factor)
            figure.add_scatter(
                x=x, y=[level] * len(x), yaxis="y2", mode="markers", name=STRIP.get(status, status),
                legendgroup=status if lacks else curve.strategy, showlegend=lacks and status not in in_legend,
                marker={"symbol": STRIP_SYMBOLS.get(status, "diamond"), "size": 8, "color": colour,
                        "line": {"width": 1.5, "color": colour}},
                text=[f"<b>{status}</b> {'<br>'.join(textwrap.wrap(html.escape(str(m or '')), 70))}"
                      for m in group["message"]],
                hovertemplate=f"%{{x:.3f}} {data.scale.unit}: %{{text}}<extra>{curve.style.label}</extra>",
            )  # fmt: skip
            in_legend |= {status} if lacks else set()


def _marks(figure: go.Figure, data: OverheadData, run: Run) -> None:
    factor = data.scale.factor
    if data.impossible_bytes is not None:
        figure.add_shape(
            type="rect", xref="x", yref="paper", x0=data.x_range[0] / factor, x1=data.impossible_bytes / factor,
            y0=0, y1=1, fillcolor="rgba(0,0,0,0.08)", line={"width": 0}, layer="below",
        )  # fmt: skip
        figure.add_scatter(x=[None], y=[None], mode="markers", name="infeasible (proven)",
                           marker={"symbol": "square", "size": 11, "color": "rgba(0,0,0,0.12)"})  # fmt: skip
    if data.gpu_bytes is not None:
        x = data.gpu_bytes / factor
        figure.add_shape(type="line", xref="x", yref="paper", x0=x, x1=x, y0=0, y1=1,
                         line={"color": "#222222", "width": 1.2, "dash": "dash"})  # fmt: skip
        figure.add_annotation(x=x, xref="x", y=1, yref="paper", yanchor="bottom", showarrow=False,
                              text=f"{run.gpu_name} memory", font={"size": 11, "color": GREY})  # fmt: skip


def network_figure(graph: Graph) -> dict[str, Any]:
    """Cost above, bytes below, one bar per operation."""
    bars = bars_of(graph)
    figure = go.Figure()
    at = np.arange(len(graph))
    panels = (
        ("y", bars.cost / bars.cost_scale.factor, bars.cost_scale.unit, True),
        ("y2", bars.size / bars.byte_scale.factor, bars.byte_scale.unit, False),
    )
    for axis, height, unit, legend in panels:
        for mask, colour, name in ((~bars.backward, FORWARD, "forward"), (bars.backward, BACKWARD, "backward")):
            if mask.any():
                figure.add_bar(
                    x=_list(at[mask]), y=_list(height[mask]), yaxis=axis, name=name, legendgroup=name,
                    showlegend=legend, marker={"color": colour, "line": {"width": 0}},
                    text=[shown_as_it_is(f"{graph.operations[k].name} ({graph.operations[k].kind or 'operation'})")
                          for k in at[mask]],
                    textposition="none",
                    hovertemplate=f"%{{text}}<br>%{{y:.4g}} {shown_as_it_is(unit)}<extra>{name}</extra>",
                )  # fmt: skip
    few = len(graph) <= 80
    if few:
        names = {
            "tickvals": _list(at),
            "ticktext": [*map(shown_as_it_is, bars.names)],
            "tickangle": -90,
            "tickfont": {"size": 10},
        }
    else:
        names = {"title": {"text": "Operation, in graph order"}}
    figure.update_layout(
        template="none", font=FONT, height=520, margin={"l": 70, "r": 20, "t": 10, "b": 50},
        bargap=0.15 if few else 0, barmode="overlay", legend={"orientation": "h", "y": 1.07, "x": 0},
        xaxis=GRID | names | {"showgrid": False, "anchor": "y2", "automargin": True},
        yaxis=GRID | {"title": {"text": f"Cost ({shown_as_it_is(bars.cost_scale.unit)})"}, "domain": [0.53, 1]},
        yaxis2=GRID | {"title": {"text": f"Bytes produced ({bars.byte_scale.unit})"}, "domain": [0, 0.47]},
    )  # fmt: skip
    return figure.to_plotly_json()


def plan_payload(run: Run) -> dict[str, Any]:
    """The data of the plan chooser; ``plans`` is empty if no plan is stored."""
    shown = page_plans(run)
    graph = run.graph
    if graph is None or not shown:
        return {"plans": []}
    plain = store_all(graph, str(shown[0].row.accounting))
    base = timeline(graph, plain)
    scale = byte_scale(plain.peak_bytes)
    paper = chosen_plan(run)
    keys = [one.row.key for one in shown]
    longest = max([base.edges[-1], *(one.trace.end_cost[-1] if base.by_cost else 0 for one in shown)])
    time, label = time_axis(graph, longest, base.by_cost)
    return {
        "first": keys.index(paper.row.key) if paper is not None and paper.row.key in keys else 0,
        "names": [shown_as_it_is(op.name) for op in graph.operations],
        "byteUnit": scale.unit,
        "timeLabel": shown_as_it_is(label),
        "fixed": graph.fixed_bytes / scale.factor,
        "plain": _steps(base, time, scale),
        "cellColours": list(COLOURS),
        "cellWords": [CELL_WORDS[i] for i in range(4)],
        "plans": [_plan(graph, one, time, scale) for one in shown],
    }


def _plan(graph: Graph, one: ShownPlan, time: Scale, scale: Scale) -> dict[str, Any]:
    line = timeline(graph, one.trace)
    row, style = one.row, style_of(one.strategy)
    facts = (
        f"{row.status}, overhead {show_percent(row.overhead)}, cost {show_cost(row.cost, graph.cost_unit)}, "
        f"peak {format_size(one.trace.peak_bytes)}, operations computed again: {int(line.again.sum())}, "
        f"gap {show_percent(row.gap)}"
    )
    payload = _steps(line, time, scale) | {
        "title": one.title,
        "label": style.label,
        "colour": style.colour,
        "budget": int(row.budget_bytes) / scale.factor,
        "order": one.trace.order.tolist(),
        "again": np.nonzero(line.again)[0].tolist(),
        "backwardAt": None if line.backward_at is None else round(line.backward_at / time.factor, 6),
        "facts": facts,
        "copies": [_copies(graph, one.trace, kind, time) for kind in (OFFLOAD, PREFETCH)],
    }
    if len(graph) <= MAX_OPERATIONS:
        R, S, block = cells(graph, one.plan, MOST_CELLS)
        code = np.where(R > 0, R, np.where(0.5 / block <= S, RESIDENT, NOTHING))
        payload |= {"block": block, "cells": ["".join(map(str, line)) for line in code.tolist()]}
    return payload


def _copies(graph: Graph, trace: Trace, kind: int, time: Scale) -> dict[str, Any]:
    """Copies of a direction as a line with holes."""
    found = trace.copies_of(kind)
    edges = _list((found[:, 1:] / time.factor).ravel(), digits=7)
    names = [shown_as_it_is(graph.values[v].name) for v in found[:, 0].tolist()]
    return {"x": [x for a, b in zip(edges[::2], edges[1::2], strict=True) for x in (a, b, None)],
            "text": [text for name in names for text in (name, name, "")]}  # fmt: skip


def _steps(line: Timeline, time: Scale, scale: Scale) -> dict[str, Any]:
    return {
        "edges": _list(line.edges / time.factor, digits=7),
        "held": _list(line.held_bytes / scale.factor, digits=6),
    }


def _list(numbers: Any, digits: int = 8) -> list[float]:
    """Plain numbers, because plotly would encode arrays as base64, which nobody can read in the page."""
    return [float(f"{v:.{digits}g}") for v in np.asarray(numbers, dtype=float).tolist()]


def _hover(row: Any, cost_unit: str) -> str:
    gap = "" if row.status == "OPTIMAL" else f", gap {show_percent(row.gap)}"
    return (
        f"budget {format_size(int(row.budget_bytes))}<br>{row.status}{gap}<br>overhead {show_percent(row.overhead)}, "
        f"cost {shown_as_it_is(show_cost(row.cost, cost_unit))}<br>peak {format_size(int(row.peak_bytes))}"
    )


def shown_as_it_is(text: str) -> str:
    """Text from a file, escaped because plotly would read ``<b>`` as markup and ``%{x}`` as a field."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")
