"""The page in a real browser: opens from a file, asks nobody, sorts, filters, redraws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fake_run
from browser import open_page

from analysis.html_page import Html, filled, script_json
from analysis.page import command_of, page
from analysis.results import load_run


def test_text_of_a_result_cannot_leave_its_place(tmp_path: Path) -> None:
    text = page(load_run(fake_run.full_run(tmp_path)))
    assert "</script><b>" not in text
    assert "fits &lt;/script&gt;&lt;b&gt;" in text
    assert json.loads(script_json({"a": "</script>&"})) == {"a": "</script>&"}


def test_a_block_of_the_page_without_its_value_is_left_out() -> None:
    assert filled("run.html", {}) == ""
    text = filled("run.html", {"title": "<x>", "network": "", "failures": Html("<b>none</b>")})
    assert [line for line in text.splitlines() if line.startswith("<h1>")] == ["<h1>&lt;x&gt;</h1>"]
    assert text.count("<section") == 2
    assert "</h2><b>none</b></section>" in text


def test_page_is_one_file_with_one_plotly(tmp_path: Path) -> None:
    folder = fake_run.full_run(tmp_path)
    run = load_run(folder)
    text = page(run)
    assert text == page(run)
    assert text.count("plotly.js v") <= 2
    assert len(text) < 5_600_000
    head = text[: text.index('<script type="application/json"')]
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", head)
    assert "python run.py model=chain budget=sweep" in head
    assert "my newcomer" in head
    assert "0123456789abcdef" in head


def test_the_command_of_a_run_asks_the_same_question() -> None:
    config = {
        "model": {"name": "vgg16"}, "gpu": {"name": "v100"}, "dtype": "float16", "seed": 0, "deterministic": False,
        "work_limit": 50, "target_gap": 1e-4, "solver": None, "options": {"checkmate_milp": {"solver": "scip"}},
    }  # fmt: skip
    assert command_of({"config": config}) == (
        "python run.py model=vgg16 gpu=v100 seed=0 dtype=float16 work_limit=50 options.checkmate_milp.solver=scip"
    )


def opened(browser: Any, folder: Path) -> None:
    """Write the page of a run and open it."""
    (folder / "page.html").write_text(page(load_run(folder)))
    open_page(browser, folder / "page.html")


def texts(browser: Any, column: int) -> list[str]:
    script = "return Array.from(document.querySelectorAll('#results tbody tr'), r => r.cells[arguments[0]].textContent)"
    return browser.execute_script(script, column)


def test_full_page(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    folder = fake_run.full_run(tmp_path)
    opened(browser, folder)
    assert "overhead against budget" in browser.title
    for plot in ("overhead", "memory", "network"):
        assert browser.find_elements(By.CSS_SELECTOR, f"#{plot} svg.main-svg"), plot
        assert browser.execute_script(
            "return document.querySelectorAll(arguments[0]).length", f"#{plot} .trace, #{plot} .bars path"
        ), plot
    assert browser.find_elements(By.CSS_SELECTOR, "#matrix .heatmaplayer image")
    buttons = browser.find_elements(By.CSS_SELECTOR, ".modebar-btn")
    titles = {button.get_attribute("data-title") for button in buttons}
    assert titles
    assert not [title for title in titles if "hare" in title or "loud" in title]  # nothing leaves the page

    heads = browser.find_elements(By.CSS_SELECTOR, "#results thead th")
    names = [head.text.split(" (")[0].strip(" ↕") for head in heads]
    overheads = names.index("Overhead")
    heads[overheads].find_element(By.TAG_NAME, "button").click()
    assert heads[overheads].get_attribute("aria-sort") == "ascending"
    shown = texts(browser, overheads)
    values = [float(t.rstrip(" %")) for t in shown if t != "–"]
    assert len(values) == 12
    assert values == sorted(values)
    assert values[0] < values[-1]
    assert shown[12:] == ["–"] * 13  # rows without a number stay last
    heads[overheads].find_element(By.TAG_NAME, "button").click()
    again = [float(t.rstrip(" %")) for t in texts(browser, overheads) if t != "–"]
    assert again == sorted(values, reverse=True)

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


def test_page_of_failures(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    opened(browser, fake_run.failed_run(tmp_path))
    assert "No strategy has a plan" in browser.find_element(By.CSS_SELECTOR, ".banner").text
    assert "needs a chain" in browser.find_element(By.ID, "failures").text
    assert not browser.find_elements(By.ID, "overhead")
