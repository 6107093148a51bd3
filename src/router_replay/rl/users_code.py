"""Load the user code that a setting names as `module:name` at the start of a run, and guard calls to it.

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
    """Import and return the object `name` ("module:function" or "module:Class").

    The module is searched on the Python path, and last in the current folder. `what` is the expected kind of object.
    Raise ConfigError, which names the `setting`, if it cannot be loaded.
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
    except BaseException as error:  # includes sys.exit at the top of a script
        raise ConfigError(
            f"{setting} = {name!r}: the module {module_name} cannot be imported: {type(error).__name__}: "
            f"{error}. It is searched on PYTHONPATH and in {here}"
        ) from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) if what == "class" else callable(found)):
        has = f"is {found!r}" if hasattr(module, attribute) else "does not exist"
        file = getattr(module, "__file__", None)
        raise ConfigError(
            f"{setting} = {name!r}: expected a {what}, but in {file or 'the built-in module'} it {has}"
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
        return ". Import modules of the current folder at the top of your module: it is not searched later"
    return ""


@contextlib.contextmanager
def _also_from(folder: str) -> Iterator[None]:
    """Search the folder for modules as well: an installed command does not search the user's current folder.

    The folder is searched last, so that a file named like an installed module does not replace it, and only for this
    import, so that later imports of the process do not find modules there by accident.
    """
    importlib.invalidate_caches()  # the file may be newer than Python's cache of the folder
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have removed the path itself
            sys.path.remove(folder)


def _hidden(module_name: str, file: str | None, here: str) -> str:
    """Return a hint if an installed module was imported instead of the user's file of the same name."""
    own = os.path.join(here, *module_name.split("."))
    for candidate in (f"{own}.py", os.path.join(own, "__init__.py")):
        if os.path.exists(candidate) and candidate != file:
            return f". {candidate} was not used, because an installed module has the same name: rename your file"
    return ""
