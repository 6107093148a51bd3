"""python -m router_replay.cli: the same as router-replay, for torchrun."""

import sys

from router_replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
