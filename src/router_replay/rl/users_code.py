"""Code of the user that a setting names as `module:name`: found at the start of a run, and called with care.

function = load("grading:exact", "environment.reward", "function")
with guarded("problem 3: grading:exact", RewardError):
    reward = function(prompt, completion, answer)
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal

from router_replay.errors import ConfigError, RouterReplayError


def load(name: str, setting: str, what: Literal["function", "class"]) -> Any:
    """Import what `name` ("module:function" or "module:Class") stands for; ConfigError names the `setting`.

    The module is looked for on the Python path, and last in the current folder.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        example = "grading:exact" if what == "function" else "games:GuessTask"
        form = f"module:{what if what == 'function' else 'Class'}"
        raise ConfigError(f'{setting} must be "{form}", such as "{example}", got {name!r}')
    here = os.getcwd()
    try:
        with _also_from(here):
            module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit at the top of a script, too
        raise ConfigError(
            f"{setting} = {name!r}: the module {module_name} does not import: {type(error).__name__}: "
            f"{error}. It is looked for on PYTHONPATH and in {here}"
        ) from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) if what == "class" else callable(found)):
        has = f"is {found!r}" if hasattr(module, attribute) else "is not there"
        file = getattr(module, "__file__", None)
        raise ConfigError(
            f"{setting} = {name!r}: a {what} was expected; in {file or 'the built-in module'} it {has}"
            + _hidden(module_name, file, here)
        )
    return found


@contextlib.contextmanager
def guarded(
    what: str,
    kind: type[RouterReplayError],
    advice: str = "",
    through: tuple[type[BaseException], ...] = (RouterReplayError,),
) -> Iterator[None]:
    """Turn whatever the block raises into an error of this `kind`, which names `what` was called and gives `advice`.

    This includes sys.exit, which would end the run with status 0. Ctrl-C and the errors in `through` pass unchanged.
    """
    unchanged: tuple[type[BaseException], ...] = (KeyboardInterrupt, *through)
    try:
        yield
    except unchanged:
        raise
    except BaseException as error:
        text = f"{what} raised {type(error).__name__}: {error}{advice}{_import_hint(error)}"
        raise kind(text) from error


def _import_hint(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and os.path.exists(f"{error.name.partition('.')[0]}.py"):
        return ". Import modules of the current folder at the top of your module: later they are not found"
    return ""


@contextlib.contextmanager
def _also_from(folder: str) -> Iterator[None]:
    """Look for modules in the folder as well: an installed command does not search the user's current folder.

    It is searched last, so that a file named like an installed module does not take its place, and for this import
    only, so that whatever the process imports later is not found there by chance.
    """
    importlib.invalidate_caches()  # the file may be newer than what Python knows of the folder
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have put the path in order itself
            sys.path.remove(folder)


def _hidden(module_name: str, file: str | None, here: str) -> str:
    """A hint where the user's own file has the name of an installed module, which was then taken."""
    own = os.path.join(here, *module_name.split("."))
    for candidate in (f"{own}.py", os.path.join(own, "__init__.py")):
        if os.path.exists(candidate) and candidate != file:
            return f". {candidate} was not taken, since an installed module has its name: rename it"
    return ""
