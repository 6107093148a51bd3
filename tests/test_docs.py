"""The documentation names only what exists: files, commands, links, and every environment variable."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# A word such as tests/wire/fuzz.py or examples/tiny.toml; what begins elsewhere is a path of the reader's machine.
PATHS = re.compile(r"(?<![\w/.])(?:tests|bench|examples|docs|tools)/[\w/.-]*\w")
TARGETS = re.compile(r"\bmake ((?!sure|model)[a-z][a-z-]*)\b(?=`|  |$)", re.MULTILINE)


def text_of(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")


def called(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", FRONT, ids=called)
def test_links_of_the_front_pages_lead_somewhere(page: pathlib.Path) -> None:
    """Those of docs/ are checked by make docs."""
    for target in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        assert (ROOT / path).is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", text_of(ROOT / path), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", FRONT + PAGES, ids=called)
def test_files_and_commands_that_a_page_names_exist(page: pathlib.Path) -> None:
    text = text_of(page)
    missing = [name for name in PATHS.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in re.findall(r"python -m (bench\.\w+)", text) if not _module(name)]
    rules = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    missing += [f"make {target}" for target in TARGETS.findall(text) if target not in rules]
    assert not missing


@pytest.mark.parametrize("page", FRONT + PAGES, ids=called)
def test_tests_that_a_page_names_exist(page: pathlib.Path) -> None:
    defined = {name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", text_of(path))}
    assert set(re.findall(r"`(test_\w+)`", text_of(page))) <= defined


def test_every_environment_variable_of_the_source_is_documented() -> None:
    page = text_of(ROOT / "docs" / "environment_variables.md")
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"\bROUTER_REPLAY_[A-Z_]*[A-Z]\b", text_of(path))
    }
    assert named
    assert {name for name in named if f"| `{name}` |" not in page} == set()


def test_the_readme_is_a_page_and_shows_how_to_install_and_use_it_first() -> None:
    lines = text_of(ROOT / "README.md").splitlines()
    assert len(lines) <= 120
    assert "pip install" in "\n".join(lines[:25])
    assert "RouterReplay(model)" in "\n".join(lines[:50])


def _module(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()


def test_the_map_of_the_source_names_every_package() -> None:
    page = text_of(ROOT / "docs" / "architecture.md")
    packages = {path.parent.name for path in (ROOT / "src" / "router_replay").glob("*/__init__.py")}
    assert {name for name in packages if not re.search(rf"^  {name}/", page, re.MULTILINE)} == set()
