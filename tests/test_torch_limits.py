"""The guide's lists of limits: a test holds each line about what is refused and about use."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import refused

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_helpers import MARKS, Between, rematerialize  # noqa: E402

from remat.torch.measuring.measure import difference_of_steps  # noqa: E402

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
    promised = [line for name in ("Refused, in one line", "Use") for line in lines[name]]
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
