"""The page of an explanation: HTML that needs nothing else, with who holds what over the step."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from remat.graph import Graph
from remat.plan import OFFLOAD, PREFETCH, Plan
from remat.search.timeline import replayed
from remat.simulator import simulate
from remat.torch.planning.replay import group_of
from remat.units import format_size

COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#ee8866", "#bbbbbb")  # Paul Tol's
FIXED_COLOUR, WIDTH, HEIGHT, MARGIN = "#dddddd", 960, 320, 80
OTHERS = "(others)"
STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:64em;margin:2em auto;padding:0 1em;color:#222}pre{background:#f5f5f5;"
    "padding:1em;white-space:pre-wrap}svg{width:100%;height:auto}text{font:12px sans-serif}.key{display:inline-block;"
    "width:.9em;height:.9em;margin-right:.4em}.name{display:inline-block;margin-right:1em}"
)


def page_of(
    title: str, text: str, graph: Graph, modules: Sequence[str], plans: Mapping[str, Plan], budget_bytes: int
) -> str:
    """The page.

    Args:
        modules: [V] what each value belongs to.
        plans: [heading] to draw.
    """
    title, groups = html.escape(title), _groups(graph, modules)
    held = {heading: held_by_module(graph, modules, plan, groups) for heading, plan in plans.items()}
    peak = max(int(rows.sum(0).max()) for rows in held.values())
    top = max(peak, budget_bytes) if budget_bytes <= 1.5 * peak else peak
    figures = "".join(
        f"<h2>{heading}</h2>{_figure(rows, top, budget_bytes, heading)}{_copies(graph, plans[heading])}"
        for heading, rows in held.items()
    )
    legend = " ".join(
        f'<span class="name"><span class="key" style="background:{colour}"></span>{html.escape(name)}</span>'
        for name, colour in zip(("always there", *groups), (FIXED_COLOUR, *COLOURS), strict=False)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><pre>{html.escape(text)}</pre><p>Bytes held while each operation runs, by the module that "
        f"made them; * stands for any number. Workspaces are black, on top.</p><p>{legend}</p>{figures}</html>\n"
    )


def _groups(graph: Graph, modules: Sequence[str]) -> list[str]:
    """Groups of modules that make most bytes, then the rest."""
    sizes = Counter[str]()
    for value, module in zip(graph.values, modules, strict=True):
        sizes[group_of(module)] += value.bytes
    return [*(name for name, _ in sizes.most_common(len(COLOURS) - 1)), OTHERS]


def held_by_module(graph: Graph, modules: Sequence[str], plan: Plan, groups: Sequence[str]) -> np.ndarray:
    """[always there, each group, workspace][computations] bytes."""
    row = {name: i + 1 for i, name in enumerate(groups)}
    row_of = [row.get(group_of(module), row[OTHERS]) for module in modules]
    now = np.zeros(len(groups) + 2, dtype=np.int64)
    now[0] = graph.fixed_bytes
    columns = list[np.ndarray]()
    for k, new, others in replayed(graph, plan):
        for v in new:
            now[row_of[v]] += graph.values[v].bytes
        if k < 0:
            for v in others:
                now[row_of[v]] -= graph.values[v].bytes
            continue
        column = now.copy()
        for v in others:
            column[row_of[v]] += graph.values[v].bytes
        column[-1] = graph.operations[k].workspace_bytes
        columns.append(column)
    return np.array(columns).T


def _figure(rows: np.ndarray, top: int, budget_bytes: int, heading: str) -> str:
    """Stacked areas, and the budget as a line."""
    n = rows.shape[1]
    step = max(1, n // WIDTH)
    maxima = [rows[:, i : i + step][:, int(rows[:, i : i + step].sum(0).argmax())] for i in range(0, n, step)]
    heights = np.cumsum(np.array(maxima).T, axis=0) * (HEIGHT / top)
    x = MARGIN + np.arange(heights.shape[1]) * (WIDTH / heights.shape[1])
    below, areas = np.zeros(heights.shape[1]), []
    for height, colour in zip(heights, (FIXED_COLOUR, *COLOURS[: len(heights) - 2], "#000000"), strict=True):
        there = [*zip(x, HEIGHT - height, strict=True)]
        back = [*zip(x, HEIGHT - below, strict=True)][::-1]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in (*there, *back))
        areas.append(f'<polygon points="{points}" fill="{colour}"/>')
        below = height
    line = ""
    if budget_bytes <= top:
        y = HEIGHT - budget_bytes / top * HEIGHT
        line = (
            f'<line x1="{MARGIN}" x2="{MARGIN + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#222" stroke-dasharray="4"/>'
            f'<text x="{MARGIN + WIDTH}" y="{y - 4:.1f}" text-anchor="end">budget {format_size(budget_bytes)}</text>'
        )
    marks = "".join(
        f'<line x1="{MARGIN - 4}" x2="{MARGIN}" y1="{HEIGHT * (1 - share)}" y2="{HEIGHT * (1 - share)}" stroke="#222"/>'
        f'<text x="{MARGIN - 8}" y="{HEIGHT * (1 - share) + 4}" text-anchor="end">'
        f"{format_size(round(top * share)).partition(' (')[0]}</text>"
        for share in (0.25, 0.5, 0.75, 1.0)
    )
    return (
        f'<svg viewBox="0 -14 {MARGIN + WIDTH + 10} {HEIGHT + 44}" role="img" aria-label="{heading}">{"".join(areas)}'
        f'{line}{marks}<text x="{MARGIN}" y="{HEIGHT + 20}">first operation</text><text x="{MARGIN + WIDTH}" '
        f'y="{HEIGHT + 20}" text-anchor="end">last operation</text></svg>'
    )


def _copies(graph: Graph, plan: Plan) -> str:
    """A lane for each direction: where the link is busy, on the axis of the computations that run meanwhile."""
    if not plan.has_copies:
        return ""
    trace = simulate(graph, plan)
    place = WIDTH / len(trace.order)
    lanes = []
    for lane, (kind, says) in enumerate(((OFFLOAD, "to the host"), (PREFETCH, "from it"))):
        times = trace.copies_of(kind)[:, 1:]
        x = MARGIN + place * np.interp(times, np.r_[0, trace.end_cost], np.arange(len(trace.order) + 1))
        bars = "".join(
            f'<rect x="{a:.1f}" y="{20 * lane}" width="{max(0.5, b - a):.1f}" height="14"/>' for a, b in x.tolist()
        )
        lanes.append(
            f'<text x="{MARGIN - 8}" y="{20 * lane + 11}" text-anchor="end">{says}</text><g fill="{COLOURS[lane]}">'
            f"{bars}</g>"
        )
    most = format_size(trace.host_peak_bytes)
    return (
        f'<svg viewBox="0 -4 {MARGIN + WIDTH + 10} 64" role="img" aria-label="copies">{"".join(lanes)}<text '
        f'x="{MARGIN}" y="54">{len(trace.copies)} copies; at most {most} on the host</text></svg>'
    )
