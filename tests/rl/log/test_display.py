"""The terminal display: in place where there is a terminal, plain lines where there is none."""

from __future__ import annotations

import inspect
import io
import math

import pytest
from rich.console import Console

from router_replay.rl.log.display import Display, Quiet

VALUES = {
    "reward": 0.3125,
    "mismatch/k3": 1.9e-3,
    "routes/agreement": 0.883,
    "routes/live": 0,
    "tokens_per_second": 1234.5,
    "trainer/tokens_per_second": 2345.6,
    "trainer/peak_share": 0.0712,
    "seconds/step": 10.0,
}


def shown(terminal: bool, steps: range, done: int = 0, total: int = 20, width: int = 100) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
    with Display(total, "r3", console, done=done, clock=lambda: 0.0) as display:
        for step in steps:
            display.phase("rollout")
            display.step(step, VALUES)
    return console.file.getvalue()


def test_plain_lines_have_no_control_characters() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    with Display(3, "r3\x1b[31m", console) as display:
        display.note("a [red]warning[/red]\x1b[2J\rwith\nmore")
        display.phase("rollout")
        display.step(0, {**VALUES, "reward": math.nan})
    text = console.file.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "[red]warning[/red]" in text
    assert len(text.splitlines()) == 3  # the start, the note, one step; none wrapped at the console's width
    assert "reward –" in text


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_log_file_is_plain_whatever_the_environment_says(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "1")
    with Display(1, "off") as display:
        display.step(0, VALUES)
    text = capsys.readouterr().out
    assert "reward 0.312" in text
    assert "\x1b" not in text


def test_a_plain_line_says_it_all() -> None:
    line = shown(terminal=False, steps=range(1)).splitlines()[-1]
    wanted = (
        "r3  1/20  reward 0.312  k3 1.90e-3  agreement 88.3 %  rows live 0  tokens/s 1,234  trained/s 2,346  "
        "of peak 7.1 %  seconds 10.0 s  left 3:10"
    )
    assert line == wanted


def test_time_left_is_for_the_rest_of_a_resumed_run() -> None:
    lines = shown(terminal=False, steps=range(15, 17), done=15).splitlines()
    assert lines[0].endswith("20 steps, 15 done")
    assert "16/20" in lines[1]
    assert lines[1].endswith("left 0:40")
    assert lines[2].endswith("left 0:30")


def test_a_finished_run_has_no_time_left() -> None:
    assert shown(terminal=False, steps=range(2), total=2).splitlines()[-1].endswith("left 0:00")


def test_a_terminal_is_drawn_in_place_with_the_last_rows() -> None:
    text = shown(terminal=True, steps=range(12), total=12)
    assert "\x1b[" in text
    last = text[text.rindex("12/12") :]  # the last picture: bar line, header, rows
    assert "finished" in last
    assert [line.split()[0] for line in last.splitlines()[2:] if "88.3" in line] == [str(n) for n in range(5, 13)]


def test_a_terminal_shows_the_phase_and_notes_above() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with Display(5, "off", console) as display:
        display.note("the reference model does not replay")
        display.phase("checkpoint")
    text = console.file.getvalue()
    assert text.index("the reference model does not replay") < text.rindex("checkpoint") < text.rindex("stopped")


def test_quiet_takes_the_same_calls_and_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("phase", "step", "note"):
        assert inspect.signature(getattr(Quiet, name)) == inspect.signature(getattr(Display, name))
    with Quiet() as quiet:
        quiet.phase("rollout")
        quiet.step(0, VALUES)
        quiet.note("text")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
