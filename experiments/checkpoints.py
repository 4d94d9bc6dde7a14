"""``make checkpoints``: the best checkpoints in PyTorch's own languages beside the free plan, within the same budgets.

For each network and budget: the best set of blocks that run again (``blocks``), the best choice of results that these
keep (``selective``), and the plan that remat's executor follows (``free``). Each is executed. Rounds are paired: in
each round every variant makes one step, and its time is divided by that of the plain step.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import remat.torch as rt
from experiments.arguments import Parser, count, names_of, output_file, run, seconds
from experiments.documents import DOCS, ROOT, Document, Drawing, markdown_table
from experiments.pieces import pieces_of, read_pieces
from experiments.steps.torch_steps import paired_seconds, step_for_a_cpu
from remat.errors import InvalidInput
from remat.torch.measure import difference_of_steps, peak_of_step
from remat.torch.planner import there_before
from remat.units import format_size

RESULTS = ROOT / "results" / "checkpoints.json"
MODELS = ("gpt2", "llama", "vit", "resnet50", "unet")
SHARES = (0.85, 0.7, 0.55)
LANGUAGES = ("blocks", "selective")
ROUNDS = 11


def measured(name: str, shares: Sequence[float], rounds: int, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """A row for each budget and variant; without a peak if nothing fits."""
    gc.collect()
    model, args = step_for_a_cpu(name)
    made = dict[tuple[float, str], nn.Module]()
    rows = list[dict[str, Any]]()
    for share in shares:
        for language, found in _found(model, args, share, time_limit_s):
            row = {"model": name, "share": share, "variant": language}
            if isinstance(found, InvalidInput):
                rows.append(row | {"message": str(found)})
                continue
            made[share, language], facts = found
            peak = facts.pop("before") + peak_of_step(made[share, language], args, {}, "cpu")
            differs = difference_of_steps(model, made[share, language], args, {}, "cpu")
            rows.append(row | facts | {"measured_bytes": peak, "difference": differs})
    plain, *others = paired_seconds([model, *made.values()], args, rounds)
    ratios = {
        key: [round(a / b, 4) for a, b in zip(each, plain, strict=True)] for key, each in zip(made, others, strict=True)
    }
    for row in rows:
        yield row | {"ratios": ratios.get((row["share"], row["variant"]), [])}


def _found(
    model: nn.Module, args: tuple[Any, ...], share: float, time_limit_s: float
) -> Iterator[tuple[str, tuple[nn.Module, dict[str, Any]] | InvalidInput]]:
    """(variant, (module, what is promised), or why there is none)."""
    try:
        planned = rt.rematerialize(model, args, share, time_limit_s=time_limit_s)
    except InvalidInput as error:
        yield "free", error
        return
    plan = planned.plan
    facts = {"budget_bytes": planned.budget_bytes, "before": there_before(plan), "predicted_bytes": plan.peak_bytes}
    yield "free", (planned, facts | {"overhead": plan.overhead})
    for language in LANGUAGES:
        began = time.perf_counter()
        try:
            found = rt.checkpoints(planned, args, language=language)
        except InvalidInput as error:
            yield language, error
            continue
        spent = round(time.perf_counter() - began, 1)
        own = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
        yield language, (found.apply(own), facts | {
            "predicted_bytes": found.peak_bytes, "overhead": found.overhead, "seconds": spent,
        })  # fmt: skip


def draw(arguments: Sequence[str]) -> Drawing:
    """The table of the page, from the stored results of ``make checkpoints``."""
    stored = read_pieces(RESULTS, "make checkpoints")
    rows = stored["rows"]
    keys = dict.fromkeys((row["model"], row["share"]) for row in rows)
    of = {(row["model"], row["share"], row["variant"]): row for row in rows}
    heads = ["network", "budget", *(f"{variant}: overhead, measured" for variant in (*LANGUAGES, "free"))]
    table = markdown_table(
        heads, [[name, f"{share:g}", *(_cell(of.get((name, share, v))) for v in (*LANGUAGES, "free"))]
                for name, share in keys]
    )  # fmt: skip
    run_ones = [row for row in rows if "measured_bytes" in row]
    over = max(row["measured_bytes"] - row["predicted_bytes"] for row in run_ones)
    differing = sum(row["difference"] != 0 for row in run_ones)
    facts = (
        f"{stored['date']}, PyTorch {stored['torch']}, {stored['cpu']}, {stored['threads']} threads, "
        f"{stored['rounds']} paired rounds, {stored['time_limit_s']:g} s of search. Of {len(run_ones)} executed steps, "
        f"{differing} differ from the plain one in a bit; the largest measured peak above its promise: "
        f"{format_size(max(0, over), digits=3)}."
    )
    return Drawing(f"{facts}\n\n{table}")


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or "overhead" not in row:
        return "does not fit"
    low, middle, high = statistics.quantiles(row["ratios"], n=4)
    return f"{row['overhead']:.1%}, {middle - 1:.1%} ({low - 1:.1%} to {high - 1:.1%})"


DOCUMENT = Document("checkpoints", DOCS / "results" / "checkpoints.md", draw)


def main(arguments: list[str] | None = None) -> None:
    """Write the file of results, and print its rows."""
    parser = Parser(prog="python -m experiments.checkpoints", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--time-limit", type=seconds, default=20.0, help="seconds of search for each free plan")
    parser.add_argument("--rounds", type=count, default=ROUNDS)
    parser.add_argument("--again", action="store_true", help="measure finished models too")
    parser.add_argument("--out", type=output_file, default=RESULTS)
    chosen = parser.parse_args(arguments)
    settings = {"rounds": chosen.rounds, "time_limit_s": chosen.time_limit, "threads": torch.get_num_threads()}
    pieces = pieces_of(chosen.out, "model", settings)
    for name in names_of("model", chosen.models, MODELS):
        if not chosen.again and pieces.has(name):
            print(f"{name}: measured before, in {chosen.out}")
            continue
        rows = list[dict[str, Any]]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for row in measured(name, SHARES, chosen.rounds, chosen.time_limit):
                rows.append(row)
                print(json.dumps(row), flush=True)
        pieces.put(name, rows)


if __name__ == "__main__":
    run(main)
