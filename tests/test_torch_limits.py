"""The guide's lists of limits: a test holds each line."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import refused

torch = pytest.importorskip("torch")

from torch import Tensor, distributed, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_helpers import MARKS, Applies, Between, autocast, rematerialize, squares, step  # noqa: E402

import remat.torch as rt  # noqa: E402
from remat.torch.measuring.measure import difference_of_steps  # noqa: E402
from remat.torch.planning.planner import READ_BY_LOSS, there_before  # noqa: E402

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]
HERE = Path(__file__).parent
GUIDE = HERE.parent / "docs" / "how-to" / "pytorch.md"
HELD = {  # words of the guide, and the tests that hold them
    "Control flow that depends on values": "refusals::test_a_refusal_names_the_users_line",
    "branches on [masks]": "masks::test_each_kind_of_mask_has_the_plain_bits_and_one_plan",
    "cannot follow, except between `parts=`": "refusals::test_a_refusal_names_the_users_line",
    "the last line of your code": "refusals::test_a_refusal_names_the_users_line",
    "the library behind it": "refusals::test_a_refusal_names_the_users_line",
    "and the module.": "refusals::test_an_observer_of_quantization_is_named_by_its_module",
    "Sizes that depend on values": "refusals::test_a_refusal_names_the_users_line",
    "numbers (`.item()`)": "refusals::test_a_refusal_names_the_users_line",
    "reads, except between `parts=`": "refusals::test_graph_convolutions_train_in_parts",
    "Backward hooks of modules": "refusals::test_a_module_with_a_backward_hook_is_named",
    "A hook on the planned module works": "refusals::test_what_is_said_instead_of_a_backward_hook_works",
    "of a subclass of `Tensor`": "refusals::test_tensors_of_other_kinds_are_refused_with_the_way_out",
    "consist of several": "refusals::test_a_parameter_that_consists_of_several_tensors_is_refused_by_name",
    "keeps gradient history": "refusals::test_a_buffer_that_keeps_history_is_refused_by_name",
    "`requires_grad_()` of an argument": "refusals::test_a_leaf_that_is_an_argument_or_an_output_is_refused",
    "`enable_input_require_grads`": "refusals::test_an_embedding_that_is_made_to_require_a_gradient_trains",
    "(`create_graph=True`)": "refusals::test_gradients_of_gradients_name_the_plain_model",
    "`torch.func` and forward-mode": "refusals::test_torch_func_names_the_plain_model",
    "forces as `torch.autograd.grad(": "refusals::test_forces_in_forward_have_the_bits_of_the_plain_step",
    "`ctx.set_materialize_grads(False)`": (
        "functions::test_a_function_that_asks_for_missing_gradients_is_refused_or_left_out_of_a_plan"
    ),
    "Sparse gradients": "execution::test_bad_input_gets_one_line",
    "`BatchNorm(momentum=None)`": "loops::test_a_batch_norm_that_averages_over_all_steps_is_refused_by_name",
    "`F.ctc_loss`": "limits::test_ctc_loss_is_refused",
    "NumPy's random numbers": "limits::test_random_numbers_that_are_not_pytorchs",
    "CUDA graphs": "compiled::test_cuda_graphs_in_the_settings_are_refused",
    "not on the current device": "limits::test_a_model_elsewhere_is_refused",
    "State in an attribute that each step changes": "state::test_state_that_cannot_be_followed_is_refused_by_name",
    "a list or dict that grows": "state::test_a_list_that_grows_is_refused_by_name_and_one_that_the_loop_clears_is_not",
    "module returns or stores": "features::test_whoever_reads_the_gradient_of_a_used_feature_is_refused",
    "and needs more than remat assumes": "limits::test_losses_that_need_more_than_is_assumed",
    "Several backward passes": "loss::test_a_retained_graph_that_is_not_counted_is_told_before_the_budget_is_exceeded",
    "`retain_graph=True` counts it": "loss::test_a_retained_graph_is_not_counted_with_every_option",
    "that the loop keeps beside": "limits::test_what_a_loop_does_besides_comes_on_top",
    "Gradients that are still held": "execution::test_what_comes_on_top_of_the_promise_is_counted_or_told_of",
    "a step leaves in attributes": "state::test_the_budget_counts_tensors_in_attributes",
    "Buckets of DistributedDataParallel": "limits::test_buckets_come_on_top",
    "A second forward pass": "limits::test_what_a_loop_does_besides_comes_on_top",
    "more threads": "limits::test_a_kernel_needs_more_with_more_threads",
    "whose state is larger": "execution::test_an_optimizer_that_was_not_counted_is_told_of",
    "512-byte blocks": "repeated::test_a_capture_for_a_gpu_has_its_kernels",
    "`torch.autograd.grad` of a": (
        "features::test_a_gradient_asked_for_together_with_those_of_parameters_is_said_to_be_incomplete"
    ),
    "A hook on the tensor's `grad_fn`": "features::test_a_hook_on_the_node_of_a_feature_sees_the_part_from_outside",
    "computes differently while it is traced": "masks::test_a_model_that_reads_other_values_is_warned_of_at_planning",
    "`torch.prod`": "limits::test_what_differs_in_last_bits_is_near",
    "Two calls of the module": "state::test_two_calls_before_a_backward_pass_have_the_plain_bits_or_a_warning",
    "views of one tensor": (
        "features::test_gradients_of_a_feature_and_a_view_of_it_are_said_to_be_added_in_another_order"
    ),
    "A penalty outside": "state::test_a_penalty_outside_is_said_to_be_added_in_another_order",
    "`nn.Bilinear`": "limits::test_what_differs_in_last_bits_is_near",
    "in two autocast regions": "limits::test_what_differs_in_last_bits_is_near",
    "a bidirectional layer": "limits::test_what_differs_in_last_bits_is_near",
    "in another memory layout": "limits::test_what_differs_in_last_bits_is_near",
    "PyTorch itself does not repeat": "limits::test_what_differs_in_last_bits_is_near",  # no test of the plain step
    '`backend="inductor"`: gradients': "execution::test_inductor_is_near_and_verified",
    "call `rematerialize` inside the context": "limits::test_the_plan_is_that_of_the_autocast_in_force",
    "State that the model keeps": "state::test_state_in_attributes_moves_from_step_to_step_as_in_the_plain_loop",
    "Planning leaves attributes": "state::test_a_run_that_is_not_the_users_step_leaves_attributes_alone",
    "Hooks and flags stay that a model sets up": "state::test_what_a_model_sets_up_in_its_first_call_is_kept",
    "Other methods": "limits::test_other_methods_are_the_plain_models",
    "one at a time": "limits::test_steps_in_another_thread",
    "is not pickled": "execution::test_what_is_set_on_it_reaches_the_model",
}


def test_each_line_of_the_lists_is_held_by_a_test() -> None:
    limits = GUIDE.read_text().partition("## Limits\n")[2]
    lists = re.findall(r"\*\*(.+?)\*\*\n\n((?:[- ] .*\n)+)", limits)
    lines = {name: [" ".join(each.split()) for each in text.removeprefix("- ").split("\n- ")] for name, text in lists}
    assert len(lines) == 5
    promised = [line for each in lines.values() for line in each]
    for line in promised:
        assert any(words in line for words in HELD), f"no test holds: {line}"
    for words, test in HELD.items():
        file, name = test.split("::")
        assert any(words in line for line in promised), f"the guide does not say: {words}"
        assert f"def {name}(" in (HERE / f"test_torch_{file}.py").read_text(), test


def test_ctc_loss_is_refused() -> None:
    def lost(x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
        return x * F.ctc_loss(x.log_softmax(-1)[:, None].expand(-1, 2, -1), labels, 6 + 0 * sizes, sizes)

    args = torch.randn(6, 8), torch.ones(2, 3, dtype=torch.int64), torch.full((2,), 3)
    with refused(rf"one graph: .*ctc_loss.* of {re.escape(__file__)}"):
        rematerialize(Between(lost, 8), args)


def test_random_numbers_that_are_not_pytorchs() -> None:
    """Dynamo would replace NumPy's by PyTorch's, and repeat those of Python's generators."""
    own, x = random.Random(1), torch.randn(6, 8)
    for between in (
        lambda x: x + torch.from_numpy(np.random.rand(8).astype(np.float32)),  # noqa: NPY002
        lambda x: x * np.random.randint(1, 5),  # noqa: NPY002
        lambda x: x * own.random(),
        lambda x: x * random.random(),
        lambda x: x * random.choice([1, 2]),
    ):
        with refused(rf"one graph: .* of {re.escape(__file__)}"):
            rematerialize(Between(between, 8), (x,))
    model, found = Between(lambda x: x * random.uniform(1, 2), 8), []  # one of those that it reads anew in each step
    for each in (rematerialize(model, (x,)), model):
        random.seed(1)
        found.append([each(x) for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][1])


def test_a_model_elsewhere_is_refused() -> None:
    with refused("move both to the CPU or to one CUDA device"):
        rematerialize(Between().to("meta"), (torch.randn(6, 16),))


def test_the_plan_is_that_of_the_autocast_in_force() -> None:
    x = torch.randn(6, 16)
    plain = rematerialize(Between(), (x,)).plan
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = rematerialize(Between(), (x,)).plan
    kinds = [{operation.kind for operation in plan.graph.operations} for plan in (plain, cast)]
    assert ["aten._to_copy" in each for each in kinds] == [False, True]


class Doubled(Between):
    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2 + self.a(x)


def test_other_methods_are_the_plain_models() -> None:
    x = torch.randn(6, 16)
    planned = rematerialize(Doubled(), (x,))
    assert torch.equal(planned.twice(x), planned.model.twice(x))
    assert not planned._step.compiled
    planned(x)
    assert planned._step.compiled


def test_steps_in_another_thread() -> None:
    args = (torch.randn(6, 16),)
    planned, found = rematerialize(Between(), args), list[float]()

    def compare() -> None:
        found.append(difference_of_steps(planned.model, planned, args, {}, "cpu"))

    compare()
    other = threading.Thread(target=compare)
    other.start()
    other.join()
    assert found == [0, 0]


# Last bits


def in_two_regions(self: Any, x: Tensor) -> Tensor:
    with autocast():
        h = self.a(x)
    h = torch.tanh(h.float())
    with autocast():
        return self.a(h)


def cast_by_hand_too(self: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(self.a(torch.tanh(self.a(x)))), self.a.weight.to(torch.bfloat16))


def turned(output: Tensor) -> Tensor:
    return output.t().contiguous().square().mean()


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {  # name -> (model, context, loss)
    "prod": (lambda: Between(lambda h: h * torch.prod(h, 1, keepdim=True)), contextlib.nullcontext, squares),
    "addcdiv": (
        lambda: Between(lambda h: torch.addcdiv(h, h, h.abs() + 1, value=0.3)), contextlib.nullcontext, squares,
    ),
    "bilinear": (
        lambda: Applies(lambda self, x: self.bilinear(torch.tanh(x), x), 0, bilinear=nn.Bilinear(16, 16, 8)),
        autocast, squares,
    ),
    "regions": (lambda: Applies(in_two_regions), contextlib.nullcontext, squares),
    "by hand": (lambda: Applies(cast_by_hand_too), autocast, squares),
    "bidirectional": (
        lambda: Applies(lambda self, x: self.rnn(x)[0], 0, rnn=nn.GRU(16, 8, bidirectional=True)),
        autocast, squares,
    ),
    "layout": (Between, contextlib.nullcontext, turned),
}  # fmt: skip


CAST = ("bilinear", "regions", "by hand", "bidirectional")


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_in_last_bits_is_near(name: str) -> None:
    """A case that no longer differs leaves the guide's list."""
    make, context, loss_of = DIFFERENT[name]
    x = torch.randn(*((8, 4, 16) if name == "bidirectional" else (40, 16)), requires_grad=name == "bidirectional")
    plain = make()
    with context():
        ours = rematerialize(copy.deepcopy(plain), (x,))
    differs = False
    for seed in range(3):
        plain.zero_grad()
        ours.zero_grad()
        theirs, mine = (step(each, (x,), loss_of, seed, context) for each in (plain, ours))
        assert theirs.keys() == mine.keys()
        for one, other in zip(theirs.values(), mine.values(), strict=True):
            differs |= not torch.equal(one, other)
            nearest = {"rtol": 0.1, "atol": 0.01} if name in CAST else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(one, other, **nearest)
    assert differs


# Memory


def mean_of_squares(output: Tensor, y: Tensor) -> Tensor:
    return ((output - y) ** 2).mean()


def gaussian(output: Tensor, y: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output, y, torch.ones_like(y))


def divergence(output: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(output, -1), y, reduction="batchmean")


def of_classes(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y[:, 0].long())


def entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(output.sigmoid(), y)


def with_half_targets(output: Tensor, _y: Tensor) -> Tensor:
    return F.mse_loss(output, HALF)


HALF = torch.rand(256, 512).bfloat16()
NEEDS = {  # loss -> times the outputs' bytes that it needs, and of outputs in half precision
    F.l1_loss: (5, 9), divergence: (5, 10), mean_of_squares: (6, 11), gaussian: (7, 13),
    entropy: (5, None),  # PyTorch refuses it under autocast
    with_half_targets: (5, 9),
}  # fmt: skip


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "autocast"])
def test_losses_that_need_more_than_is_assumed(is_half: bool) -> None:
    """The peak of the plain step, which is predicted and which wide outputs make."""
    model, x, y = nn.Linear(16, 512), torch.randn(256, 16), torch.rand(256, 512)
    output_bytes, assumed_times = (2, 7) if is_half else (4, 4)
    with autocast() if is_half else contextlib.nullcontext():
        assumed = rematerialize(model, (x,)).plan.plain_peak_bytes

        def times(loss: Any) -> float:
            plan = rematerialize(model, (x,), loss=lambda output: loss(output, y)).plan
            return (
                assumed_times + (plan.plain_peak_bytes - plan.fixed[READ_BY_LOSS] - assumed) / output_bytes / y.numel()
            )

        for loss in (of_classes, F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits):
            assert times(loss) <= assumed_times
        for loss, needed in NEEDS.items():
            if needed[is_half]:
                assert times(loss) == pytest.approx(needed[is_half], abs=0.01), loss.__name__


def test_what_a_loop_does_besides_comes_on_top() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 512)), torch.randn(256, 16)
    ours = rematerialize(model, (x,), loss=squares)

    def usual() -> None:
        output = ours(x)
        squares(output).backward()

    def second() -> None:
        outputs = ours(x), ours(x)
        (squares(outputs[0]) + squares(outputs[1])).backward()

    def kept() -> None:
        output = ours(x)
        doubled = output * 2
        doubled.retain_grad()
        squares(doubled).backward()

    def needed(loop: Callable[[], None]) -> int:
        ours.zero_grad()
        return there_before(ours.plan) + rt.measured_peak(loop)

    usual()
    assert needed(usual) <= ours.predicted_peak_bytes
    for loop in (second, kept):
        assert needed(loop) > ours.predicted_peak_bytes + x.nbytes, loop.__name__


def test_a_kernel_needs_more_with_more_threads() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)[:, None]
            return F.scaled_dot_product_attention(x, x, x)

    before, promised = torch.get_num_threads(), []
    try:
        for n in (1, 4):
            torch.set_num_threads(n)
            promised.append(rematerialize(Attends(), (torch.randn(2, 64, 16),)).predicted_peak_bytes)
    finally:
        torch.set_num_threads(before)
    assert promised[0] < promised[1]


@pytest.mark.parametrize("is_view", [False, True])
def test_buckets_come_on_top(is_view: bool) -> None:
    """In a process that is the only one of its group, without a network."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(4, 64)
    ours = rematerialize(model, (x,))

    def loop(make: Callable[[nn.Module], nn.Module]) -> None:
        module = make(ours)
        for _ in range(3):
            squares(module(x)).backward()
            ours.zero_grad()

    def in_buckets(module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=is_view)

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        loop(in_buckets)
        peaks = [rt.measured_peak(lambda make=make: loop(make)) for make in (lambda module: module, in_buckets)]
    finally:
        distributed.destroy_process_group()
    gradients = sum(p.nbytes for p in model.parameters())
    assert peaks[0] <= ours.predicted_peak_bytes - there_before(ours.plan)
    assert peaks[1] - peaks[0] == pytest.approx(gradients, rel=0.05)
