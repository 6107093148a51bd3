"""What the command line promises: --help loads nothing heavy, a mistake is one message, and exit codes differ."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from router_replay import __version__
from router_replay.cli import main

COMMANDS = ("families", "inspect", "serve", "gateway", "make-model", "train", "demo", "report", "verify")
HEAVY = ("numpy", "torch", "transformers", "pydantic", "rich", "vllm")


def in_process(code: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: what this one has imported must not count."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)


def called(arguments: list[str], before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys\n{before}\nfrom router_replay.cli import main\n"
    code += f"try:\n    status = main({arguments!r})\nexcept SystemExit as left:\n    status = left.code\n"
    code += f"print('loaded', *sorted(set(sys.modules) & set({HEAVY!r})))\nsys.exit(status)"
    return in_process(code)


# -- help -------------------------------------------------------------------------------------------


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    """This is what makes it answer at once."""
    done = called(["--help"])
    assert done.returncode == 0
    *text, loaded = done.stdout.splitlines()
    assert loaded == "loaded"
    listed = {line.split()[0] for line in text if line.startswith("    ") and line.strip()}
    assert set(COMMANDS) <= listed


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"usage: router-replay {command}" in capsys.readouterr().out


def test_the_help_of_train_loads_nothing_heavy() -> None:
    done = called(["train", "--help"])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded")


def test_the_version_is_the_packages_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"router-replay {__version__}\n"


def test_the_module_is_the_same_command() -> None:
    """torchrun needs a module, not a script."""
    command = [sys.executable, "-m", "router_replay.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (0, f"router-replay {__version__}\n")


# -- mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--resum", "--stepz", "3"], "unrecognized arguments: --stepz"),
        (["report"], "the following arguments are required: RUN"),
        (["demo", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["make-model", "--size", "huge"], "argument --size: invalid choice: 'huge'"),
        (["inspect", "a.bin", "b.bin"], "unrecognized arguments: b.bin"),
    ],
)
def test_a_wrong_command_line_leaves_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_settings_are_all_named_in_one_message_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--set", "optimizer.lrr=1", "--set", "stepz=3"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    first, *problems = printed.err.splitlines()
    assert first == "router-replay train: --set: 2 problems"
    assert sorted(line.strip() for line in problems) == [
        "optimizer.lrr: unknown; did you mean optimizer.lr?",
        "stepz: unknown; did you mean steps?",
    ]


def test_settings_that_cannot_work_together_leave_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--set", "rollout.group=1"]) == 1
    assert "these settings cannot work: 1 problem" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "absent.toml"], "router-replay train: absent.toml: this file does not exist"),
        (["inspect", "absent.bin"], "router-replay inspect: [Errno 2] No such file or directory: 'absent.bin'"),
        (["report", "absent"], "router-replay report: there is no metrics.jsonl in absent"),
        (["make-model", "--steps", "0"], "router-replay make-model: steps must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_status_1(
    arguments: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["pydantic", "torch"])
def test_a_package_that_is_not_installed_is_named_with_its_extra(module: str) -> None:
    done = called(["train", "--dry-run"], before=f"sys.modules[{module!r}] = None")
    assert done.returncode == 1
    assert done.stderr == f'router-replay train needs {module}: pip install "router-replay[train]"\n'


def test_another_import_that_fails_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a fault of this package or of the environment, and an extra would not help."""
    monkeypatch.setitem(sys.modules, "router_replay.rl.config", None)
    with pytest.raises(ModuleNotFoundError):
        main(["train", "--dry-run"])


# -- families ------------------------------------------------------------------------------------------


def test_families_prints_a_row_for_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    assert any("qwen3_moe" in row for row in rows)
