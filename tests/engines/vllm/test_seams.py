"""Where the plugin touches vLLM: the table is checked whole before the first patch, and nothing is patched in part."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tomllib
import types

import pytest

from router_replay.engines.vllm import versions
from router_replay.engines.vllm.plugin import seams
from router_replay.engines.vllm.plugin.runner import watch
from router_replay.engines.vllm.plugin.seams import Seam
from router_replay.errors import EngineError

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def place(first: int, *, second: int = 0) -> int:
    return min(first, second)


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (Seam(__name__, "place", "called", "", ("first", "second", "min")), ""),
        (Seam("no_such_module", "", "called", ""), "no_such_module does not exist"),
        (Seam(f"{__name__}:Nothing", "", "called", ""), "Nothing does not exist"),
        (Seam(__name__, "nothing", "called", ""), "nothing does not exist"),
        (Seam(__name__, "place", "called", "", ("first", "third", "max")), "place has no third, max"),
        (Seam("router_replay.engines.vllm.samples:Sample", "", "read", "", ("index", "lost")), "has no lost"),
    ],
)
def test_a_seam_says_what_is_not_as_it_must_be(seam: Seam, problem: str) -> None:
    assert problem in seam.problem()
    assert bool(seam.problem()) == bool(problem)


def test_a_method_is_wrapped_once() -> None:
    class Owner:
        def method(self) -> int:
            return 1

    for _ in range(2):
        seams.wrap(Owner, "method", lambda original: lambda self: original(self) + 1)
    assert Owner().method() == 2
    assert Owner.method.__name__ == "method"


def test_the_range_of_versions_in_pyproject_is_the_tested_one() -> None:
    project = tomllib.loads((pathlib.Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert versions.REQUIREMENT in project["optional-dependencies"]["vllm"]
    assert (
        project["entry-points"]["vllm.general_plugins"]["router_replay"] == "router_replay.engines.vllm.plugin:register"
    )


@pytest.mark.parametrize(("version", "runner"), [("0.30.0", "0"), ("0.32.0", "1")])
def test_a_model_runner_that_lacks_the_seam_is_refused(version: str, runner: str) -> None:
    other = types.SimpleNamespace(**{"prepare_inputs" if runner == "0" else "_prepare_inputs": lambda: None})
    with pytest.raises(EngineError, match=f"prepare_inputs, .*: set VLLM_USE_V2_MODEL_RUNNER={runner}"):
        watch(other, version, lambda: None, lambda step: None)


@pytest.mark.parametrize(
    ("versions_", "version", "holds"),
    [
        ("0.26-0.30", "0.26.0", True),
        ("0.26-0.30", "0.30.1+cpu", True),
        ("0.26-0.30", "0.31.0", False),
        ("0.31-0.32", "0.30.9", False),
        ("0.31-0.32", "0.32.0+cu130", True),
        ("0.31-0.32", "0.33.0", False),
    ],
)
def test_a_seam_holds_in_the_versions_that_it_names(versions_: str, version: str, holds: bool) -> None:
    assert Seam(__name__, "place", "called", "", versions=versions_).holds(version) is holds


def test_the_seams_together_cover_the_tested_versions_and_no_other() -> None:
    for minor in range(versions.LOWEST[1], versions.BEYOND[1]):
        runners = [seam for seam in seams.SEAMS if "prepare_inputs" in seam.name and seam.holds(f"0.{minor}.0")]
        assert len(runners) == 1
    for version in (f"0.{versions.LOWEST[1] - 1}.0", f"0.{versions.BEYOND[1]}.0"):
        assert not [seam for seam in seams.SEAMS if seam.holds(version)]


CHECKS = """
import importlib, logging
from router_replay.engines.vllm import plugin
from router_replay.engines.vllm.plugin import seams
from router_replay.errors import EngineError

logging.basicConfig()
logging.getLogger("vllm").addHandler(logging.StreamHandler())

def touched():
    found = {}
    for seam in seams._seams():
        owner = seams._resolve(seam.owner)
        if seam.name and hasattr(owner, seam.name):
            found[seam.owner, seam.name] = getattr(owner, seam.name)
    return found

assert seams.problems() == seams.problems("delivery") == [], seams.problems()
before, table = touched(), seams.SEAMS

# One seam is missing: nothing at all is patched, the log says so, and the report of a worker too.
lost = seams.Seam("vllm.v1.worker.gpu_worker:Worker", "moved_away", "wrapped", "a test")
seams.SEAMS = (*table[:3], lost, *table[3:])
plugin.register()
Worker = seams._resolve("vllm.v1.worker.gpu_worker:Worker")
assert all(after == before[place] for place, after in touched().items() if place in before)
assert not hasattr(Worker, "router_replay_update_weights")
report = Worker.router_replay_report(None)
assert report["active"] is False and report["forced_routes"] is False
assert "moved_away does not exist" in report["reason"]
assert [one["name"] for one in report["seams"] if one["problem"]] == ["moved_away"]

# A version that was never tried is refused in the same way.
seams.SEAMS = table
import vllm
tried, vllm.__version__ = vllm.__version__, "0.33.0"
plugin.register()
assert "0.33.0 is outside the tested range" in Worker.router_replay_report(None)["reason"]
import os
os.environ[plugin.ENVIRONMENT] = plugin.REQUIRED
try:
    plugin.register()
    raise SystemExit("required, and not refused")
except EngineError as error:
    assert "NOT active" in str(error)
vllm.__version__ = tried
assert touched() == before

# All fits: all of them are patched.
plugin.register()
plugin.register()
after = touched()
wrapped = [s for s in seams._seams() if s.use == "wrapped" and s.name != "run_busy_loop" and s.part != "precision"]
wrapped = [(s.owner, s.name) for s in wrapped]  # float32 routers were not asked for
assert len(wrapped) == (14 if tried.startswith(("0.31", "0.32")) else 9)
assert all(after[place] is not before[place] for place in wrapped)
assert hasattr(Worker, "router_replay_update_weights")
shown = Worker.router_replay_report.__globals__["seams"].table()
runner = "0.31-0.32" if tried.startswith(("0.31", "0.32")) else "0.26-0.30"
assert {one["versions"] for one in shown if "prepare_inputs" in one["name"]} == {runner}, shown
print("all")
"""


@needs_vllm
def test_all_seams_are_patched_or_none() -> None:
    """In a process of its own: here, engines of other tests may have been started."""
    environment = {**os.environ, "ROUTER_REPLAY_VLLM": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("ROUTER_REPLAY_VLLM_OWNER", None)
    done = subprocess.run([sys.executable, "-c", CHECKS], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "all"
    assert (
        "the plugin of Router Replay is NOT active in this vLLM, and nothing was patched" in done.stdout + done.stderr
    )
