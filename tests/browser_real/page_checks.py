"""The pages in a real browser: no errors, nothing from outside, hover, keys, toggles, sizes, colours and paper."""

from __future__ import annotations

import json
import pathlib

import pytest
from playwright.sync_api import Browser, expect

from router_replay.number_format import number
from router_replay.report.bins import BINS
from tests.browser_real.chromium import Opened
from tests.browser_real.pages import MODES, STEPS, line
from tests.report.test_report import data_of

Pages = dict[str, pathlib.Path]
NAMES = ("runs", "long", "verdict", "fault", "trajectories")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_draws_all_charts_without_errors_and_asks_for_nothing(browser: Browser, made: Pages, name: str) -> None:
    opened = Opened.of(browser, made[name])
    charts = data_of(made[name].read_text())["charts"]
    expect(opened.page.locator("figure .plot svg")).to_have_count(len(charts))
    opened.check_quiet()
    assert opened.asked == [made[name].resolve().as_uri()]
    opened.page.close()


@pytest.mark.parametrize("name", NAMES)
def test_no_page_is_wider_than_its_window(browser: Browser, made: Pages, name: str) -> None:
    opened = Opened.of(browser, made[name], 320)
    inside = (
        "[...document.querySelectorAll('figure, svg')].every(e => e.getBoundingClientRect().right <= innerWidth + 1)"
    )
    for width in (320, 390, 1600):
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.page.wait_for_function(inside)  # charts are drawn anew for the new width
        assert opened.overflow() == 0
    opened.check_quiet()
    opened.page.close()


@pytest.mark.parametrize("name", NAMES)
def test_paper_shows_every_chart_in_dark_ink_and_does_not_overflow(browser: Browser, made: Pages, name: str) -> None:
    opened = Opened.of(browser, made[name], 794, color_scheme="dark")
    page = opened.page
    page.emulate_media(media="print", color_scheme="dark")
    assert opened.overflow() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    label = page.locator(".plot .role-axis-label text").first
    assert label.evaluate("e => getComputedStyle(e).fill") == "rgb(68, 68, 68)"
    heights = page.locator("figure .plot svg").evaluate_all("els => els.map(e => e.getBoundingClientRect().height)")
    assert min(heights) > 50
    expect(page.locator(".tools").first).to_be_hidden()
    assert page.pdf(format="A4").startswith(b"%PDF")
    opened.check_quiet()
    page.close()


def test_the_colours_follow_the_reader(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["runs"], color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    label = "getComputedStyle(document.querySelector('.plot .role-axis-label text')).fill"
    light = opened.page.evaluate(ground), opened.page.evaluate(label)
    opened.page.emulate_media(color_scheme="dark")
    dark = opened.page.evaluate(ground), opened.page.evaluate(label)
    assert light == ("rgb(251, 251, 250)", "rgb(93, 98, 106)")
    assert dark == ("rgb(20, 22, 26)", "rgb(163, 169, 179)")
    opened.page.close()


def test_hover_shows_the_values_of_one_step_in_every_chart_in_view(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["runs"])
    reward, k3 = opened.chart("Reward").locator(".key b"), opened.chart("Mismatch, k3").locator(".key b")
    expect(reward.first).to_have_text(number(line(STEPS - 1, 0)["reward"], "plain"))  # at rest, the last step
    opened.hover("Reward", across=0.999)
    expect(reward).to_have_text([number(line(STEPS - 1, mode)["reward"], "plain") for mode in range(3)])
    opened.hover("Reward", across=0.0)
    expect(reward).to_have_text([number(line(0, mode)["reward"], "plain") for mode in range(3)])
    expect(k3).to_have_text([number(line(0, mode)["mismatch/k3"], "small") for mode in range(3)])
    assert opened.chart("Reward").locator(".mark-symbol.held path").count() == 3
    opened.page.mouse.move(5, 5)
    expect(reward.first).to_have_text(number(line(STEPS - 1, 0)["reward"], "plain"))
    opened.page.close()


def test_keys_read_the_values_step_by_step(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["runs"])
    opened.chart("Gradient norm").locator(".plot").focus()
    for _ in range(8):
        opened.page.keyboard.press("ArrowRight")
    assert opened.tip() == "step 7\noff: not finite\nR2: 1.100\nR3: 1.200"
    opened.page.keyboard.press("End")
    assert opened.tip().startswith(f"step {STEPS - 1}\n")
    opened.page.keyboard.press("Home")
    assert opened.tip().startswith("step 0\n")
    opened.page.keyboard.press("Escape")
    expect(opened.page.locator("#tip")).to_be_hidden()
    crosses = opened.chart("Gradient norm").locator(".mark-path.crosses path")
    assert crosses.count() == 1  # what was not finite has a mark at the top
    opened.page.close()


def test_every_control_is_reached_by_the_tab_key(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["runs"])
    reached = set()
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        reached.add(
            opened.page.evaluate(
                "(e => (e.classList[0] ?? '') + (e.dataset?.toggle ?? e.id ?? ''))(document.activeElement)"
            )
        )
    assert {"0", "1", "2", "filter", "plot", "scroll"} <= reached
    opened.page.close()


def test_a_toggle_hides_a_run_in_all_charts(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["runs"])
    curves = opened.chart("Reward").locator(".mark-line.curve path")
    assert curves.count() == 3
    opened.page.get_by_label("R2").uncheck()
    expect(curves).to_have_count(2)
    expect(opened.chart("Mismatch, k3").locator(".mark-line.curve path")).to_have_count(2)
    expect(opened.chart("Reward").locator(".key .run.hidden")).to_have_text(
        "R2" + number(line(STEPS - 1, 1)["reward"], "plain")
    )
    opened.page.get_by_label("R2").check()
    expect(curves).to_have_count(3)
    opened.check_quiet()
    opened.page.close()


def test_the_filter_shows_the_metrics_of_a_name(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["runs"])
    opened.page.get_by_label("Metrics").fill("agreement layers")
    shown = opened.page.locator("figure:visible h3")
    expect(shown).to_have_text(["routes/agreement by layer"])
    opened.page.get_by_label("Metrics").fill("")
    expect(shown).to_have_count(len(data_of(made["runs"].read_text())["charts"]))
    opened.page.close()


def test_a_metric_of_each_layer_has_a_heat_map_whose_menu_chooses_the_run(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["runs"])
    chart = opened.chart("routes/agreement by layer")
    expect(chart.locator("option")).to_have_text(list(MODES))
    for mode in (0, 2):
        chart.get_by_role("combobox").select_option(str(mode))
        expect(chart.locator(".mark-rect.cell-marks path")).to_have_count(8 * STEPS)
        chart.locator(".plot").focus()
        opened.page.keyboard.press("Home")
        share = number(line(0, mode)["routes/agreement/layers"][0], "share")
        expect(opened.page.locator("#tip")).to_have_text(f"layer 1, step 0\n{share}")
    opened.check_quiet()
    opened.page.close()


def test_a_hundred_thousand_steps_are_few_points_and_hover_answers(browser: Browser, made: Pages) -> None:
    """No time is asserted: what makes a page slow is the number of points, and that is bounded."""
    opened = Opened.of(browser, made["long"])
    lengths = "els => els.map(e => e.getAttribute('d').split(/[ML]/).length - 1)"
    assert max(opened.page.locator(".mark-line.curve path").evaluate_all(lengths)) <= BINS
    assert opened.page.locator("svg *").count() < 20_000
    opened.hover("Mismatch, k3", across=0.0)
    expect(opened.chart("Mismatch, k3").locator(".key b").first).to_contain_text(" to ")
    opened.page.get_by_label("off").uncheck()
    expect(opened.chart("Reward").locator(".mark-line.curve path")).to_have_count(2)
    opened.check_quiet()
    opened.page.close()


def test_the_heat_map_says_layer_position_and_share(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["verdict"])
    data = data_of(made["verdict"].read_text())["charts"][0]
    title = "Disagreement by layer and position"
    opened.chart(title).locator(".plot").focus()
    opened.page.keyboard.press("ArrowRight")
    width = data["edges"][1] - data["edges"][0]
    share = number(data["values"][0][0], "share")
    assert opened.tip() == f"layer 0, position 0 to {width - 1}\n{share} of the rows differ\n{data['counts'][0]:,} rows"
    opened.page.keyboard.press("ArrowDown")
    assert opened.tip().startswith("layer 1, position 0 to")
    opened.page.keyboard.press("Escape")
    opened.hover(title, 0.5, 0.5)
    assert "of the rows differ" in opened.tip()
    opened.check_quiet()
    opened.page.close()


def test_the_passes_of_a_verdict_can_be_hidden(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["verdict"])
    points = opened.chart("Log-probs, engine against trainer").locator(".mark-symbol.point-marks path")
    both = points.count()
    groups = data_of(made["verdict"].read_text())["charts"][1]["groups"]
    assert both == sum(len(group["x"]) for group in groups)
    opened.page.get_by_label("live").uncheck()
    expect(points).to_have_count(len(groups[1]["x"]))
    marks = opened.chart("Ratios of the probabilities").locator(".mark-text.strong text")
    expect(marks.first).to_have_text("τ = 2")
    opened.page.close()


def test_the_verdict_is_on_top(browser: Browser, made: Pages) -> None:
    for name, said in (("verdict", "The routes belong to the tokens."), ("fault", "Fault shift: the rows are shifted")):
        opened = Opened.of(browser, made[name])
        expect(opened.page.locator(".verdict .headline")).to_contain_text(said)
        assert opened.page.locator(".verdict").bounding_box()["y"] < 300
        opened.page.close()


def test_a_trajectory_shows_its_turns_versions_and_rows(browser: Browser, made: Pages) -> None:
    opened = Opened.of(browser, made["trajectories"])
    one = opened.chart("One trajectory")
    bands = one.locator(".mark-rect.band-marks path")
    twin = json.loads(made["trajectories"].with_suffix(".json").read_text())["charts"][0]["trajectories"]
    assert bands.count() == sum(len(twin[0][lane]) for lane in ("turns", "versions", "rows"))
    one.get_by_role("combobox").select_option("1")
    expect(bands).to_have_count(sum(len(twin[1][lane]) for lane in ("turns", "versions", "rows")))
    one.locator(".plot").focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.tip() == "trajectory 1, positions 0 to 7\nturn 1, given: prompt or answer of the environment"
    every = opened.chart("All trajectories")
    every.get_by_role("combobox").select_option("rows")
    expect(every.locator(".mark-rect.band-marks path")).to_have_count(sum(len(found["rows"]) for found in twin))
    opened.check_quiet()
    opened.page.close()
