"""Plans for one of several ranks, over which FSDP2 divides a model."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, refused
from torch import Tensor, nn
from torch_helpers import MARKS, rows

import remat.torch as rt
from experiments.steps import shard_ranks
from remat.torch.parts.opaque import followed_step
from remat.torch.resident.shard import Sharding, bytes_per_rank
from remat.torch.step.blocks import repeated_blocks

pytestmark = MARKS
WIDTH = 16
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
QUICK = {"strategy": "search", "cost": "roofline", "time_limit_s": 1.0}


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))


class Net(nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(n))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = x + each(x)
        return self.head(x).square().mean()


@pytest.mark.slow  # 40 s: two processes import PyTorch, plan and measure
def test_two_ranks_keep_the_promise_and_the_gradients() -> None:
    """FSDP2's own step, measured by the allocator, and the unsharded model's gradients are the judges."""
    found = shard_ranks.rows_of_ranks(2, 0.65, layers=3, time_limit_s=1.0)
    assert [row["rank"] for row in found] == [0, 1]
    for row in found:
        assert row["measured_bytes"] <= row["predicted_bytes"] <= row["budget_bytes"]
        assert row["measured_bytes"] >= 0.98 * row["predicted_bytes"]
        assert row["plain_measured_bytes"] == pytest.approx(row["plain_predicted_bytes"], rel=0.02)
        assert row["budget_bytes"] == math.floor(0.65 * row["plain_predicted_bytes"])
        assert row["gathered"] == 2  # blocks: the one that runs, and the one that is gathered next
        assert row["overhead"] > 0
        assert row["gradients_differ"] < 1e-6  # the order of additions over ranks may differ
        assert row["parameters_differ"] < 1e-3  # AdamW divides small gradients by their size


def test_the_arithmetic_of_one_rank() -> None:
    """Rows are padded to a multiple of the ranks: 48 rows are 16 each of 3 ranks, 16 are 6 (18), 5 are 2 (6)."""
    model = Net(2)
    found = bytes_per_rank(model, 3, "adamw", ["blocks.0", "blocks.1"])
    a_block = 4 * (16 * WIDTH + 16 + 6 * 3 * WIDTH + 6)
    head = 4 * (2 * WIDTH + 2)
    assert found["parameters"] == found["gradients"] == 2 * a_block + head
    assert found["optimizer state"] == 2 * (2 * a_block + head)
    assert found["gathered"] == 3 * (2 * head + 3 * a_block)
    model.blocks.requires_grad_(False)
    frozen = bytes_per_rank(model, 3, None, ["blocks.0", "blocks.1"])
    assert (frozen["gradients"], frozen["optimizer state"]) == (head, 0)
    assert frozen["gathered"] == 3 * (2 * head + 2 * a_block)
    assert bytes_per_rank(Net(2), 1, "adamw")["parameters"] == sum(p.numel() * 4 for p in Net(2).parameters())


@pytest.mark.slow
def test_the_example_trains() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(ROOT / "examples" / "fsdp_loop.py")]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in done.stdout.partition("losses ")[2].split()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert "on each of 2 ranks" in done.stdout


@pytest.mark.slow
def test_a_plan_for_ranks_that_are_not_there() -> None:
    model, args = Net(2), rows(64, WIDTH)
    planned = rt.rematerialize(model, args, 1.0, shard=2, optimizer="adamw", **QUICK)
    held = bytes_per_rank(model, 2, "adamw")
    assert planned.plan.fixed_bytes == held["parameters"] + held["optimizer state"] + args[0].numel() * 4
    assert list(planned.plan.parts) == repeated_blocks(model) == ["blocks.0", "blocks.1"]
    assert "on each of 2 ranks" in str(planned.plan)
    with refused(r"start 2 processes \(torchrun --nproc-per-node=2\)"):
        planned(*args)
    with refused(r"prepare\(\) does not plan for a sharded model"):
        planned.prepare(args)


def test_what_passes_by_hardly_depends_on_the_number_of_ranks() -> None:
    """A sum by hand of FSDP2's buffers in a step with hardly any activations."""
    model, args = Net(3), rows(1, WIDTH)
    for ranks in (2, 4):
        held = bytes_per_rank(model, ranks)
        peak = max(followed_step(model, args, {}, "cpu", division=Sharding(ranks, BLOCKS, "cpu")).held_bytes)
        block = ranks * bytes_per_rank(model.blocks[0], ranks)["parameters"]
        head = ranks * bytes_per_rank(model.head, ranks)["parameters"]
        # After the second block's backward pass: the root, its gradient, the block, its gradient, the gathered first
        # block; of the third block the gradients that are being divided, and a rank's part of them.
        gradients = [sum(4 * p.numel() for p in module.parameters()) for module in (model.head, model.blocks[0])]
        assert held["gathered"] == 2 * head + 4 * block
        assert peak == pytest.approx(head + 3 * block + sum(gradients) + block / ranks, rel=0.04)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": 0}, "shard must be a number of ranks, 1 or more, not 0"),
        ({"shard": "2"}, "shard must be a number of ranks, 1 or more, not '2'"),
        ({"shard": 10**7}, "shard=10000000 is more than the model's 4885 parameters"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "give optimizer= as a name"),
        ({"accumulate": True}, "accumulate=True is not planned with shard="),
        ({"verify": True}, "verify=True is not planned with shard="),
        ({"backend": "inductor"}, "shard= does not go with backend='inductor'"),
        ({"implementations": "joint"}, "shard= does not go with implementations='joint'"),
    ],
)
def test_refusals_are_one_line(options, message) -> None:
    with refused(message):
        rt.rematerialize(Net(), rows(64, WIDTH), 0.8, **{"shard": 2, **QUICK, **options})


def test_models_that_cannot_be_divided() -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    scaled, tied = Net(), Net()
    scaled.scale = nn.Parameter(torch.ones(()))
    tied.blocks[1][0].weight = tied.blocks[0][0].weight
    for model, message in (
        (plain, "the model has no row of modules of one class"),
        (scaled, "does not divide the parameter 'scale'"),
        (tied, r"the parameter 'blocks.0.0.weight' is in several parts"),
    ):
        with refused(message):
            rt.rematerialize(model, rows(64, WIDTH), 0.8, shard=2, **QUICK)


@pytest.fixture
def group():
    """This process as the only one of a group, without a network."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_groups_and_models_that_are_divided_already() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1,))
    with refused(r"shard=2, but torch.distributed runs 1 process"):
        rt.rematerialize(Net(), rows(64, WIDTH), 0.8, shard=2, **QUICK)
    for options in ({"shard": 1}, {}):
        model = parallelize_module(Net(), mesh, {"head": ColwiseParallel()})
        with refused(r"'head.weight' is a DTensor: tensor parallelism is not planned"):
            rt.rematerialize(model, rows(64, WIDTH), 0.8, **options)
        with refused("the model is sharded already: give the plain model and shard="):
            rt.rematerialize(fully_shard(Net(), mesh=mesh), rows(64, WIDTH), 0.8, **options)
