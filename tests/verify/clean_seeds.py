"""Verify clean rollouts of the tiny model, and count those that are accused; none should be.

python -m tests.verify.clean_seeds 100     # about 5 minutes on one core
"""

from __future__ import annotations

import sys

from router_replay.rl.config import tiny_folder
from router_replay.verify.rollouts import generate, open_engine, read_prompts
from router_replay.verify.run import verify


def main(seeds: int) -> int:
    """Print the seeds whose clean rows were accused, and return how many they are. The number type alternates."""
    folder, accused = tiny_folder(), list[int]()
    with open_engine("embedded", folder, "bfloat16", 64) as engine:
        for seed in range(seeds):
            samples = generate(engine, read_prompts(None, folder, seed=seed)[0][:8], 12)
            dtype = "float32" if seed % 2 == 0 else "bfloat16"
            if verify(samples, str(folder), "embedded", dtype=dtype, device="cpu").finding is not None:
                accused.append(seed)
    print(f"{len(accused)} of {seeds} clean rollouts were accused: {accused}")  # noqa: T201
    return len(accused)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
