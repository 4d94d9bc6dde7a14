"""Every figure and table of Checkmate (Jain et al., MLSys 2020), and its worked example, beside the published numbers.

Each part is a case that sends its solves to the engine, and yields a document, JSON-ready, and the solves. The function
of the part's name in `analysis.paper` draws the document.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import remat
from analysis.batches import draw, rows_of, summary
from analysis.paper import REPORTS
from analysis.parts import DOCUMENT, SOLVE, Study, prose
from analysis.published import PUBLISHED
from experiments.arguments import names_of
from experiments.build import extracted
from experiments.config import group_options, read_conf
from experiments.documents import Drawing, LongTable, links, long_table, markdown_table
from experiments.paper import rounding, sizes, stages, sweeps
from experiments.paper.graphs import NETWORKS, Context, Scale, extract_all, instances_folder, network
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER, Settings, configured_model
from experiments.solving import Solves, contradictions
from experiments.store import Table, code_of
from remat.cost import apply_cost
from remat.errors import InvalidInput, RematError
from remat.frontends.spec import ModelSpec
from remat.registry import get_strategy

PAGE = "results/checkmate.md"
PARTS: dict[str, Callable[[Context], dict[str, Any]]] = {
    "fig5": sweeps.fig5, "fig6": sizes.fig6, "throughput": sizes.larger, "rounding": rounding.run,
    "solver_time": sweeps.solver_time, "memory": sizes.memory, "cost_models": sweeps.cost_models,
}  # fmt: skip
STAGES = "stages"
PER_SAMPLE = ("fig6", "throughput", "memory", "cost_models")  # these parts need graphs of one and two samples


@experiment(page=PAGE, has_graphs=True)
def paper(
    settings: Settings, scale: str = "full", points: int = 32, time_limit: float = 3600.0,
    networks: list[str] | None = None, parts: list[str] | None = None,
) -> Iterator[Case]:  # fmt: skip
    """Checkmate (Jain et al., MLSys 2020): every figure and table beside the published ones; scale=quick: 20 minutes.

    ``parts=`` are of fig5, fig6, throughput, stages, rounding, solver_time, memory, cost_models. Table 2 and the claims
    are drawn from fig5 and fig6.
    """
    names = names_of("network", NETWORKS if networks is None else networks, group_options("model"))
    for name in names:
        spec = configured_model(network(name).name)
        if spec.framework != "synthetic" and (spec.framework, spec.granularity) != ("keras", "layer"):
            raise InvalidInput(f"networks: '{name}' is not built by Keras layers; the paper's parts need that")
    given, most = {"points": points, "time_limit_s": time_limit, "rounding_s": time_limit}, read_conf("paper")[scale]
    amount = Scale(**most | {key: min(value, most.get(key, value)) for key, value in given.items()})
    settings = replace(settings, points=amount.points, time_limit_s=amount.time_limit_s)
    what = {"networks": names, "scale": scale, "amount": asdict(amount), "settings": settings.determining(),
            "has_published": instances_folder(settings) is not None}  # fmt: skip
    known = [*PARTS, STAGES]
    asked = names_of("part", known if parts is None else parts, known)
    for part in [each for each in known if each in asked]:
        if part == STAGES:
            yield from stages.cases(amount.unpartitioned_s)
        else:
            yield Case(measure, {"part": part, **what}, code_of(*settings.strategies), name=part, solves=settings)


def measure(run: Solves, part: str, networks: Sequence[str], amount: dict[str, Any], **_: Any) -> Iterator[Row]:
    """The row of a part's document, then a row for each solve that it used and that no part before it used.

    Raises:
        RematError: a plan refutes a claim.
    """
    context = Context(run, Scale(**amount), tuple(map(network, networks)))
    extract_all(context, per_sample=part in PER_SAMPLE)
    before = set(run.store.used)
    document = PARTS[part](context)
    refuted = list(document.get("contradicted", []))
    for graph_run in context.graph_runs:
        if graph_run.cost_cap is None:  # solves with a cap end early, so that their rows cannot be compared
            refuted += contradictions(list(graph_run.kept.values()))
    if refuted:
        raise RematError("; ".join(["contradicted", *dict.fromkeys(refuted)]))
    yield {"kind": DOCUMENT, "document": document, "cores": os.cpu_count()}
    store = run.store
    for key in sorted(store.used - before):
        row = store.read_row(key)
        if row is not None:
            plan = None if row.plan_file is None else (store.folder / row.plan_file).read_text()
            yield {"kind": SOLVE, **asdict(row), "plan": plan}


def study_of(rows: Sequence[Row]) -> Study:
    """The study of the experiment's rows."""
    heads = {row["part"]: row for row in rows if row["kind"] == DOCUMENT}
    if STAGES in heads:
        heads[STAGES] = {**heads[STAGES], "document": stages.merged(row for row in rows if row["part"] == STAGES)}
    return Study(heads, {row["key"]: row for row in rows if row["kind"] == SOLVE}, RUNS_FOLDER / "paper")


def stored_study() -> Study:
    """The study of the rows in the repository, and of those of runs here."""
    return study_of(Table("paper").rows())


@paper.draws
def page(rows: Sequence[Row]) -> Drawing:
    """The page of Checkmate: below the lead each part, folded."""
    study = study_of(rows)
    known = {name: of for name, of in REPORTS.items() if of[0] in study.heads}
    parts = {name: report(study.document(source), study) for name, (source, report) in known.items()}
    head = next(iter(study.heads.values()))
    lead = "" if head["part"] == STAGES else prose("lead", **{**head, **head["settings"], **head["amount"]})[0]
    texts, tables = [f"{lead} {made(study)}"], list[LongTable]()
    for part in parts.values():
        own = [LongTable(f"paper_{name}", heads, lines) for name, heads, lines in part.tables]
        tables += own
        lines = [f'<details markdown="1"><summary>{part.title}</summary>', part.text]
        lines += [f"![{caption}](../figures/paper_{file}.png)" for file, caption, _ in part.figures]
        if own:
            lines.append(f"Tables: {links(PAGE, *own)}.")
        texts.append("\n\n".join([*lines, "</details>"]))
    figures = {f"paper_{file}": figure for part in parts.values() for file, _, figure in part.figures}
    return Drawing("\n\n".join(texts), tables, figures)


def made(study: Study, part: str = "") -> str:
    """Dates of a study's parts, or of one, number of their solves, and the sum of their minutes.

    A strategy that ignores the budget is not solved for each.
    """
    dates = sorted({row["date"] for name, row in study.heads.items() if part in ("", name)})
    seconds = [row["wall_s"] for row in study.solves.values()
               if part in ("", row["part"]) and not get_strategy(row["strategy"]).ignores_budget]  # fmt: skip
    return f"{', '.join(dates)}; {len(seconds):,} solves, which take {sum(seconds) / 60:.0f} minutes one after another."


@experiment(page="results/largest-batch.md", measures=False)
def largest_batch() -> Drawing:
    """Page: the largest batch of every strategy on Checkmate's networks, of the study."""
    study = stored_study()
    limit_s = sizes.SHARE * study.heads["fig6"]["amount"]["time_limit_s"]
    documents = study.document("fig6")["documents"]
    every = long_table("largest_batch", rows_of(documents))
    text = "\n\n".join([
        f"At most {limit_s:g} s for each solve; {made(study, 'fig6')}", markdown_table(*summary(documents)),
        f"Table: {links('results/largest-batch.md', every)}.",
    ])  # fmt: skip
    return Drawing(text, [every], {"max_batch_size": draw(documents)})


# The worked example: VGG19, layer granularity, FLOP costs.
ACCOUNTINGS = ("published", "exact")
OPTIMUM_BYTES = 51_380_224  # activations of the published optimum: VGG19's largest working set


@experiment(page=PAGE, measures=False)
def published_numbers() -> Drawing:
    """Page: the worked example of Checkmate's artifact, published and ours, and the paper's Table 1."""
    spec = ModelSpec("vgg19", "keras", "keras.applications:VGG19", 1, (224, 224, 3), "layer", accounting="published")
    graph, rows = apply_cost(extracted(spec, None), "flops", None), list[list[str]]()
    for known in PUBLISHED["checkmate"]["notebook"]:
        strategy, cells = known["strategy"], [known["what"], f"{known['gflop']:.3f} / {known['megabytes']:.2f}"]
        for accounting in ACCOUNTINGS:
            if not get_strategy(strategy).ignores_budget:  # the MILP frees at last use under either accounting
                budget = OPTIMUM_BYTES + graph.fixed_bytes
                solution = remat.solve(graph, budget, strategy, time_limit_s=120, accounting=accounting)
                if solution.cost is None or solution.peak_bytes is None:
                    raise RematError(f"no optimum for the notebook's case: {solution.message}")
                cost, peak = solution.cost, solution.peak_bytes
            else:
                members = remat.family(graph, strategy, accounting=accounting)
                member = next(m for m in members if known.get("slots") in (None, m.parameters.get("slots")))
                cost, peak = member.cost, member.peak_bytes
            cells.append(f"{cost / 1e9:.3f} / {(peak - graph.fixed_bytes) / 1e6:.2f}")
        rows.append(cells)
    notebook = markdown_table(
        ["GFLOP / activation MB", "published", "ours, published accounting", "ours, exact accounting"], rows
    )
    rows = [[f"`{name}`", *cells] for name, cells in PUBLISHED["checkmate"]["table_1"].items()]
    abilities = markdown_table(["Table 1 [mem]", "general graphs", "cost-aware", "memory-aware"], rows, "llll")
    return Drawing(f"{notebook}\n\n{abilities}")
