"""The page in a real browser: opens from a file, asks nobody, sorts, filters, redraws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fake_run
import pytest
from browser import open_page

from analysis.html_page import script_json
from analysis.page import command_of, page
from analysis.results import load_run


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with every kind of result."""
    folder = fake_run.full_run(tmp_path_factory.mktemp("full"))
    (folder / "page.html").write_text(page(load_run(folder)))
    return folder / "page.html"


def test_a_page_is_one_file_with_one_plotly_that_no_text_of_a_result_can_leave(full: Path) -> None:
    text = full.read_text()
    assert text == page(load_run(full.parent))
    assert text.count("plotly.js v") <= 2
    assert len(text) < 5_600_000
    head = text[: text.index('<script type="application/json"')]
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", head)
    for said in ("python run.py model=chain budget=sweep", "my newcomer", "0123456789abcdef"):
        assert said in head
    assert "</script><b>" not in text
    assert "fits &lt;/script&gt;&lt;b&gt;" in text
    assert json.loads(script_json({"a": "</script>&"})) == {"a": "</script>&"}


def test_the_command_of_a_run_asks_the_same_question() -> None:
    config = {
        "model": {"name": "vgg16"}, "gpu": {"name": "v100"}, "dtype": "float16", "seed": 0, "deterministic": False,
        "work_limit": 50, "target_gap": 1e-4, "solver": None, "options": {"checkmate_milp": {"solver": "scip"}},
    }  # fmt: skip
    assert command_of({"config": config}) == (
        "python run.py model=vgg16 gpu=v100 seed=0 dtype=float16 work_limit=50 options.checkmate_milp.solver=scip"
    )


def test_the_page_of_a_full_run_sorts_filters_and_redraws(browser: Any, full: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    open_page(browser, full)
    assert "overhead against budget" in browser.title
    for plot in ("overhead", "memory", "network"):
        assert browser.find_elements(By.CSS_SELECTOR, f"#{plot} svg.main-svg"), plot
        assert browser.find_elements(By.CSS_SELECTOR, f"#{plot} .trace, #{plot} .bars path"), plot
    assert browser.find_elements(By.CSS_SELECTOR, "#matrix .heatmaplayer image")
    titles = {one.get_attribute("data-title") for one in browser.find_elements(By.CSS_SELECTOR, ".modebar-btn")}
    assert titles
    assert not [title for title in titles if "hare" in title or "loud" in title]  # nothing leaves the page

    heads = browser.find_elements(By.CSS_SELECTOR, "#results thead th")
    column = [head.text.split(" (")[0].strip(" ↕") for head in heads].index("Overhead")

    def sorted_by_overhead() -> list[str]:
        heads[column].find_element(By.TAG_NAME, "button").click()
        return browser.execute_script(
            "return Array.from(document.querySelectorAll('#results tbody tr'), r => r.cells[arguments[0]].textContent)",
            column,
        )

    up = sorted_by_overhead()
    assert heads[column].get_attribute("aria-sort") == "ascending"
    values = [float(text.rstrip(" %")) for text in up[:12]]
    assert values == sorted(values)
    assert values[0] < values[-1]
    assert up[12:] == ["–"] * 13  # rows without a number stay last
    assert [float(text.rstrip(" %")) for text in sorted_by_overhead() if text != "–"] == values[::-1]

    browser.find_element(By.ID, "filter").send_keys("needs a chain")
    visible = [r.text for r in browser.find_elements(By.CSS_SELECTOR, "#results tbody tr") if r.is_displayed()]
    assert len(visible) == 5
    assert all("SKIPPED" in line for line in visible)
    assert browser.find_element(By.ID, "shown").text == "5 of 25 rows"

    before = browser.execute_script("return document.getElementById('memory').data[1].y")
    chooser = Select(browser.find_element(By.ID, "plan"))
    chooser.select_by_index(len(chooser.options) - 1)
    assert browser.execute_script("return document.getElementById('memory').data[1].y") != before
    assert browser.get_log("browser") == []


def test_a_page_without_any_plan_says_why(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    folder = fake_run.failed_run(tmp_path)
    (folder / "page.html").write_text(page(load_run(folder)))
    open_page(browser, folder / "page.html")
    assert "No strategy has a plan" in browser.find_element(By.CSS_SELECTOR, ".banner").text
    assert "needs a chain" in browser.find_element(By.ID, "failures").text
    assert not browser.find_elements(By.ID, "overhead")
