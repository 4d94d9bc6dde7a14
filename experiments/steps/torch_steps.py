"""The harness's adapter for PyTorch: a model's captured step with costs, its plans and its peers."""

import collections
import copy
import functools
import gc
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import remat
from experiments.registry import Row
from experiments.settings import RUNS_FOLDER
from experiments.steps.job import PLAIN, PORTFOLIO, Candidate, Job, Method, Subject, peak_of
from experiments.steps.offers import held_by_those_who_offer
from experiments.steps.torch_runs import built, sharing_copy, times_beside
from experiments.steps.torch_sizes import for_a_cpu, torch_model
from remat.execution import PlanOptions, find_plan
from remat.link import parse_link
from remat.torch.following.in_one_graph import InOneGraph
from remat.torch.following.module import Rematerialized
from remat.torch.frontend import graphs as frontend
from remat.torch.measuring.measure import peak_of_step
from remat.torch.measuring.plain import plain_step
from remat.torch.planning.book import PlanBook
from remat.torch.planning.capturing import captured_step, default_gpu
from remat.torch.planning.eager import Eager
from remat.torch.planning.planner import Planner
from remat.torch.step.blocks import blocks_of
from remat.torch.step.branches import describe_inputs

aten = torch.ops.aten
# Operators whose results selective checkpointing keeps, because they are expensive to compute.
SAVED = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip
COST_CACHE = RUNS_FOLDER / "cache" / "costs"


class TorchSteps(Subject):
    """A model with its loss, its arguments and its captured step with costs; `Method.run` is a module.

    Args:
        implementations: which implementations its plans choose from, as in `remat.torch.rematerialize`.
    """

    def __init__(self, job: Job, implementations: str):
        torch._dynamo.reset()
        gc.collect()  # frees the model before this one
        if job.device == "cuda":
            torch.cuda.empty_cache()
        self.job = job
        spec = torch_model(job.model)
        spec = for_a_cpu(spec) if job.device == "cpu" else spec
        self.batch = spec.batch_size
        torch.set_num_threads(job.threads)
        self.module, self.args = built(spec, job.device)
        self.buffers = copy.deepcopy(dict(self.module.named_buffers()))
        options = PlanOptions(
            cost=job.cost, time_limit_s=job.time_limit_s, threads=job.threads, gpu=default_gpu(job.device),
            cache_folder=COST_CACHE, link=parse_link(job.link or None),
        )  # fmt: skip
        backend = Eager(implementations)
        self.planner = Planner(spec.name, options, job.device, backend)
        self.step = captured_step(self.module, self.args, {}, backend, spec.name)
        self.own = self.planner.surrounded(self.step, describe_inputs(self.args))
        self.graph = self.planner.weigh(self.own.graph, self.step)
        frontend.remember(self.step, self.graph)  # for torch_mincut
        self.fixed_bytes = self.step.graph.fixed_bytes
        self.known: list[remat.Plan] = []  # the portfolio starts from these

    def plain(self) -> Method:
        return self.followed(self.module, self.module)

    def peers(self) -> Iterator[Candidate]:
        """Checkpoints per block, selective checkpointing, and the min-cut partitioner, if the job wants them."""
        if self.job.steps != "peers":
            return
        if list(blocks_of(self.module)):
            yield self._by_hand("checkpoint_blocks", "1 of 1", 1, selective=False)
            yield self._by_hand("checkpoint_blocks", "1 of 2", 2, selective=False)
            yield self._by_hand("selective_checkpoint", "products kept", 1, selective=True)
        self.known += self.mincut.values()
        for share, plan in self.mincut.items():
            make = functools.partial(self.planned, "torch_mincut", plan, None)
            yield Candidate("torch_mincut", f"{share:g}", make)

    def _by_hand(self, name: str, parameter: str, every: int, *, selective: bool) -> Candidate:
        def make() -> Method:
            kinds = (checkpointed(self.module, every, selective=selective, replays_random=r) for r in (True, False))
            return self.followed(*kinds)

        return Candidate(name, parameter, make)

    @functools.cached_property
    def mincut(self) -> dict[float, remat.Plan]:
        """[``activation_memory_budget``] plan of the min-cut partitioner; equal plans once."""
        plans: dict[float, remat.Plan] = {}
        for member in remat.family(self.graph, "torch_mincut", scope="free"):
            if not any(np.array_equal(member.plan.order, known.order) for known in plans.values()):
                plans[member.parameters["activation_memory_budget"]] = member.plan
        return plans

    def budgets(self, known: Sequence[Row]) -> Iterator[tuple[str, int]]:
        """The peaks of plain step and peers, if the job wants them, then the fractions of the activation memory."""
        if self.job.steps == "peers":
            peaks = {peak_of(row) for row in known if row["method"] != PORTFOLIO} - {None}
            yield from ((f"as {peak / 1e6:.1f} MB", peak) for peak in sorted(peaks, reverse=True))
        yield from super().budgets(known)

    def best_within(self, budget_bytes: int) -> Method:
        """It costs no more than any known plan that fits."""
        plan = find_plan(self.graph, budget_bytes, self.planner.options, self.known).plan
        assert plan is not None
        self.known.append(plan)
        return self.planned("portfolio", plan, budget_bytes)

    def planned(self, name: str, plan: remat.Plan, budget_bytes: int | None) -> Method:
        """The module that executes a plan."""
        plan = plan.on(self.graph)
        step_plan = self.own.planned(
            self.graph, plan, name, budget_bytes, self.job.cost, implementations=self.planner.backend.implementations
        )
        plans = PlanBook({self.own.fingerprint.sha256: step_plan})  # as in `rematerialize(plan=...)`
        module = Rematerialized(InOneGraph(self.module, replace(self.planner, plans=plans)), step_plan)
        cost = step_plan.trace.cost
        overhead = cost / self.graph.total_cost - 1
        return Method(module, step_plan.peak_bytes, cost, overhead, len(step_plan.recomputed), plan)

    def followed(self, module: nn.Module, without_random: nn.Module) -> Method:
        """A method that is eager PyTorch code: its calls are followed on tensors without contents.

        `without_random` is the same module, but it restores no random state: these tensors have none.
        """
        if any(isinstance(part, nn.RNNBase) for part in module.modules()):
            # On such tensors these layers run unrolled, which needs other memory than their kernels.
            return Method(module, ns=self.graph.total_cost if module is self.module else None)
        try:
            plain = plain_step(without_random, self.args, {})
        except RuntimeError as error:  # e.g. a checkpoint's own checks need real tensors
            return Method(module, note=f"cannot be predicted: {str(error).splitlines()[0]}")
        of = self.planner.weigh_calls(plain.signatures, self.graph)
        peak = self.fixed_bytes + plain.peak_bytes({signature: size for signature, (size, _) in of.items()})
        ns = sum(of[s][1] for s in plain.signatures if s)
        return Method(module, peak, ns, ns / self.graph.total_cost - 1)

    def peak_bytes(self, method: Method) -> int:
        return self.fixed_bytes + peak_of_step(method.run, self.args, {}, self.job.device)

    def same_as(self, method: Method) -> str | None:
        """``plain``, '' or None."""
        if self._left_by_plain is None:
            return None
        return PLAIN if self._left_by_plain == self._left_by(method.run) else ""

    @functools.cached_property
    def _left_by_plain(self) -> list[str] | None:
        """`_left_by` of the plain step; None if it differs from run to run (atomics on a GPU)."""
        left = self._left_by(self.module)
        return left if left == self._left_by(self.module) else None

    def _left_by(self, module: nn.Module) -> list[str]:
        """Hashes of loss, gradients, buffers and random state after one step from the same beginning."""
        loss = self._step_from_the_beginning(module)
        tensors = [loss.detach(), *(p.grad for p in self.module.parameters() if p.grad is not None)]
        tensors += [*self.module.buffers(), torch.get_rng_state()]
        tensors += [torch.cuda.get_rng_state()] if self.job.device == "cuda" else []
        left = [hashlib.sha256(x.cpu().reshape(-1).view(torch.uint8).numpy().data).hexdigest() for x in tensors]
        self.module.zero_grad()
        return left

    def _step_from_the_beginning(self, module: nn.Module) -> Tensor:
        """The loss of a step from the first buffers and random state; the gradients stay in the parameters."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self.buffers[name])
        torch.manual_seed(1)
        loss = module(*self.args)
        loss.backward()
        return loss

    def measured(self, method: Method) -> dict[str, Any]:
        """Times, gradient errors, and the implementations that the plan chooses."""
        rounds = self.job.rounds
        columns = times_beside(self.module, method.run, self.args, self.job.device, rounds) if rounds else {}
        if {*self.job.choices} != {"default"}:
            is_plain = method.run is self.module
            columns["gradient_error"] = rounding_error(self) if is_plain else gradient_error(self, method)
        if method.plan is not None and self.graph.has_implementations:
            columns["chosen"] = dict(collections.Counter(name for name in method.plan.choices if name).most_common())
            columns["held"] = held_by_those_who_offer(self.graph, method.plan)
        return columns

    def gradients(self, module: nn.Module) -> dict[str, Tensor]:
        """[parameter] a copy of its gradient after one step, if it has one."""
        self._step_from_the_beginning(module)
        kept = {name: p.grad.detach().clone() for name, p in self.module.named_parameters() if p.grad is not None}
        self.module.zero_grad()
        return kept


def gradient_error(subject: TorchSteps, method: Method) -> float:
    """Largest difference of a gradient from the plain step's, over the plain step's largest gradient."""
    return _difference(subject.gradients(subject.module), subject.gradients(method.run))


def rounding_error(subject: TorchSteps) -> float:
    """The same for the plain step after the last bit of every parameter changed: the effect of rounding alone."""
    plain = subject.gradients(subject.module)
    parameters = list(subject.module.parameters())
    before = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in parameters:
            up = torch.rand(p.shape, generator=generator) < 0.5
            p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf).to(p)))
    try:
        return _difference(plain, subject.gradients(subject.module))
    finally:
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)


def _difference(plain: dict[str, Tensor], ours: dict[str, Tensor]) -> float:
    assert plain.keys() == ours.keys()
    largest = max(float(x.abs().max()) for x in plain.values())
    return max(float((x - ours[name]).abs().max()) for name, x in plain.items()) / largest if largest else 0.0


def checkpointed(
    model: nn.Module, every: int = 1, *, selective: bool = False, replays_random: bool = True
) -> nn.Module:
    """A copy of `model` with shared parameters, in which every `every`-th block is a checkpoint.

    Args:
        selective: keep the results of `SAVED` within blocks.
        replays_random: restore the random generator's state, as users must; fake tensors have none.
    """
    wrapped = sharing_copy(model)
    context: dict[str, Any] = {}
    if selective:
        context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
    for i, name in enumerate(list(blocks_of(wrapped))):
        if i % every == 0:
            block = wrapped.get_submodule(name)
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=replays_random, **context
            )
    return wrapped


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
