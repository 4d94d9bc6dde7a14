"""Three of the random PyTorch modules that `make fuzz` tries by the hundred."""

from __future__ import annotations

import pytest
import random_modules


@pytest.mark.parametrize("seed", range(3))
def test_random_modules_keep_their_bits_and_their_promise(seed: int) -> None:
    outcome = random_modules.check(seed)
    assert outcome.startswith(("ok", "refused")), f"seed {seed}: {outcome}"
