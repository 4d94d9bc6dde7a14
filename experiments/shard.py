"""``make shard``: a small Llama divided over ranks by FSDP2 on a CPU: promised and measured peak of each rank.

Each budget is planned in every process. A row also has the number of blocks that were gathered at once, and how much
gradients, and parameters after a step of AdamW, differ from those of the unsharded model, relative to a tensor's
largest number.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import remat.torch as rt
from experiments.arguments import Parser, argument, count, fractions, output_file, run, seconds
from experiments.documents import DOCS, ROOT, Document, Drawing, markdown_table
from experiments.pieces import pieces_of, read_pieces
from experiments.store import write_json
from remat.errors import RematError
from remat.torch.measure import peak_of_step, relative_difference
from remat.torch.networks.llama import llama

RESULTS = ROOT / "results" / "shard.json"
SIZES: dict[str, Any] = {"batch_size": 16, "length": 16, "vocabulary": 100, "width": 64, "hidden": 160, "n_heads": 4}
TRIES = 3
LIMIT_S = 600  # for processes that wait for one that died
PAUSE_S = 0.002


class _Gathered:
    """Counts blocks whose parameters exist in full."""

    def __init__(self, blocks: Iterable[nn.Module]):
        self.buffers: dict[nn.Module, Callable[[], Tensor | None]] = {block: lambda: None for block in blocks}
        self.most = 0

    def note(self, block: nn.Module, buffer: Tensor) -> None:
        """`buffer` receives the parameters of `block`."""
        if block in self.buffers:
            self.buffers[block] = weakref.ref(buffer)
        self.most = max(self.most, sum(_is_whole(each) or made() is not None for each, made in self.buffers.items()))


def _is_whole(block: nn.Module) -> bool:
    return all(type(p) is nn.Parameter and p.untyped_storage().nbytes() for p in block.parameters())


class _Collective:
    """A collective of FSDP2 after which gloo's threads have let go of its tensors.

    The profiler does not see what they free; this thread must be the last that holds a tensor.
    """

    def __init__(self, collective: Callable[..., Any], note: Callable[[Tensor], None] = lambda _: None):
        self.collective, self.note = collective, note

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        self.note(made)
        return made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False, **op: Any
    ) -> None:
        work = self.collective(output_tensor, input_tensor, group=group, async_op=True, **op)
        work.wait()
        time.sleep(PAUSE_S)


def rows_of_rank(n_layers: int, shares: Iterable[float], time_limit_s: float) -> list[dict[str, Any]]:
    """A row for each budget, measured by this process of several."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    plain, args = llama(n_layers=n_layers, **SIZES)
    torch.manual_seed(1 + distributed.get_rank())
    args = tuple(torch.randint(0, SIZES["vocabulary"], x.shape) for x in args)
    rows = [_row(copy.deepcopy(plain), plain, args, share, time_limit_s) for share in shares]
    distributed.destroy_process_group()
    return rows


def _row(
    model: nn.Module, plain: nn.Module, args: tuple[Tensor, ...], share: float, time_limit_s: float
) -> dict[str, Any]:  # fmt: skip
    planned = rt.rematerialize(
        model, args, share, shard=distributed.get_world_size(), optimizer="adamw", strategy="search", cost="roofline",
        time_limit_s=time_limit_s,
    )  # fmt: skip
    gathered = _watched(model)
    plan: Any = planned.plan  # of the parts
    there = plan.fixed_bytes
    measured = [min(there + peak_of_step(each, args, {}, "cpu") for _ in range(TRIES)) for each in (model, planned)]
    gradients, parameters = _differences(planned, copy.deepcopy(plain), args)
    return {
        "rank": distributed.get_rank(), "share": share, "budget_bytes": plan.budget_bytes,
        "promised_bytes": plan.peak_bytes, "measured_bytes": measured[1], "plain_promised_bytes": plan.plain_peak_bytes,
        "plain_measured_bytes": measured[0], "overhead": plan.overhead, "gathered": gathered.most,
        "gradients_differ": gradients, "parameters_differ": parameters,
    }  # fmt: skip


def _watched(model: nn.Module) -> _Gathered:
    """Let the collectives of a sharded model tell what they gather."""
    blocks = list(model.get_submodule("blocks").children())
    gathered = _Gathered(blocks)
    gather, reduce = (
        getattr(distributed, name, None) or getattr(distributed, older)  # older versions have one name only
        for name, older in (
            ("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor"),
        )
    )  # fmt: skip
    for module in (model, *blocks):
        module.set_custom_all_gather(_Collective(gather, lambda made, module=module: gathered.note(module, made)))  # pyright: ignore[reportCallIssue]
        module.set_custom_reduce_scatter(_Collective(reduce))  # pyright: ignore[reportCallIssue]
    return gathered


def _differences(planned: nn.Module, plain: nn.Module, args: tuple[Tensor, ...]) -> tuple[float, float]:
    """How much gradients, and parameters after a step of AdamW, differ from those of the unsharded model."""
    for each in (planned, plain):
        each(*args).backward()
    for p in plain.parameters():
        distributed.all_reduce(p.grad, op=distributed.ReduceOp.AVG)
    pairs = list(zip(planned.parameters(), plain.parameters(), strict=True))
    gradients = max(relative_difference(q.grad, p.grad.full_tensor()) for p, q in pairs)  # pyright: ignore
    for each in (planned, plain):
        torch.optim.AdamW(each.parameters(), lr=0.01).step()
    return gradients, max(relative_difference(q.detach(), p.full_tensor().detach()) for p, q in pairs)  # pyright: ignore


def measured(ranks: int, n_layers: int, shares: Sequence[float], time_limit_s: float) -> list[dict[str, Any]]:
    """The rows of all ranks, each a process.

    Raises:
        RematError: a process failed, or hung; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m",
            "experiments.shard", "--rank-into", folder, "--layers", str(n_layers), "--shares",
            ",".join(map(str, shares)), "--time-limit", str(time_limit_s),
        ]  # fmt: skip
        parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = parent.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RematError(f"the processes of shard did not end within {LIMIT_S} s") from error
        finally:
            if parent.poll() is None:  # it ends its ranks, unless it is killed
                parent.terminate()
                parent.communicate()
        if parent.returncode:
            raise RematError(f"a process of shard failed: {errors[-3000:]}")
        return [row for path in sorted(Path(folder).iterdir()) for row in json.loads(path.read_text())]


def draw(arguments: Sequence[str]) -> Drawing:
    """The table of the page, from the stored results of ``make shard``."""
    stored = read_pieces(RESULTS, "make shard")
    heads = ["ranks", "rank", "budget MB", "promised MB", "measured: bytes below", "plain: promised MB",
             "plain, measured: bytes below", "overhead", "gathered", "gradients"]  # fmt: skip
    table = markdown_table(heads, [_cells(row) for row in stored["rows"]])
    return Drawing(f"{stored['date']}, PyTorch {stored['torch']}, {stored['cpu']}.\n\n{table}")


def _cells(row: dict[str, Any]) -> list[str]:
    differ = row["gradients_differ"]
    below, plain_below = (
        f"{row[f'{which}promised_bytes'] - row[f'{which}measured_bytes']:,}" for which in ("", "plain_")
    )
    return [
        str(row["ranks"]), str(row["rank"]), _mb(row["budget_bytes"]), _mb(row["promised_bytes"]), below,
        _mb(row["plain_promised_bytes"]), plain_below, f"{row['overhead']:.1%}", str(row["gathered"]),
        f"{differ:.0e}" if differ else "same bits",
    ]  # fmt: skip


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.3f}"


DOCUMENT = Document("shard", DOCS / "results" / "shard.md", draw)


@argument
def _counts(text: str) -> list[int]:
    """Comma-separated whole numbers."""
    return [count(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the file of results, and print its rows."""
    parser = Parser(prog="python -m experiments.shard", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--ranks", type=_counts, default=[2, 3], help="comma-separated numbers of processes")
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--shares", type=fractions, default=[0.95, 0.8, 0.65], help="budgets, of the plain step's peak")
    parser.add_argument("--time-limit", type=seconds, default=4.0, help="to search for each plan")
    parser.add_argument("--again", action="store_true", help="measure finished numbers of processes too")
    parser.add_argument("--out", type=output_file, default=RESULTS)
    parser.add_argument("--rank-into", type=Path, help=argparse.SUPPRESS)  # this process is one of the ranks
    chosen = parser.parse_args(arguments)
    if chosen.rank_into is not None:
        rows = rows_of_rank(chosen.layers, chosen.shares, chosen.time_limit)
        write_json(chosen.rank_into / f"{rows[0]['rank']}.json", rows)
        return
    settings = {"layers": chosen.layers, "shares": list(chosen.shares), "time_limit_s": chosen.time_limit}
    pieces = pieces_of(chosen.out, "ranks", settings)
    for ranks in chosen.ranks:
        if not chosen.again and pieces.has(ranks):
            print(f"{ranks} ranks: measured before, in {chosen.out}")
            continue
        found = measured(ranks, chosen.layers, chosen.shares, chosen.time_limit)
        rows = [{"ranks": ranks, **row} for row in found]
        pieces.put(ranks, rows)
        for row in rows:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
