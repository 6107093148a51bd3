"""Messages between ranks: each gets its own bytes, of any length. Real processes over gloo."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = """
import numpy as np, torch, torch.distributed as dist
from router_replay.rl.processes.ranks import Ranks

dist.init_process_group("gloo")
here = Ranks(dist.get_rank(), dist.get_world_size(), 1, torch.device("cpu"))
parts = [bytes([65 + rank]) * (1 + 300_000 * rank) for rank in range(here.world)]
for _ in range(2):
    assert here.scatter(parts if here.is_first else None) == parts[here.rank]
    mine = np.full((2, 3 * (here.rank % 2)), here.rank, np.float32)  # nothing from the first and the third
    found = here.gather(mine)
    assert [one.shape for one in found] == ([(2, 0), (2, 3), (2, 0)] if here.is_first else [])
    assert not here.is_first or (found[1] == 1).all()
dist.destroy_process_group()
"""


def test_every_rank_gets_its_own_message_and_the_first_gets_all_arrays(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone", str(script)]
    subprocess.run(command, env=environment, check=True, timeout=600)
