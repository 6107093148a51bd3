"""`python -m router_replay.cli` is the same as `router-replay`; torchrun needs a module."""

import sys

from router_replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
