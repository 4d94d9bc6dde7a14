"""A small Llama divided over ranks by FSDP2 on a CPU: promised and measured peak of each rank, and the gradients."""

import copy
import functools
import multiprocessing
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from experiments.steps.measure_step import planned, promise_of
from remat.torch.measuring.measure import peak_of_step, relative_difference
from remat.torch.networks.llama import llama

SIZES: dict[str, Any] = {"batch_size": 16, "length": 16, "vocabulary": 100, "width": 64, "hidden": 160, "n_heads": 4}
TRIES = 3
LIMIT = timedelta(seconds=600)  # for processes that wait for one that died
PAUSE_S = 0.002


def rows_of_ranks(ranks: int, share: float, layers: int, time_limit_s: float) -> list[dict[str, Any]]:
    """A row of each rank, which is a process."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, spawn) as pool:
        make = functools.partial(
            _row_of_rank, ranks=ranks, meet=Path(folder, "meet").as_uri(), share=share, layers=layers,
            time_limit_s=time_limit_s,
        )  # fmt: skip
        return list(pool.map(make, range(ranks)))


def _row_of_rank(rank: int, *, ranks: int, meet: str, share: float, layers: int, time_limit_s: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=LIMIT)
    torch.manual_seed(0)
    plain, args = llama(n_layers=layers, **SIZES)
    torch.manual_seed(1 + rank)
    args = tuple(torch.randint(0, SIZES["vocabulary"], x.shape) for x in args)
    model = copy.deepcopy(plain)
    module = planned(
        model, args, share, shard=ranks, optimizer="adamw", strategy="search", cost="roofline",
        time_limit_s=time_limit_s,
    )  # fmt: skip
    gathered = _watched(model)
    plan: Any = module.plan  # of the parts
    plain_bytes, own_bytes = (
        plan.fixed_bytes + min(peak_of_step(each, args, {}, "cpu") for _ in range(TRIES)) for each in (model, module)
    )
    gradients, parameters = _differences(module, plain, args)
    distributed.destroy_process_group()
    return {
        "rank": rank, **promise_of(plan), "measured_bytes": own_bytes, "plain_predicted_bytes": plan.plain_peak_bytes,
        "plain_measured_bytes": plain_bytes, "gathered": gathered.most, "gradients_differ": gradients,
        "parameters_differ": parameters,
    }  # fmt: skip


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
