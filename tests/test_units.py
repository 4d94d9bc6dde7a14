"""Sizes and names: what a user writes and what is printed."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import refused

from remat.errors import unknown_name
from remat.units import format_cost, format_size, parse_size


def test_sizes_are_read_exactly():
    for text, size in {
        "16GB": 16 * 10**9, "8gb": 8 * 10**9, " 7.5 GiB ": 8053063680, "1e9": 10**9, "0": 0, "2KiB": 2048,
        "1TB": 10**12, "100 B": 100, 5: 5, 1e9: 10**9, np.int64(7): 7, "9007199254740993": 9007199254740993,
        "0.1GB": 10**8,
    }.items():  # fmt: skip
        assert parse_size(text) == size
        assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    "text",
    ["-1GB", -5, "eight", "8 apples", "GB", "", "1.5", 1.5, float("nan"), float("inf"), "1e400", "1e40", "2**30",
     None, True, [1], "8GB GB", "nan", 10**400, "9" * 500],
)  # fmt: skip
def test_what_is_no_size_is_refused_in_one_line(text):
    # no unit is suggested for what is no number
    with refused(r"must be a finite number, not (nan|inf)$" if text != text or text == float("inf") else ".") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 200


def test_sizes_and_costs_are_printed_in_both_readings():
    assert format_size(16 * 10**9) == "16.00 GB (14.90 GiB)"
    assert format_size(51380224) == "51.38 MB (49.00 MiB)"
    assert format_size(12) == "12 B"
    assert format_cost(1500000, "ns") == "1.50 ms"
    assert format_cost(58896187392, "flop") == "58.896 GFLOP"
    assert format_cost(12, "apples") == "12 apples"
    for size in (5_031_424, 4096, 999, 10**9, 10**9 + 1, 2**30, 7_777_777_777):  # to ask for: enough as it is printed
        for text in format_size(size, up=True).rstrip(")").split(" ("):
            assert size <= parse_size(text) <= 1.01 * size + 1
    assert str(unknown_name("thing", "qq", [f"n{i:03}" for i in range(300)])).endswith("n058, n059 and 240 more")
