"""``python -m experiments.execution_torch JOB``: every method on one PyTorch model, predicted and measured.

Runs in a process of its own, with nothing else in it. Each method is a row of the job's file as soon as it is
measured; a row that is there is not measured again.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import remat
import remat.torch as rt
from experiments.execution_peers import blocks, checkpointed
from remat.cost import CostWarning, apply_cost
from remat.cost.profile import profile_workspaces
from remat.execution import Peaks, StepPlan, find_plan, fingerprint_of
from remat.frontends import _torch_build, _torch_capture
from remat.frontends import torch as frontend
from remat.frontends.spec import ModelSpec, load_target
from remat.graph import Graph
from remat.torch._measure import peak_of_step
from remat.torch._module import call_of, step_of
from remat.torch._plain import PlainStep, plain_step
from remat.torch._planner import VERSION, Planner, default_gpu, describe_inputs

SHARES = (0.6, 0.8, 0.45, 0.9, 0.7, 0.5)  # a quick run takes the first of them


@dataclass(frozen=True, slots=True)
class Method:
    """One point of the figure.

    Attributes:
        name, parameter: which method, and which of its points.
        module: what is trained.
        peak_bytes, ns: predicted; None where the method cannot be followed without computing.
        recomputed: operations computed again, where a plan says it.
    """

    name: str
    parameter: str
    module: nn.Module
    peak_bytes: int | None
    ns: int | None
    recomputed: int | None = None


class Subject:
    """A model with its loss, its arguments and its captured, costed step."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        spec = ModelSpec(**job["spec"])
        torch.set_num_threads(job["threads"])
        torch.manual_seed(job["seed"])
        model, args, loss = _made(spec, job["device"])
        step, args = _torch_build.loss_step(model, args, loss)
        self.module = step.to(job["device"]).train()
        self.args = tuple(_filled(x, job["device"], _classes(model)) for x in args)
        captured = _torch_capture.capture_module(call_of(self.module), self.args, {})
        self.step = step_of(captured, spec.name, self.module, "eager")
        self.planner = Planner(
            name=spec.name, budget_bytes=0, strategy="portfolio", scope="free", cost=job["cost"],
            gpu=default_gpu(job["device"]), device=job["device"], time_limit_s=job["time_limit_s"], seed=job["seed"],
            threads=job["threads"], cache_folder=Path(job["cache"]), plain=Peaks(None), beside={},
        )  # fmt: skip
        graph, self.fixed = self.planner.with_everything_resident(self.step)
        self.graph = self.planner.weigh(graph)
        frontend.remember(self.step, self.graph)
        self.fingerprint = fingerprint_of(graph, "torch", VERSION, describe_inputs(self.args))
        self.there_bytes = self.step.graph.fixed_bytes

    def planned(self, name: str, parameter: str, order: list[int], budget_bytes: int | None) -> Method:
        plan = remat.Plan.from_order(self.graph, order)
        made = StepPlan(plan, self.graph, self.fingerprint, name, budget_bytes, None, self.fixed, self.job["cost"])
        module = rt.rematerialize(self.module, self.args, plan=made)
        return Method(name, parameter, module, made.peak_bytes, made.trace.cost, len(made.recomputed))

    def followed(self, name: str, parameter: str, module: nn.Module, without_random: nn.Module) -> Method:
        """A method that is eager PyTorch code: its calls are followed on tensors without contents."""
        try:
            plain = plain_step(without_random, self.args, {}, 0)
        except RuntimeError as error:  # e.g. a checkpoint's own checks that need real tensors
            print(f"note {name} cannot be predicted: {str(error).splitlines()[0]}", flush=True)
            return Method(name, parameter, module, None, None)
        peak, ns = self._predict(plain)
        return Method(name, parameter, module, peak, ns)

    def _predict(self, plain: PlainStep) -> tuple[int, int]:
        calls = plain.graph(name=self.planner.name)
        sizes, _ = profile_workspaces(calls, self.planner.cache_folder, self.planner.device)
        calls = _costed(calls, self.planner)
        of = {op.work.signature: (size, op.cost) for op, size in zip(calls.operations, sizes, strict=True) if op.work}
        peak = plain.peak_bytes({signature: size for signature, (size, _) in of.items()})
        return self.there_bytes + peak, sum(of[s][1] for s in plain.signatures if s in of)


def _costed(calls: Graph, planner: Planner) -> Graph:
    return apply_cost(calls, "profile", planner.gpu, cache_folder=planner.cache_folder, device=planner.device)


def _made(spec: ModelSpec, device: str) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """The factory's model with real parameters; see `remat.frontends.torch.extract`."""
    import inspect

    factory, options = load_target(spec.target), dict(spec.options)
    loss = options.pop("loss", None)
    offered = {"batch_size": spec.batch_size, "input_size": tuple(spec.input_size)}
    taken = inspect.signature(factory).parameters
    with torch.device(device):
        made = factory(**{k: v for k, v in offered.items() if k in taken and v} | options)
    parts = made if isinstance(made, tuple) else (made, (torch.empty(spec.batch_size, *spec.input_size),))
    return parts[0], parts[1], parts[2] if len(parts) > 2 else loss


def _classes(model: nn.Module) -> int:
    """Numbers below which integers are valid indices and classes: rows of the smallest table, or of the last layer."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    heads = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    return max(2, max(tables) if tables else heads[-1] if heads else 2)


def _filled(x: Any, device: str, n_classes: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=x.dtype, device=device)
    return torch.randint(0, n_classes, x.shape, dtype=x.dtype, device=device)


def methods(subject: Subject) -> Iterator[Callable[[], Method]]:
    """Peers first; then ours, at the peak of every peer and at shares of the plain step."""
    peaks: list[int] = []

    def noted(method: Method) -> Method:
        peaks.extend([method.peak_bytes] if method.peak_bytes is not None else [])
        return method

    module = subject.module
    plain = noted(subject.followed("plain", "", module, module))
    yield lambda: plain
    n_blocks = len(list(blocks(module)))
    for every in (1, 2) if n_blocks else ():
        yield lambda every=every: noted(
            subject.followed(
                "checkpoint_blocks", f"1 of {every}", checkpointed(module, every),
                checkpointed(module, every, replays_random=False),
            )
        )  # fmt: skip
    if n_blocks:
        yield lambda: noted(
            subject.followed(
                "selective_checkpoint", "products kept", checkpointed(module, selective=True),
                checkpointed(module, selective=True, replays_random=False),
            )
        )  # fmt: skip
    seeds: list[remat.Plan] = []
    for member in remat.family(subject.graph, "torch_mincut", scope="free"):
        order = member.plan.order.tolist()
        if any(order == seed.order.tolist() for seed in seeds):
            continue
        seeds.append(member.plan)
        share = member.parameters["activation_memory_budget"]
        yield lambda order=order, share=share: noted(subject.planned("torch_mincut", f"{share:g}", order, None))
    budgets = [(f"as {p / 1e6:.1f} MB", p) for p in sorted(set(peaks), reverse=True)]
    assert plain.peak_bytes is not None
    budgets += [(f"{share:g} of plain", int(share * plain.peak_bytes)) for share in SHARES[: subject.job["shares"]]]
    for label, budget in budgets:

        def ours(label: str = label, budget: int = budget) -> Method:
            job = subject.job
            found = find_plan(
                subject.graph, budget, strategy="portfolio", scope="free", time_limit_s=job["time_limit_s"],
                seed=job["seed"], threads=job["threads"], known=seeds,
            ).plan  # fmt: skip
            assert found is not None
            seeds.append(found)
            return subject.planned("portfolio", label, found.order.tolist(), budget)

        yield ours


def measure(subject: Subject, method: Method, rounds: int) -> dict[str, Any]:
    """Peak, median step time beside the plain step's in the same rounds, and whether what it leaves is the same."""
    plain, ours = subject.module, method.module
    same = _left_by(plain, subject) == _left_by(ours, subject)
    peak = subject.there_bytes + peak_of_step(ours, subject.args, {}, subject.job["device"])
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for module, into in ((plain, times[0]), (ours, times[1])):
            into.append(_seconds(module, subject))
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    return {
        "method": method.name, "parameter": method.parameter, "predicted_peak_bytes": method.peak_bytes,
        "predicted_ns": method.ns, "measured_peak_bytes": peak, "plain_s": statistics.median(times[0]),
        "measured_s": statistics.median(times[1]), "measured_ratio": ratio, "same": same,
        "recomputed": method.recomputed,
    }  # fmt: skip


def _seconds(module: nn.Module, subject: Subject) -> float:
    cuda = subject.job["device"] == "cuda"
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    module(*subject.args).backward()
    if cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    subject.module.zero_grad()
    return took


def _left_by(module: nn.Module, subject: Subject) -> list[bytes]:
    """Loss, gradients, buffers and random state after one step, as bytes; the buffers are put back."""
    before = copy.deepcopy(dict(subject.module.named_buffers()))
    torch.manual_seed(1)
    loss = module(*subject.args)
    loss.backward()
    tensors = [loss.detach(), *(p.grad for p in subject.module.parameters() if p.grad is not None)]
    left = [x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors if x.ndim]
    left += [b.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for b in subject.module.buffers()]
    left += [repr(loss.item()).encode(), torch.get_rng_state().numpy().tobytes()]
    subject.module.zero_grad()
    with torch.no_grad():
        for name, buffer in subject.module.named_buffers():
            buffer.copy_(before[name])
    return left


def main(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    rows_path = Path(job["rows"])
    known = {(r["method"], r["parameter"]) for r in map(json.loads, rows_path.read_text().splitlines())
             } if rows_path.exists() else set()  # fmt: skip
    warnings.simplefilter("ignore", CostWarning)
    subject = Subject(job)
    for make in methods(subject):
        try:
            method = make()
        except remat.InvalidInput as error:  # no plan within that budget
            print(f"note {error}", flush=True)
            continue
        if (method.name, method.parameter) in known:
            continue
        row = measure(subject, method, job["rounds"])
        with rows_path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("row", json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
