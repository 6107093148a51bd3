"""Sets environment variables for processes that are started inside a block, and restores them afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(values: Mapping[str, str], *, keep_existing: bool = False) -> Iterator[None]:
    """Set these variables inside the block. With `keep_existing`, variables that are already set are not changed."""
    wanted = {name: value for name, value in values.items() if not (keep_existing and name in os.environ)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
