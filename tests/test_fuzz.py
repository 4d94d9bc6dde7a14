"""Twenty of the random PyTorch modules that `make fuzz` tries by the hundred."""

from __future__ import annotations

import pytest
import random_modules

# A convolution's backward kernel takes 3 kB more in the step than when it was measured alone, on the same tensors.
OPEN = {4: "the workspace of convolution_backward is larger in the step: 3.9 % over the budget of 77 kB"}


def seeds(n: int) -> list[object]:
    """The first `n` seeds; those with a known defect must fail until it is mended."""
    marks = {seed: [pytest.mark.xfail(strict=True, reason=why)] for seed, why in OPEN.items()}
    return [pytest.param(seed, marks=marks.get(seed, [])) for seed in range(n)]


@pytest.mark.parametrize("seed", seeds(20))
def test_random_modules_keep_their_bits_and_their_promise(seed: int) -> None:
    outcome = random_modules.check(seed)
    assert outcome.startswith(("ok", "refused")), f"seed {seed}: {outcome}"
