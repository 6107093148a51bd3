"""The command router-replay in a process that runs Megatron on a CPU, as `python -m tests.megatron_real.command`."""

from __future__ import annotations

import sys

from tests.megatron_real import cpu  # noqa: F401  (first: it lets megatron run on a CPU)

# isort: split
from router_replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
