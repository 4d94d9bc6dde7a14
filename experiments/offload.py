"""What copies to the host are worth beside recomputation, by the rate of the link, see docs/results/offload.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from analysis import figures
from analysis.charts import save_in_run
from analysis.style import style_of
from experiments.arguments import names_of
from experiments.documents import Drawing, markdown_table
from experiments.measure_solve import graph_of, share_of_peak, solve_case, where_made
from experiments.registry import Case, Row, experiment
from experiments.settings import RUNS_FOLDER
from remat.errors import InvalidInput

GIB = 2**30
# [network] its graph, and its budgets: GiB, or shares of the plain peak.
NETWORKS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "resnet50": ("p100/resnet50_b184.json", (5, 6, 8, 10)),
    "unet": ("p100/unet_b11.json", (5, 6, 8)),
    "vgg16": ("p100/vgg16_b176.json", (8, 10)),
    "llama_32": ("results/graphs/llama_32.json.gz", (0.7, 0.5, 0.3)),
}
JOINT = "portfolio"
RULES = ("offload_greedy", "offload_checkpoints", "capuchin", "torchtitan")


@experiment(page="results/offload.md", has_graphs=True)
def offload(
    networks: Sequence[str] = (), budgets: Sequence[float] = (), rates: Sequence[float] = (12.0, 25.0, 50.0, 200.0),
    time_limit: float = 60.0, threads: int = 2, seed: int = 0,
) -> Iterator[Case]:  # fmt: skip
    """Recompute, copy to the host, or both: overhead and bound by the link's rate (an hour and a half).

    ``rates=`` are in GB/s each way, ``budgets=`` in GiB, or shares of the plain peak below 1.
    """
    limits = {"time_limit_s": time_limit, "threads": threads, "seed": seed}
    for name in names_of("network", networks or NETWORKS, NETWORKS):
        source, usual = NETWORKS[name]
        try:
            graph = graph_of(source)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}") from None
        for budget in budgets or usual:
            budget_bytes = share_of_peak(graph, budget) if budget < 1 else int(budget * GIB)
            of = {**limits, "network": name, "budget": budget}
            yield solve_case(source, graph, JOINT, budget_bytes, **of, rate=0.0)
            for rate in rates:
                for strategy in (*RULES, JOINT):
                    link = {"link": f"{rate:g}GB/s"}
                    yield solve_case(source, graph, strategy, budget_bytes, options=link, **of, rate=rate)


@offload.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each budget and rate, and the figure."""
    found = {(row["network"], row["budget"], row["rate"], row["strategy"]): row for row in rows}
    rules = [style_of(rule).label for rule in RULES]
    heads = ["network", "budget", "GB/s", *rules, "recompute only", "both", "bound", "gap"]
    lines = []
    both_of = [key[:3] for key in found if key[3] == JOINT and key[2]]
    networks = [*NETWORKS]
    for network, budget, rate in sorted(both_of, key=lambda key: (networks.index(key[0]), -key[1], key[2])):
        both = found[network, budget, rate, JOINT]
        others = [found.get((network, budget, rate, rule)) for rule in RULES]
        others.append(found.get((network, budget, 0.0, JOINT)))
        bound = None if both["bound"] is None else both["bound"] / both["total_cost"] - 1
        gap = None if both["cost"] is None or bound is None else both["gap"]
        lines.append([
            network, f"{budget:.0%}" if budget < 1 else f"{budget:g} GiB", f"{rate:g}",
            *(_percent(None if row is None else row["overhead"]) for row in (*others, both)), _percent(bound),
            _percent(gap),
        ])  # fmt: skip
    drawn = save_in_run(RUNS_FOLDER / "offload", "offload", figures.offload, rows)
    table = markdown_table(heads, lines, "lr" + "r" * (len(heads) - 2))
    return Drawing(f"{where_made(rows)}.\n\n{table}", figures={"offload": drawn[0]})


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"
