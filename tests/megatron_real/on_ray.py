"""The command router-replay on Ray, with ranks that run Megatron on a CPU: `python -m tests.megatron_real.on_ray`.

Each rank writes into the folder READ_LAYERS which layers of the stored rows it reads.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

from router_replay.rl.cluster.ranks import RankActor


class CpuRankActor(RankActor):
    """A trainer rank whose process lets megatron run on a CPU."""

    def train(self, *arguments: Any) -> Any:
        from router_replay.rl.cluster.routes import StoredRoutes
        from tests.megatron_real import cpu  # noqa: F401  (first, as in every process that uses megatron here)

        notes, read = pathlib.Path(os.environ["READ_LAYERS"], f"rank{self._rank}"), StoredRoutes.read

        def noted(source: StoredRoutes, first: int = 0, last: int | None = None, layers: Any = None) -> Any:
            with notes.open("a") as file:
                file.write(f"{list(layers or source.spec.layers)}\n")
            return read(source, first, last, layers)

        StoredRoutes.read = noted  # type: ignore[method-assign]
        return super().train(*arguments)


if __name__ == "__main__":
    from router_replay.rl.cluster import driver
    from tests.megatron_real import on_ray

    driver.RankActor = on_ray.CpuRankActor  # type: ignore[misc]  # by its name, under which the actors find it

    from tests.megatron_real.command import main

    sys.exit(main())
