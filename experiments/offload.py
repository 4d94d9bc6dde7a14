"""What copies to the host are worth beside recomputation, by the rate of the link, see docs/results/offload.md."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis import figures
from analysis.style import style_of
from experiments.arguments import names_of
from experiments.documents import Drawing, made, table_of
from experiments.measure_solve import graph_of, share_of_peak, solve_case
from experiments.registry import Case, Row, experiment
from remat.errors import InvalidInput

GIB = 2**30
# [network] its graph, and its budgets: GiB, or shares of the plain peak.
NETWORKS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "resnet50": ("p100/resnet50_b184.json", (5, 6, 8, 10)),
    "unet": ("p100/unet_b11.json", (5, 6, 8)),
    "vgg16": ("p100/vgg16_b176.json", (8, 10)),
    "llama_32": ("results/graphs/llama_32.json.gz", (0.7, 0.5, 0.3)),
    "llama_80": ("results/graphs/llama_80.json.gz", (0.5,)),
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
    networks, lines = [*NETWORKS], list[dict[str, Any]]()
    both_of = [key[:3] for key in found if key[3] == JOINT and key[2]]
    for network, budget, rate in sorted(both_of, key=lambda key: (networks.index(key[0]), -key[1], key[2])):
        both = found[network, budget, rate, JOINT]
        rules = {rule: found.get((network, budget, rate, rule), {}).get("overhead") for rule in RULES}
        bound = None if both["bound"] is None else both["bound"] / both["total_cost"] - 1
        lines.append({
            **both, **rules, "only": found.get((network, budget, 0.0, JOINT), {}).get("overhead"), "bound": bound,
            "size": f"{budget:.0%}" if budget < 1 else f"{budget:g} GiB",
            "gap": None if both["cost"] is None or bound is None else both["gap"],
        })  # fmt: skip
    columns = {
        "network": "{network}", "budget": "{size}", "GB/s": "{rate:g}",
        **{style_of(rule).label: f"{{{rule}:.2%}}" for rule in RULES}, "recompute only": "{only:.2%}",
        "both": "{overhead:.2%}", "bound": "{bound:.2%}", "gap": "{gap:.2%}",
    }  # fmt: skip
    table = table_of(lines, columns, "lr" + "r" * (len(columns) - 2))
    return Drawing(f"{made(rows)}.\n\n{table}", figures={"offload": figures.offload(rows)})
