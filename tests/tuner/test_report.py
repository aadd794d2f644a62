"""Reports: the page is whole and offline, says what was found, and holds with little, nothing and odd names."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fakes import FakeLab, prices, tuned

from specflow.types import Counts
from tuner.chart import Axes, line_chart
from tuner.explain import explain
from tuner.hints import hints_on
from tuner.report import report
from tuner.result import BreakEven, TuneResult
from tuner.words import break_even_line

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Sees that every tag is closed, and what would be loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.plots = self.scripts = 0
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.plots += tag == "svg" and found.get("class") == "plot"
        for name in ("src", "href", "xlink:href"):
            if (value := found.get(name)) and not value.startswith(("data:", "#")):
                self.outside.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """Everything there is to show: methods, loads, classes, objectives, refusals."""
    lab = FakeLab(
        {"good": 0.85, "poor": 0.3}, prices(per_row=0.004), broken={"lost": "preflight"}, by_category={"chat": 0.4}
    )
    folder = tmp_path_factory.mktemp("tune")
    return tuned(
        folder, lab, "good", "poor", "lost", concurrency=(1, 16), objectives=("throughput", "latency", "memory")
    )


PLOTS = 12
"""Predicted, round, throughput and latency twice, acceptance twice, context, Pareto, importance, load."""


def one(folder: Path, *names: str, **chances: float) -> TuneResult:
    return tuned(folder, FakeLab(dict.fromkeys(names, 0.8) | chances), *names)


def test_the_page_is_whole_and_loads_nothing(whole: TuneResult) -> None:
    page = Page(report(whole))
    assert page.outside == []
    assert page.scripts == 0
    assert page.plots == PLOTS


@pytest.mark.parametrize(("deepest", "ticks"), [(1.0, "0 1"), (3.0, "0 1 2 3"), (48.0, "0 10 20 30 40 50")])
def test_no_tick_stands_between_two_draft_positions(deepest: float, ticks: str) -> None:
    drawn = line_chart(Axes("Acceptance", "draft position", "share", counts=True), {"ngram": [(deepest, 0.5)]})
    assert re.findall(r'font-size="11"[^>]*"middle"[^>]*>([^<]*)<', drawn) == ticks.split()


def test_it_says_what_was_found(whole: TuneResult) -> None:
    text = report(whole)
    assert whole.answer.choice.label in text
    assert "no trained weights" in text
    assert "plain steps, so it pays above acceptance length" in text
    assert "Pareto front" in text
    assert "bonus token" in text


@pytest.mark.parametrize("names", [("one",), (), ("naïve-草稿", "<b>&amp;</b>")])
def test_it_renders_with_one_recipe_with_none_and_with_odd_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = one(tmp_path, *names)
    text = report(found)
    Page(text)
    assert "<b>&amp;</b>" not in text
    assert explain(found)
    if "naïve-草稿" in names:
        assert "naïve-草稿" in text


def test_no_recipe_applies_and_all_reasons_are_there(tmp_path: Path) -> None:
    found = tuned(tmp_path, FakeLab({}, broken={"a": "preflight", "b": "profile"}), "a", "b")
    text = report(found)
    Page(text)
    assert not found.answer.speculate
    assert "no trained weights" in text
    assert "too noisy" in text


def test_words_say_the_same_as_the_page(whole: TuneResult) -> None:
    words, page = explain(whole), report(whole)
    for line in words.splitlines():
        if line.startswith("  good: a round of K"):
            assert line.strip() in page
    for title in ("Measured", "Break-even", "By load", "Left out", "Where the time goes"):
        assert f"{title}:" in words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            BreakEven(
                recipe="eagle",
                k=4,
                plain_steps=1.34,
                chance=0.4,
                acceptance_length=2.10,
                speed_up=1.57,
                measured=True,
            ),
            "eagle: a round of K = 4 costs 1.34 plain steps, so it pays above acceptance length 1.34; "
            "measured 2.10, speed-up 1.57",
        ),
        (BreakEven(recipe="moe", k=2, plain_steps=3.4, chance=None), "cannot pay at any acceptance"),
        (BreakEven(recipe="free", k=2, plain_steps=0.9, chance=0.0), "pays whatever is accepted"),
    ],
)
def test_break_even_in_one_sentence(given: BreakEven, words: str) -> None:
    assert words in break_even_line(given)


def counts(accepted: list[int], rounds: int = 100, drafting: int = 100, **more: list[int]) -> Counts:
    reached = [drafting, *accepted[:-1]] if accepted else []
    drafted = [drafting] * len(accepted)
    contexts = {"rounds_by_context": [drafting], "accepted_by_context": [sum(accepted)], **more}
    total = sum(accepted)
    return Counts(
        rounds, drafting, drafting, sum(drafted), total, rounds + total, drafted, reached, accepted, **contexts
    )


class TestHints:
    def test_a_sound_shape_has_none(self) -> None:
        assert hints_on(counts([80, 64, 51, 41])) == []

    def test_a_cliff_is_named_with_its_place(self) -> None:
        assert "cliff after position 4" in hints_on(counts([80, 70, 60, 55, 1]))[0]

    def test_a_drafter_that_never_fires_is_named(self) -> None:
        assert "never fired" in hints_on(Counts(num_rounds=50))[0]
        assert "2.0%" in hints_on(counts([2], drafting=2))[0]

    def test_a_drafter_that_is_never_right_is_named(self) -> None:
        assert "hardly a token" in hints_on(counts([3, 1]))[0]

    def test_far_less_than_was_recorded_is_named(self) -> None:
        assert hints_on(counts([30, 15]), 0.5) == []
        assert "29% of first draft tokens stand" in hints_on(counts([29, 15]), 0.5)[0]
        assert hints_on(counts([29, 15]), None) == []
        assert hints_on(counts([9, 5], rounds=40, drafting=40), 0.5) == []

    def test_a_decay_with_the_context_is_named(self) -> None:
        found = hints_on(counts([80, 60], rounds_by_context=[50, 50], accepted_by_context=[130, 10]))
        assert any("fades with the context: 3.60 below 512 tokens, 1.20 from 512 on" in hint for hint in found)


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return found


def test_a_browser_shows_every_plot_and_has_nothing_to_complain_about(whole: TuneResult, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(report(whole), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={tmp_path}/u"]
    command = [browser(), *flags, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert "CONSOLE" not in run.stderr, re.findall(".*CONSOLE.*", run.stderr)
    assert run.stdout.count('class="plot"') == PLOTS
    assert whole.answer.choice.label in run.stdout
