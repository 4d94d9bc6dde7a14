"""Sizes and names: what a user writes and what is printed."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import refused

from remat.errors import InvalidInput, unknown_name
from remat.units import format_cost, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9), ("16GiB", 17179869184), ("8gb", 8 * 10**9), (" 7.5 GiB ", 8053063680), ("1e9", 10**9),
        ("123", 123), ("0", 0), ("1.5MB", 1500000), ("2KiB", 2048), ("1TB", 10**12), ("100 B", 100), (5, 5),
        (1e9, 10**9),
        (np.int64(7), 7), ("9007199254740993", 9007199254740993), ("0.1GB", 10**8),
    ],
)  # fmt: skip
def test_sizes_are_read_exactly(text, size):
    assert parse_size(text) == size
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    "text",
    ["-1", "-1GB", -5, "eight", "8 apples", "GB", "", "1.5", 1.5, float("nan"), float("inf"), "1e400", "1e40", "2**30",
     None, True, [1], "8GB GB", "nan", "inf", 10**400, -(10**400), "9" * 500],
)  # fmt: skip
def test_what_is_no_size_is_refused_in_one_line(text):
    with refused() as caught:
        parse_size(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("size", [float("nan"), float("inf")])
def test_no_unit_is_suggested_for_what_is_no_number(size):
    with pytest.raises(InvalidInput, match=r"must be a finite number, not (nan|inf)$"):
        parse_size(size)


def test_both_readings_are_printed():
    assert format_size(16 * 10**9) == "16.00 GB (14.90 GiB)"
    assert format_size(2**30) == "1.07 GB (1.00 GiB)"
    assert format_size(51380224) == "51.38 MB (49.00 MiB)"
    assert format_size(12) == "12 B"


def test_only_nanoseconds_become_times():
    assert format_cost(1500000, "ns") == "1.50 ms"
    assert format_cost(58896187392, "flop") == "58.896 GFLOP"
    assert format_cost(12, "apples") == "12 apples"


@pytest.mark.parametrize("size", [5_031_424, 4096, 999, 10**9, 10**9 + 1, 2**30, 7_777_777_777])
def test_a_size_to_ask_for_is_enough_as_it_is_printed(size):
    for text in format_size(size, up=True).rstrip(")").split(" ("):
        assert size <= parse_size(text) <= 1.01 * size + 1


def test_the_line_about_an_unknown_name_lists_some_of_many() -> None:
    names = [f"n{i:03}" for i in range(300)]
    assert str(unknown_name("thing", "qq", names)).endswith("n058, n059 and 240 more")
