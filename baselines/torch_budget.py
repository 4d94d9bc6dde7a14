"""PyTorch's ``activation_memory_budget`` with each of its solvers and estimators of runtimes."""

from __future__ import annotations

from collections.abc import Iterator

from baselines._partitioner import captured_again, partitioned
from remat import Candidate, Problem, strategy

CHOICES = {"estimator": ("flops", "profile"), "solver": ("dp", "greedy", "ilp")}


@strategy("torch_budget", baseline=True, ignores_budget=True, prepare=captured_again, version=2, allowed=CHOICES)
def torch_budget(problem: Problem, *, solver: str | None = None, estimator: str | None = None) -> Iterator[Candidate]:
    """All that PyTorch's knob for compiled steps can choose to save: every solver, estimator and share.

    As `torch_mincut`, which is one of its solvers with one estimator. The knob's own default comes first: FLOPs and the
    dynamic program. Each plan is the choice of tensors alone, recomputed once where the backward pass first reads
    them, without Inductor's fusion.

    Deviation: PyTorch's profiling estimator runs on CUDA devices only. Here ``profile`` is the cost of the graph's
    operations, measured or modelled, on any device.

    Args:
        solver: ``activation_memory_budget_solver``: ``dp``, ``greedy``, ``ilp``; None for all of them.
        estimator: ``activation_memory_budget_runtime_estimator``: ``flops``, ``profile``; None for both.

    @misc{pytorch_budget, title={Current and new activation checkpointing techniques in {PyTorch}},
    author={{The PyTorch team}}, howpublished={https://pytorch.org/blog/activation-checkpointing-techniques/},
    year={2025}}
    """
    estimators = CHOICES["estimator"] if estimator is None else (estimator,)
    solvers = CHOICES["solver"] if solver is None else (solver,)
    return partitioned(problem, estimators, solvers)
