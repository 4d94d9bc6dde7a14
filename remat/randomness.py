"""Random numbers in compiled code, from a state of one number: xorshift64* (Vigna, 2016)."""

from __future__ import annotations

import numpy as np
from numba import njit


def random_state(seed: int) -> np.ndarray:
    """[1] uint64, the generator's first state; 0 is avoided, because it would stay 0."""
    return np.array([(seed * 0x9E3779B97F4A7C15 + 0x1234567) % 2**64 or 1], dtype=np.uint64)


@njit(cache=True, nogil=True)
def uniform(state: np.ndarray) -> float:
    """Uniform in [0, 1); the state goes on."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True, nogil=True)
def below(state: np.ndarray, n: int) -> int:
    """Uniform in 0 .. n - 1."""
    return min(int(uniform(state) * n), n - 1)
