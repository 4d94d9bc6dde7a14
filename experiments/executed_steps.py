"""Steps that were executed and measured under plans, see docs/results/executed-steps.md.

    torch: PyTorch models at sizes for a CPU.
    offload: the same with plans that also copy to the host, over links that are imitated; not measured by default. Use
        threads=1, so that a core is left for the copies.
    keras: models of `experiments.steps.keras_models`; also `tf.recompute_grad` over about sqrt(n) blocks. Overheads are
        over the plain `tf.function`, and over the same function run as written (without grappler), as plans run.
    keras_applications: every network of keras.applications with the smallest input that it accepts, by `fit_within`.
    peers: every method to train a PyTorch model within less memory, and plans at the peak of each.

Rows have the promised, predicted and measured peak, predicted and measured overhead, and which step has the same loss,
gradients, variables and random state bit for bit.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from matplotlib.figure import Figure

from analysis.execution import figure
from analysis.style import label_of
from experiments.arguments import names_of
from experiments.documents import Drawing, LongTable, links, long_table, made, markdown_table, values_of
from experiments.registry import Case, Row, experiment
from experiments.steps import table
from experiments.steps.job import OFFERED, PLAIN, PORTFOLIO, Job
from experiments.steps.sizes import ON_A_CPU
from experiments.steps.table import BUDGET, MODEL, REMARK
from experiments.steps.torch_sizes import device_here, torch_names
from remat.errors import InvalidInput

PAGE = "results/executed-steps.md"
HEADS = (
    "steps", "plans", "budgets without a plan", "above the budget", "measured / predicted peak",
    "bits of the plain step", "measured minus predicted overhead, median",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steps:
    """One kind of steps.

    Attributes:
        usual: the job of any model.
        known: names of all models.
        models: measured by default; all if empty.
        label, name, columns: of the long table; none if empty.
        without: a method that the table has no lines of.
    """

    usual: Job
    known: Callable[[], Iterable[str]]
    models: Sequence[str] = ()
    label: str = ""
    name: str = ""
    columns: Sequence[str] = table.STEPS
    without: str = ""


STEPS = {
    "torch": Steps(Job("torch", ""), torch_names, tuple(ON_A_CPU), "PyTorch, {} networks", "steps_torch"),
    # Modules that import TensorFlow.
    "keras": Steps(
        Job("keras", ""), lambda: import_module("experiments.steps.keras_models").MODELS, (), "TensorFlow, {} networks",
        "steps_tensorflow",
    ),
    "keras_applications": Steps(
        Job("keras_applications", "", cost="flops", time_limit_s=20.0, rounds=0, fractions=[0.85]),
        lambda: import_module("experiments.steps.keras_fit").names(), (),
        "{} networks of keras.applications, `fit_within`", "steps_keras_applications",
        (MODEL, "always there MB", "plain MB", BUDGET, "predicted MB", "measured MB", "predicted overhead", "repeats",
         "bits of", REMARK), PLAIN,
    ),
    "offload": Steps(
        Job("offload", "", fractions=[0.6, 0.35]), torch_names, ("gpt2", "llama", "resnet50"),
        "PyTorch with copies to the host, {} networks", "steps_offload",
        ("link", *table.STEPS, "time over the judge's"), PLAIN,
    ),
    "peers": Steps(
        Job("peers", "", time_limit_s=6.0, fractions=[0.6, 0.8, 0.45, 0.9, 0.7, 0.5]), torch_names, ("gpt2", "resnet50")
    ),
}  # fmt: skip


@experiment(page=PAGE)
def executed_steps(
    steps: Sequence[str] = ("torch", "keras", "keras_applications", "peers"), models: Sequence[str] = (),
    budgets: Sequence[float] = (), device: str = "cpu", rounds: int | None = None, time_limit_s: float | None = None,
    threads: int = 2, links: Sequence[str] = ("1GB/s", "4GB/s"),
) -> Iterator[Case]:  # fmt: skip
    """Plans that run in PyTorch and Keras, and other methods: memory, time and bits, predicted and measured."""
    device = device_here(device)
    for kind in names_of("kind of steps", steps, STEPS):
        chosen = STEPS[kind]
        if device != "cpu" and kind.startswith("keras"):
            raise InvalidInput(f"Keras models are measured on the CPU only; leave {kind} out of steps")
        given = {"fractions": budgets or None, "rounds": rounds, "time_limit_s": time_limit_s}
        job = replace(chosen.usual, device=device, threads=threads, **{k: v for k, v in given.items() if v is not None})
        known = list(chosen.known())
        for model in names_of("model", models or chosen.models or known, known):
            for link in links if kind == "offload" else ("",):
                yield replace(job, model=model, link=link).case


@executed_steps.draws
def page(rows: Sequence[Row]) -> Drawing:
    """How promises were kept, a table for each model with peers and its figure, and tables of all rows."""
    kinds = {kind: [row for row in rows if row["steps"] == kind] for kind in STEPS}
    summary, long = list[list[str]](), list[LongTable]()
    for kind, mine in kinds.items():
        of = STEPS[kind]
        if not of.name or not mine:
            continue
        summary.append([of.label.format(len({row["model"] for row in mine})), *_summary(mine)])
        shown = [row for row in mine if row["method"] not in (OFFERED, of.without)]
        long.append(long_table(of.name, shown, table.columns(of.columns)))
    text, figures = [markdown_table(HEADS, summary)], dict[str, Figure]()
    for model in dict.fromkeys(row["model"] for row in kinds["peers"]):
        mine = [row for row in kinds["peers"] if row["model"] == model]
        figures[f"execution_{model}"] = figure(mine)
        text += [f"{label_of(model)}: step times over plain PyTorch's ({made(mine)}, "
                 f"{values_of(mine, 'rounds')} rounds):", markdown_table(table.BESIDE, table.beside(mine))]  # fmt: skip
    return Drawing("\n\n".join([*text, f"Tables: {links(PAGE, *long)}."]), long, figures)


def _summary(rows: Sequence[Row]) -> list[str]:
    """How well plans kept their promises, in the order of `HEADS` after the first."""
    asked = [row for row in rows if row["method"] == PORTFOLIO]
    plans = [row for row in asked if row["measured_peak_bytes"] is not None]
    over = sum((row["measured_peak_bytes"] or 0) > (row["budget_bytes"] or 0) for row in plans)
    peaks = [row["measured_peak_bytes"] / row["predicted_peak_bytes"] for row in plans
             if row["measured_peak_bytes"] and row["predicted_peak_bytes"]]  # fmt: skip
    same = sum(bool(row["same_as"]) for row in plans)
    missed = [100 * points for row in plans if (points := _missed_overhead(row)) is not None]
    return [
        str(len(plans)), str(len(asked) - len(plans)), str(over), f"{min(peaks):.3f} to {max(peaks):.3f}",
        f"{same} of {len(plans)}", f"{statistics.median(missed):+.1f} points" if missed else "not timed",
    ]  # fmt: skip


def _missed_overhead(row: Row) -> float | None:
    """Measured minus predicted overhead; None if the step was not timed. Of TensorFlow, over the step as written."""
    ratio = row["measured_ratio"]
    if row["as_written_s"] and row["measured_s"]:
        ratio = row["measured_s"] / row["as_written_s"]
    return None if ratio is None or row["predicted_overhead"] is None else ratio - 1 - row["predicted_overhead"]
