"""Change one thing in the core at a time, and see whether the tests beside the module notice.

python tools/mutants.py --sample 150 --seed 1        # a random sample over all modules of tools/mutant_tables.py
python tools/mutants.py --module stitch/rows.py      # every mutant of one module
python tools/mutants.py --module spec.py --line 52   # every mutant of one line

A mutant is the source with one small change, such as `start > known` -> `start >= known`. It is killed if a test
fails or runs out of time, and it survives if all pass. Survivors are printed with their place; each needs a test, or
an entry in EQUIVALENT of tools/mutant_tables.py where no test could tell it from the original.

Mutants are tried in a temporary copy of the tree; the checkout is never written to. Each is tried in a fork of a
process that has imported torch, transformers and pytest already: most of the time of a short test run goes there.
The text of messages (f-strings), annotations, decorators and asserts are not changed.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
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
from mutant_tables import EQUIVALENT, TESTS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/router_replay")
PRELOADED = ("numpy", "torch", "transformers", "pytest", "_pytest", "hypothesis", "xxhash", "msgspec")
LONGEST = 20  # times what the tests take without a change, and at least 30 seconds: then it counts as a hang

SYMMETRIC = ("min", "max", "minimum", "array_equal")  # functions that do not mind the order of their arguments
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "//", "/": "*", "//": "*", "%": "//", "**": "*"}
ARITHMETIC |= {"<<": ">>", ">>": "<<", "|": "&", "&": "|"}
SYMBOLS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}
SYMBOLS |= {ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
SYMBOLS |= {ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>"}
SYMBOLS |= {ast.BitOr: "|", ast.BitAnd: "&", ast.And: "and", ast.Or: "or"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: the characters [start, end) of the module's source become `text`."""

    module: str  # below src/router_replay
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def lines(self, source: str) -> tuple[str, str]:
        """The statement's first touched line to its last, before and after, as one line each."""
        first, last = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.end)
        after = source[first : self.start] + self.text + source[self.end : last]
        return " ".join(source[first:last].split()), " ".join(after.split())


class Finder(ast.NodeVisitor):
    """Collects the mutants of one module."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source
        self.starts = [0]  # of each line, in characters
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.mutants: list[Mutant] = []
        self.visit(ast.parse(source))

    # -- places ---------------------------------------------------------------------------------

    def at(self, line: int, column: int) -> int:
        """ast counts columns in bytes."""
        text = self.source[self.starts[line - 1] : self.starts[line]]
        return self.starts[line - 1] + len(text.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore

    def text(self, node: ast.AST) -> str:
        return self.source[slice(*self.span(node))]

    def add(self, start: int, end: int, text: str) -> None:
        line = self.source.count("\n", 0, start) + 1
        self.mutants.append(Mutant(self.module, line, start, end, text))

    def replace(self, node: ast.AST, text: str) -> None:
        self.add(*self.span(node), text)

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """The operator stands between its operands, perhaps beside brackets and line breaks."""
        start, end = self.span(left)[1], self.span(right)[0]
        found = self.source.find(old, start, end)
        if found >= 0:
            self.add(found, found + len(old), new)

    # -- kinds of change ------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            symbol = SYMBOLS[type(op)]
            self.between(left, right, symbol, COMPARISONS[symbol])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """One change for the whole chain: half a chain would need brackets."""
        symbol = SYMBOLS[type(node.op)]
        start, end = self.span(node)
        parts = [self.text(value) for value in node.values]
        if not any("\n" in part for part in parts):
            self.add(start, end, (" or " if symbol == "and" else " and ").join(f"({part})" for part in parts))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        symbol = SYMBOLS.get(type(node.op))
        if symbol in ARITHMETIC and not any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
            self.between(node.left, node.right, symbol, ARITHMETIC[symbol])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        symbol = SYMBOLS[type(node.op)]
        if not isinstance(node.value, ast.List):
            self.between(node.target, node.value, f"{symbol}=", f"{ARITHMETIC[symbol]}=")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.UAdd) and not isinstance(node.operand, ast.Constant):
            self.replace(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.replace(node, repr(node.value * 2 + 1))

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace(node, "pass")  # what stands inside is text

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.replace(node, "pass")

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) >= 2 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            first, second = node.args[:2]
            if ast.dump(first) != ast.dump(second) and not _is_name_of(node, *SYMMETRIC, "isinstance"):
                middle = self.source[self.span(first)[1] : self.span(second)[0]]
                self.add(self.span(first)[0], self.span(second)[1], self.text(second) + middle + self.text(first))
        if _is_name_of(node, "isinstance"):
            self.visit(node.args[0])  # `str & bytes` is no type
        else:
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: it guards what cannot happen
            self.visit(node.value)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):  # -4 is changed below
                self.replace(bound, f"{self.text(bound)} + 1")
        self.generic_visit(node)

    # -- what is left alone ---------------------------------------------------------------------

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)


def _is_name_of(call: ast.Call, *names: str) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    return name in names


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
    settings = {"deadline": None, "max_examples": 30, "derandomize": True, "database": None, "phases": phases}
    hypothesis.settings.register_profile("mutants", **settings)
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
