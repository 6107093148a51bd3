"""Skip these tests where axolotl is not installed: it has an environment of its own."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("axolotl") is None:
    collect_ignore_glob = ["test_*.py"]
