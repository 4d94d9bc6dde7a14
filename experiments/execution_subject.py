"""A PyTorch model whose ways to train are compared: its captured and costed step, and what is measured of a way."""

from __future__ import annotations

import copy
import functools
import hashlib
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import remat
from remat.cost import apply_cost
from remat.cost.profile import profile_workspaces
from remat.execution import Peaks, StepPlan, find_plan, fingerprint_of
from remat.frontends.spec import ModelSpec, load_target
from remat.torch import build, capture
from remat.torch import graphs as frontend
from remat.torch.measure import peak_of_step
from remat.torch.module import Rematerialized, call_of, step_of
from remat.torch.plain import PlainStep, plain_step
from remat.torch.planner import VERSION, Planner, default_gpu, describe_inputs


@dataclass(frozen=True, slots=True)
class Method:
    """One point of the figure.

    Attributes:
        name, parameter: which method, and which of its points.
        module: what is trained.
        peak_bytes, ns: predicted; None where the method cannot be followed without computing.
        recomputed: operations computed again, where a plan says it.
        plan: of a method that executes one.
    """

    name: str
    parameter: str
    module: nn.Module
    peak_bytes: int | None
    ns: int | None
    recomputed: int | None = None
    plan: remat.Plan | None = None


class Subject:
    """A model with its loss, its arguments and its captured, costed step.

    Args:
        implementations: which implementations its plans choose from, as in `remat.torch.rematerialize`.
    """

    def __init__(self, job: dict[str, Any], implementations: str = "default"):
        self.job = job
        spec = ModelSpec(**job["spec"])
        torch.set_num_threads(job["threads"])
        torch.manual_seed(job["seed"])
        model, args, loss = build.build(spec, load_target(spec.target), job["device"])
        step, args = build.loss_step(model, args, loss)
        self.module = step.to(job["device"]).train()
        self.buffers = copy.deepcopy(dict(self.module.named_buffers()))
        self.args = tuple(_filled(x, job["device"], _classes(model)) for x in args)
        captured = capture.capture_module(call_of(self.module), self.args, {})
        self.step = step_of(captured, spec.name, self.module, "eager", implementations)
        self.planner = Planner(
            name=spec.name, budget_bytes=0, strategy="portfolio", scope="free", cost=job["cost"],
            gpu=default_gpu(job["device"]), device=job["device"], time_limit_s=job["time_limit_s"], seed=job["seed"],
            threads=job["threads"], cache_folder=Path(job["cache"]), plain=Peaks(None), beside=lambda _joint: {},
            state_bytes=lambda: 0, implementations=implementations,
        )  # fmt: skip
        graph, self.fixed = self.planner.with_everything_resident(self.step)
        self.graph = self.planner.weigh(graph, self.step)
        frontend.remember(self.step, self.graph)  # for torch_mincut
        self.fingerprint = fingerprint_of(graph.default(), "torch", VERSION, describe_inputs(self.args))
        self.there_bytes = self.step.graph.fixed_bytes

    @functools.cached_property
    def mincut(self) -> dict[float, remat.Plan]:
        """Plans of the min-cut partitioner that differ, by its ``activation_memory_budget``."""
        plans: dict[float, remat.Plan] = {}
        for member in remat.family(self.graph, "torch_mincut", scope="free"):
            order = member.plan.order.tolist()
            if all(order != known.order.tolist() for known in plans.values()):
                plans[member.parameters["activation_memory_budget"]] = member.plan
        return plans

    def put_buffers_back(self) -> None:
        """As they were before any step."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self.buffers[name])

    @functools.cached_property
    def left_by_plain(self) -> list[str] | None:
        """What the framework's own step leaves behind; None if that differs from run to run (atomics on a GPU)."""
        left = _left_by(self.module, self)
        return left if left == _left_by(self.module, self) else None

    def measured_peak(self, module: nn.Module) -> int:
        """Most bytes held in one step, what is always there included."""
        return self.there_bytes + peak_of_step(module, self.args, {}, self.job["device"])

    def seconds(self, module: nn.Module) -> float:
        """Of one step, the optimizer's not included."""
        cuda = self.job["device"] == "cuda"
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        module(*self.args).backward()
        if cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        self.module.zero_grad()
        return took

    def planned(
        self, name: str, parameter: str, order: list[int], budget_bytes: int | None, ways: Sequence[str] = ()
    ) -> Method:
        plan = remat.Plan.from_order(self.graph, order, implementations=ways)
        made = StepPlan(
            plan, self.graph, self.fingerprint, name, budget_bytes, None, self.fixed, self.job["cost"],
            implementations=self.planner.implementations,
        )  # fmt: skip
        planner = replace(self.planner, plans={self.fingerprint.sha256: made})  # what `rematerialize(plan=made)` makes
        module = Rematerialized(self.module, planner, made, "eager")
        return Method(name, parameter, module, made.peak_bytes, made.trace.cost, len(made.recomputed), plan)

    def best_within(self, budget_bytes: int, parameter: str, known: Iterable[remat.Plan] = ()) -> Method:
        """`portfolio` at a budget, at least as cheap as every one of `known` that fits.

        Raises:
            InvalidInput: no plan was found.
        """
        job = self.job
        plan = find_plan(
            self.graph, budget_bytes, strategy="portfolio", scope="free", time_limit_s=job["time_limit_s"],
            seed=job["seed"], threads=job["threads"], known=known,
        ).plan  # fmt: skip
        assert plan is not None
        return self.planned("portfolio", parameter, plan.order.tolist(), budget_bytes, plan.choices)

    def followed(self, name: str, parameter: str, module: nn.Module, without_random: nn.Module) -> Method:
        """A method that is eager PyTorch code: its calls are followed on tensors without contents."""
        if any(isinstance(part, nn.RNNBase) for part in module.modules()):
            # Without contents these layers run unrolled, which needs other memory than their kernels.
            return Method(name, parameter, module, None, self.graph.total_cost if module is self.module else None)
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
        planner = self.planner
        calls = apply_cost(calls, planner.cost, planner.gpu, cache_folder=planner.cache_folder, device=planner.device)
        of = {op.work.signature: (size, op.cost) for op, size in zip(calls.operations, sizes, strict=True) if op.work}
        peak = plain.peak_bytes({signature: size for signature, (size, _) in of.items()})
        return self.there_bytes + peak, sum(of[s][1] for s in plain.signatures if s in of)


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


def measure(subject: Subject, method: Method, rounds: int) -> dict[str, Any]:
    """Peak, step time over the plain step's in the same rounds (median, quartiles), and whether it leaves the same."""
    plain, ours = subject.module, method.module
    same = None if subject.left_by_plain is None else subject.left_by_plain == _left_by(ours, subject)
    peak = subject.measured_peak(ours)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds):
        turns = ((plain, times[0]), (ours, times[1]))
        for module, into in turns if i % 2 == 0 else reversed(turns):  # memory and caches are the first one's
            into.append(subject.seconds(module))
    ratios = [b / a for a, b in zip(*times, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
    return {
        "method": method.name, "parameter": method.parameter, "predicted_peak_bytes": method.peak_bytes,
        "predicted_ns": method.ns, "measured_peak_bytes": peak, "plain_s": statistics.median(times[0]),
        "measured_s": statistics.median(times[1]), "measured_ratio": ratio, "ratio_quartiles": [low, high],
        "same": same, "recomputed": method.recomputed,
    }  # fmt: skip


def _left_by(module: nn.Module, subject: Subject) -> list[str]:
    """Hashes of loss, gradients, buffers and random state after one step from the same beginning."""
    subject.put_buffers_back()
    torch.manual_seed(1)
    loss = module(*subject.args)
    loss.backward()
    tensors = [loss.detach(), *(p.grad for p in subject.module.parameters() if p.grad is not None)]
    tensors += [*subject.module.buffers(), torch.get_rng_state()]
    tensors += [torch.cuda.get_rng_state()] if subject.job["device"] == "cuda" else []
    left = [hashlib.sha256(x.cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest() for x in tensors]
    subject.module.zero_grad()
    return left
