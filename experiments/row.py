"""One result row: a solve and its provenance, as the store keeps them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One (graph, strategy, budget, seed); every field is a column of ``store/rows/<key>.parquet``.

    Attributes:
        key: hash of what determines the row.
        experiment: the run that solved it first.
        dtype: the graph's floating-point types, e.g. ``bfloat16+float32``; None without any.
        cost_source: ``modelled``, ``measured`` or ``file``.
        parameters, options, stats, versions: JSON objects; `stats` holds numbers for people, which decide nothing.
        options: given to the strategy; in `parameters` they are mixed with the plan's own.
        ended: what ended the solve, see `remat.solution.Ending`; '' if it returned by itself.
        cut_by_clock, contradicted, peak_bound_bytes: see `remat.Solution`.
        proof_from: the strategy whose proof ended the solve; None otherwise.
        proven_by: what proves `bound`, see `remat.Solution`; None if nothing had to be proven, or in older rows.
        certified_bound: of the solve's certificate; None without one, and in older rows.
        cost_cap: of the problem; None without one.
        gpu_memory_bytes: of the GPU of the costs.
        plan_file: relative to the store; None without a plan.
        plan_from: budget in bytes for which the plan was found, if it is reused here; None otherwise.
        store_all_peak_bytes: checkpoint-all's peak under the same accounting.
        finished_at: ISO 8601, UTC.
    """

    key: str
    experiment: str
    model: str | None
    framework: str | None
    granularity: str | None
    batch_size: int | None
    dtype: str | None
    graph_name: str
    graph_sha256: str
    gpu: str
    gpu_memory_bytes: int
    cost_model: str
    cost_source: str
    cost_unit: str
    strategy: str
    parameters: str
    options: str
    budget_bytes: int
    status: str
    cost: int | None
    bound: int | None
    gap: float | None
    overhead: float | None
    peak_bytes: int | None
    plan_file: str | None
    plan_from: int | None
    message: str
    ended: str
    cut_by_clock: bool | None
    contradicted: bool
    proof_from: str | None
    proven_by: str | None
    certified_bound: int | None
    peak_bound_bytes: int | None
    wall_s: float
    time_limit_s: float
    seed: int
    threads: int
    scope: str
    accounting: str
    cost_cap: int | None
    stats: str
    total_cost: int
    store_all_peak_bytes: int
    fixed_bytes: int
    n_operations: int
    n_edges: int
    git_commit: str | None
    git_dirty: bool | None
    versions: str
    cpu: str
    solver_build: str
    finished_at: str
