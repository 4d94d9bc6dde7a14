"""``experiment=largest_model``: the largest resolution and the deepest ResNet that train at a fixed batch.

The rule is that of `experiments.max_batch_size`: at most one forward pass more than plain training, FLOP costs, the
GPU's memory, exact accounting. Sizes are bisected. A child process extracts each size anew, because parameters and
shapes change with it. A size counts as found if the portfolio has a plan within the cost cap, and as ruled out if no
plan fits or its bound is above the cap.

- resolution: the model's own input, scaled; height is a multiple of 32, width the multiple nearest to its proportion.
- depth: `remat.tf.networks.resnet`, the stages of ResNet50 with any number of blocks in the third.

``batch_size=`` sets both batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from analysis.batches import TRIAL_HEADS, trial_rows
from experiments.build import Subject, extracted
from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.settings import Settings
from experiments.solving import Solves, solve_each
from experiments.store import Row as Solved
from experiments.store import code_of
from experiments.throughput import STRATEGY
from remat.cost import apply_cost
from remat.errors import InvalidInput, RematError
from remat.frontends.spec import ModelSpec
from remat.graph import Graph
from remat.largest import SizeSearch

MULTIPLE = 32  # of height and width, so that they can be halved five times
RESOLUTION_BATCH, DEPTH_BATCH = 32, 128
STAGE3_OF_RESNET50 = 6
RESNET_INPUT = (224, 224, 3)  # ImageNet
TRIALS, QUICK_TRIALS = 12, 4


@experiment()
def largest_model(
    settings: Settings, scale: str = "full", time_limit: float = 20.0, batch_size: int | None = None
) -> Iterator[Case]:
    """The largest resolution of a model and the deepest ResNet on a 16 GB card, with at most one more forward pass."""
    spec = settings.spec
    if spec is None or spec.framework != "keras" or spec.granularity != "layer" or len(spec.input_size) != 3:
        raise InvalidInput("experiment=largest_model needs a Keras model of images with layer granularity")
    trials = QUICK_TRIALS if scale == "quick" else TRIALS
    what = {"settings": settings.determining(), "batch_size": batch_size, "max_trials": trials}
    yield Case(measure, what, code_of(STRATEGY), name=f"{spec.name}, {settings.gpu.name}", solves=settings)


def measure(run: Solves, batch_size: int | None, max_trials: int, **_settings: Any) -> Iterator[Row]:
    """The document of both searches."""
    yield largest_models(run, run.settings, batch_size, max_trials)


def largest_models(
    run: Solves, settings: Settings, batch_size: int | None = None, max_trials: int = TRIALS
) -> dict[str, Any]:
    """The document (see the module); with `batch_size` None each search has its own default."""
    spec = settings.spec
    assert spec is not None
    height, width, channels = spec.input_size

    def resolution(k: int) -> ModelSpec:
        shape = (MULTIPLE * k, max(1, round(k * width / height)) * MULTIPLE, channels)
        return replace(spec, input_size=shape, batch_size=batch_size or RESOLUTION_BATCH, accounting="exact")

    def depth(blocks: int) -> ModelSpec:
        return ModelSpec(
            "resnet", "keras", "remat.tf.networks.resnet:resnet", batch_size or DEPTH_BATCH, RESNET_INPUT, "layer",
            options={"blocks": [3, 4, blocks, 3]},
        )  # fmt: skip

    def solve(spec: ModelSpec) -> tuple[Graph, int, Solved]:
        graph = apply_cost(extracted(spec), "flops", None)
        cap = graph.total_cost + sum(op.cost for op in graph.operations if not op.is_backward)
        subject = Subject(graph, spec.name, spec.framework, spec.granularity, spec.batch_size, "flops", "modelled")
        graph_run = run.graph_run(subject, "largest_model", settings, cap)
        return graph, cap, solve_each([(graph_run, STRATEGY, int(settings.gpu.memory_bytes))])[0]

    searches = [
        _search(f"resolution of {spec.name}", SizeSearch(max(1, height // MULTIPLE)), resolution,
                lambda s: f"{s.input_size[0]} x {s.input_size[1]}", solve, max_trials),
        _search("depth of a ResNet", SizeSearch(STAGE3_OF_RESNET50, 3 * STAGE3_OF_RESNET50, growth=4), depth,
                lambda s: f"{2 + 3 * sum(s.options['blocks'])} layers", solve, max_trials),
    ]  # fmt: skip
    return {"memory_bytes": int(settings.gpu.memory_bytes), "gpu": settings.gpu.name, "searches": searches}


def _search(
    what: str, known: SizeSearch, spec_of: Callable[[int], ModelSpec], label_of: Callable[[ModelSpec], str],
    solve: Callable[[ModelSpec], tuple[Graph, int, Solved]], max_trials: int,
) -> dict[str, Any]:  # fmt: skip
    """One search of the document; `solve` returns (costed graph, cost cap, row of the portfolio) of a size."""
    trials: list[dict[str, Any]] = []
    failed: list[str] = []
    batch = spec_of(known.first).batch_size
    while len(trials) + len(failed) < max_trials and (size := known.next_size()) is not None:
        spec = spec_of(size)
        try:
            graph, cap, row = solve(spec)
        except RematError as error:  # the network cannot be built, which says nothing about its memory
            known.learn(size, fits=False, impossible=False)
            failed.append(f"{label_of(spec)}: {error}")
            continue
        fits = row.cost is not None and row.cost <= cap
        known.learn(size, fits=fits, impossible=row.status == "INFEASIBLE" or (row.bound or 0) > cap)
        trials.append({
            "size": size, "label": label_of(spec), "operations": len(graph), "fits": fits, "status": row.status,
            "cost": row.cost, "cost_cap": cap, "bound": row.bound, "plain_peak_bytes": row.store_all_peak_bytes,
            "fixed_bytes": graph.fixed_bytes, "key": row.key,
        })  # fmt: skip
    for trial in trials:  # a size larger than an impossible one is impossible too
        above = known.ruled_out is not None and trial["size"] >= known.ruled_out
        trial["kind"] = "fits" if trial["fits"] else "ruled out" if above else "undecided"
    return {
        "what": what, "batch": batch, "found": known.found,
        "found_label": label_of(spec_of(known.found)) if known.found else None, "ruled_out": known.ruled_out,
        "ruled_out_label": label_of(spec_of(known.ruled_out)) if known.ruled_out else None, "trials": trials,
        "failed": failed,
    }  # fmt: skip


@largest_model.draws
def page(rows: Sequence[Row]) -> Drawing:
    """The searches of the last run: a table of trials each."""
    parts = []
    for search in rows[-1]["searches"]:
        above = f"; {search['ruled_out_label']} is impossible (proven)" if search["ruled_out"] else "; no limit proven"
        parts += [markdown_table(TRIAL_HEADS, trial_rows(search)), *(f"Not built: {line}" for line in search["failed"])]
        parts.append(f"{search['what']} at batch {search['batch']}: {search['found_label'] or 'none'}{above}.")
    return Drawing("\n\n".join(parts))
