"""The report in a browser: what a person does with it, and what hostile text does not do to it. Runs are written by
hand, since a page is the same whoever made its run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.report.page import build_report
from pipeline.observe.report.source import Sameness
from tests.support.report_runs import WORDS, WrittenRun, write_run

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\x07\u202e"
Open = Callable[[Path], Page]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 steps of 8 rows; its trainer was lost once."""
    folder = tmp_path_factory.mktemp("one")
    lost = (
        Event(103.0, EventKind.GANG_LOST, gang="train", worker="train-0", detail="killed by signal 9"),
        Event(103.5, EventKind.GANG_BUILT, gang="train", worker="train-0"),
    )
    (folder / "report.html").write_bytes(build_report([write_run(folder, WrittenRun("one", parts=True, events=lost))]))
    return folder / "report.html"


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that can be compared, and one of another model and reward, whose text is hostile."""
    folder = tmp_path_factory.mktemp("several")
    other = Sameness("n", "u", "n", "q", "q", "s")
    runs = [
        WrittenRun("first", steps=2, settings={"seed": 1}),
        WrittenRun("second", steps=2, gain=0.4, settings={"seed": 2}),
        WrittenRun(
            HOSTILE, steps=2, words=(WORDS[0], *[HOSTILE] * 7), critic=False, sameness=other, settings={"k": HOSTILE}
        ),
    ]
    sources = [write_run(folder / str(i), run) for i, run in enumerate(runs)]
    (folder / "report.html").write_bytes(build_report(sources))
    return folder / "report.html"


@pytest.fixture
def opened(page: Page) -> Open:
    """Opens a file; whatever it asks the network for, or logs, fails the test."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: asked.append(message.text))

    def open_file(file: Path) -> Page:
        page.goto(file.as_uri())
        assert asked == [file.as_uri()]
        return page

    return open_file


def test_what_a_run_came_to_is_read_at_once(opened: Open, one: Path) -> None:
    page = opened(one)
    expect(page.locator("h1")).to_have_text("one")
    expect(page.locator(".state")).to_have_text("finished: 4 steps")
    expect(page.locator("header")).to_contain_text("stageline run x.yaml")
    expect(page.locator("#result")).to_contain_text("+0.405 ± 0.002")
    titles = page.locator("section > h2").all_text_contents()
    assert titles[:3] == ["Result", "Learning curves", "Timeline"]


def test_curves_tell_a_step_in_all_panels_and_a_series_can_be_hidden(opened: Open, one: Path) -> None:
    page = opened(one)
    score = page.locator(".panel", has_text="Reward").first
    picture = score.locator("svg")
    picture.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("step 2")
    expect(page.locator("#tip")).to_contain_text("0.235")
    expect(score.locator(".reading").first).to_have_text("0.235")
    expect(page.locator(".panel", has_text="Clipped").locator(".reading").first).to_have_text("0.02")
    lines = picture.locator("path").count()
    score.get_by_role("button", name="training").click()
    assert picture.locator("path").count() == lines - 1
    box = picture.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + 60)
    expect(page.locator("#tip")).to_contain_text("held-out")
    expect(page.locator("#tip")).to_contain_text("0.44 ±")


def test_parts_of_the_reward_are_curves(opened: Open, one: Path) -> None:
    panel = opened(one).locator(".panel", has_text="Parts of the reward")
    names = panel.get_by_role("button").all_text_contents()
    assert [name.rstrip("0123456789.") for name in names[:2]] == ["length, training", "tone, training"]


def test_the_timeline_tells_a_node_under_the_pointer_and_by_keys(opened: Open, one: Path) -> None:
    page = opened(one)
    page.get_by_role("button", name="whole run").click()
    canvas = page.locator("canvas.lanes")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 154, box["y"] + 24 + 12)  # the first lane's first box begins where the lanes do
    tip = page.locator("#tip")
    expect(tip).to_contain_text("generate · step 0 · shard 0")
    expect(tip).to_contain_text("400 ms")
    expect(tip).to_contain_text("v0")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".said")).to_contain_text("generate · step 1")


def test_samples_pass_filters_and_tokens_tell_their_numbers(opened: Open, one: Path) -> None:
    page = opened(one)
    section = page.locator("#samples")
    expect(section).to_contain_text("32 rows")
    page.get_by_label("step at least").fill("3")
    page.get_by_label("score at least").fill("0.36")
    expect(section.locator(".found")).to_have_text("2 of 32 rows pass")
    assert section.locator(".sample").evaluate_all("rows => rows.map(row => row.dataset.row)") == ["6", "7"]
    section.locator(".token").nth(1).hover()
    expect(page.locator("#tip")).to_contain_text("trainer - sampler-0.53")
    expect(page.locator("#tip")).to_contain_text("advantage+0.75")
    page.get_by_label("colour").select_option("advantages")
    expect(section.locator(".scale")).to_contain_text("as it was trained on")
    page.get_by_role("button", name="clear").click()
    expect(section.locator(".found")).to_have_text("")


def test_a_mismatch_leads_to_its_row(opened: Open, one: Path) -> None:
    page = opened(one)
    found, low = page.locator("#samples .found"), page.get_by_label("score at least")
    low.fill("0.1")
    link = page.locator("#mismatches button.link").first
    link.click()
    shown = page.locator("#samples .sample")
    expect(shown).to_have_count(1)
    expect(shown).to_contain_text("step 3")
    expect(shown.locator(".response")).to_be_focused()
    expect(low).to_have_value("")
    expect(found).to_have_text(re.compile(r"row \d of step 3 ✕"))
    low.fill("0.36")  # a filter is of all rows again
    expect(found).to_have_text("2 of 32 rows pass")
    link.click()
    found.get_by_role("button", name="all rows").click()
    expect(found).to_have_text("")
    expect(low).to_have_value("")
    assert shown.count() > 1


def test_a_loss_and_its_recovery_are_told(opened: Open, one: Path) -> None:
    section = opened(one).locator("#events")
    expect(section).to_contain_text("killed by signal 9")
    expect(section).to_contain_text("built again in 0.5 s")


def test_runs_beside_one_another(opened: Open, several: Path) -> None:
    page = opened(several)
    section = page.locator("#comparison")
    expect(section.locator(".paired")).to_have_count(1)
    expect(section.locator(".paired")).to_contain_text("paired t")
    expect(section.locator(".paired .value")).to_contain_text("+0.6")
    expect(section.locator(".left-out")).to_contain_text("the references are different models")
    expect(section.locator("table")).to_contain_text("seed")
    score = page.locator(".panel", has_text="Reward").nth(0)
    assert score.get_by_role("button", name="training").count() == 2  # the third's scores are another reward's
    page.locator("#samples").get_by_role("tab").nth(2).click()
    expect(page.locator("#samples .sample").first).to_be_visible()


def test_hostile_text_runs_no_script_and_is_seen(opened: Open, several: Path) -> None:
    page = opened(several)
    page.locator("#samples").get_by_role("tab").nth(2).click()
    page.locator("#held-out").get_by_role("tab").nth(2).click()
    page.locator("#mismatches").get_by_role("tab").nth(2).click()
    page.locator("#config summary").click()
    page.locator("#samples .token").first.hover()
    expect(page.locator("#samples .response").first).to_contain_text("<script>window.hacked=1</script>")
    expect(page.locator("#samples .control").first).to_have_text("␇")
    expect(page.locator("#samples .control").nth(1)).to_have_text("⟨U+202E⟩")
    expect(page.locator("#tip")).to_contain_text("</script>")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_what_cannot_be_paired_has_no_heading(opened: Open, tmp_path: Path) -> None:
    sources = [write_run(tmp_path / name, WrittenRun(name, steps=2, eval_every=0)) for name in ("a", "b")]
    (tmp_path / "report.html").write_bytes(build_report(sources))
    section = opened(tmp_path / "report.html").locator("#comparison")
    expect(section.locator("h3")).to_have_text(["Not compared", "Config keys that differ"])


def test_a_run_that_died_at_step_0_opens(opened: Open, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_bytes(build_report([write_run(tmp_path, WrittenRun(done=0))]))
    page = opened(file)
    expect(page.locator("header")).to_contain_text("not finished: 0 of 4 steps")
    expect(page.locator("#curves")).to_contain_text("nothing to draw")
    expect(page.locator("#samples")).to_contain_text("No rows are stored")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ink_stands_out_from_the_page(opened: Open, page: Page, one: Path, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    found = opened(one).evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    ink, paper = (sum(map(int, colour.strip("rgb()").split(","))) / 3 for colour in found)
    assert (ink - paper > 150) if scheme == "dark" else (paper - ink > 150)
