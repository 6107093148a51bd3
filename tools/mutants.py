"""Change one thing in the core at a time, and see whether the tests beside the module notice.

python tools/mutants.py --sample 150 --seed 1        # a random sample over all modules of tools/mutant_tables.py
python tools/mutants.py --module stitch/rows.py      # every mutant of one module
python tools/mutants.py --module spec.py --line 52   # every mutant of one line

A mutant is the source with one small change, such as `start > known` -> `start >= known`. It is killed if a test
fails or runs out of time, and it survives if all pass. Survivors are printed with their place; each needs a test, or
an entry in EQUIVALENT of tools/mutant_tables.py where no test could tell it from the original.

Mutants are tried in a temporary copy of the tree; the checkout is never written to. Each is tried in a fork of a
process that has imported torch, transformers and pytest already: most of the time of a short test run goes there.
tools/mutant_finder.py says what is changed.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutant_finder import Finder, Mutant
from mutant_tables import EQUIVALENT, TESTS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/router_replay")
PRELOADED = ("numpy", "torch", "transformers", "pytest", "_pytest", "hypothesis", "xxhash", "msgspec")
LONGEST = 20  # times what the tests take without a change, and at least 30 seconds: then it counts as a hang


def find(root: Path, wanted: str = "", line: int | None = None) -> tuple[list[Mutant], set[str]]:
    """The mutants of the modules of TESTS that `wanted` is a part of, and the entries of EQUIVALENT that fit none.

    Mutants that are equivalent are left out.
    """
    found, unused = [], set(EQUIVALENT)
    for module in modules(root):
        if wanted in module:
            source = (root / PACKAGE / module).read_text()
            for mutant in Finder(module, source).mutants:
                entry = equivalent_by(mutant, source)
                unused.discard(entry or "")
                if entry is None and line in (None, mutant.line):
                    found.append(mutant)
    return found, unused


def modules(root: Path) -> list[str]:
    package = root / PACKAGE
    names = sorted(str(path.relative_to(package)) for path in package.rglob("*.py"))
    stale = [pattern for pattern in TESTS if not fnmatch.filter(names, pattern)]
    if stale:
        sys.exit(f"tools/mutant_tables.py: no module fits {stale}: correct TESTS")
    return [name for name in names if tests_of(name)]


def tests_of(module: str) -> tuple[str, ...]:
    return next((tests for pattern, tests in TESTS.items() if fnmatch.fnmatch(module, pattern)), ())


def equivalent_by(mutant: Mutant, source: str) -> str | None:
    before, after = mutant.lines(source)
    return next((entry for entry in EQUIVALENT if entry in after and entry not in before), None)


# -- running -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.egg-info")
        for name in ("src", "tests", "docs"):
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tree)
        yield tree


def preload(tree: Path, tests: set[str]) -> None:
    """Import what the tests import of other packages, once, here: forks inherit it."""
    import hypothesis

    # No shrinking: the first failure is enough. conftest.py loads the profile of this name.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    profile = hypothesis.settings(deadline=None, max_examples=30, derandomize=True, database=None, phases=phases)
    hypothesis.settings.register_profile("mutants", profile)
    os.environ |= {"HYPOTHESIS_PROFILE": "mutants", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.environ |= {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    sys.path[:0] = [str(tree / "src"), str(tree)]
    listed = tree / "modules"
    run_tests(tree, sorted(tests), 600, listed)
    for name in listed.read_text().split():
        if name.partition(".")[0] in PRELOADED:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def run_tests(tree: Path, tests: list[str], timeout: float, listed: Path | None = None) -> bool:
    """Do the tests pass? `listed` is a file for the names of all imported modules; nothing is run then."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(tree)
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import pytest

        options = ["--collect-only"] if listed else []
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=line", *options, *tests])
        if listed:
            listed.write_text("\n".join(sorted(sys.modules)))
        os._exit(int(code))
    end = time.monotonic() + timeout
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status == 0
            time.sleep(0.02)
        return False
    finally:  # too slow, interrupted, or ended with processes left behind
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def is_killed(tree: Path, mutant: Mutant, timeout: float) -> bool:
    path = tree / PACKAGE / mutant.module
    source = path.read_text()
    try:
        path.write_text(mutant.apply(source))
        forget_bytecode(path)
        return not run_tests(tree, list(tests_of(mutant.module)), timeout)
    finally:
        path.write_text(source)
        forget_bytecode(path)


def forget_bytecode(path: Path) -> None:
    """Python compares times in seconds: two mutants of one second and one size would be the same to it."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        cached.unlink()


def time_unchanged(tree: Path, tests: tuple[str, ...]) -> float:
    start = time.monotonic()
    if not run_tests(tree, list(tests), 1200):
        sys.exit(f"the tests fail without any change: {' '.join(tests)}\n" + (tree / "log").read_text()[-3000:])
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--module", default="", help="only modules whose path below src/router_replay contains this")
    parser.add_argument("--line", type=int, help="only mutants of this line")
    parser.add_argument("--sample", type=int, help="try this many, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--least", type=float, default=0.0, help="fail where a smaller share was killed")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    arguments = parser.parse_args()
    mutants, unused = find(ROOT, arguments.module, arguments.line)
    total = len(mutants)
    if unused and not arguments.module:
        print("no mutant fits these entries of EQUIVALENT any more:", *sorted(unused), sep="\n    ")
    if arguments.sample is not None and arguments.sample < total:
        mutants = random.Random(arguments.seed).sample(mutants, arguments.sample)
    mutants.sort(key=lambda mutant: (mutant.module, mutant.start))
    sources = {module: (ROOT / PACKAGE / module).read_text() for module in {mutant.module for mutant in mutants}}

    def show(mutant: Mutant, word: str) -> None:
        before, after = mutant.lines(sources[mutant.module])
        print(f"{word} {mutant.module}:{mutant.line}\n    - {before}\n    + {after}", flush=True)

    if arguments.list:
        for mutant in mutants:
            show(mutant, "mutant")
        print(f"{total} mutants")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copy of the tree is removed
    survivors = 0
    with copy_of_the_tree() as tree:
        preload(tree, {test for mutant in mutants for test in tests_of(mutant.module)})
        seconds: dict[tuple[str, ...], float] = {}
        for number, mutant in enumerate(mutants):
            tests = tests_of(mutant.module)
            if tests not in seconds:
                seconds[tests] = time_unchanged(tree, tests)
                print(f"[{number}/{len(mutants)}] {seconds[tests]:.0f} s unchanged: {' '.join(tests)}", flush=True)
            if not is_killed(tree, mutant, max(30.0, LONGEST * seconds[tests])):
                survivors += 1
                show(mutant, "SURVIVED")
    killed = len(mutants) - survivors
    share = killed / max(len(mutants), 1)
    print(
        f"{killed} of {len(mutants)} mutants were killed ({share:.1%}); drawn from {total} with seed {arguments.seed}"
    )
    if share < arguments.least:
        sys.exit(f"fewer than {arguments.least:.0%}: give each survivor a test, or a reason in EQUIVALENT")


if __name__ == "__main__":
    main()
