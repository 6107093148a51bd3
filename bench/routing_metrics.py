"""Measure what the routing metrics cost a training step: score + update with and without them, interleaved in one run.

    python -m bench.routing_metrics                    # the tiny model of the demo, on a GPU if there is one

The workload is that of `bench.train`. On a CPU the clock is the CPU time of the process, which other load on the
machine changes least. The figure is the median over rounds of with / without within the round; "off again" is a second
policy without them, and shows the noise. A whole step also has the rollout and the weight sync, so the share of a step
is smaller still.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from bench.replay import time_rounds
from bench.train import planned, read_options, sampled, settings
from bench.verdicts import Share
from router_replay.replay.gauge import RouterGauge
from router_replay.replay.router_scores import figures_of
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.models import model_folder
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes import ranks
from router_replay.spec import RouterSpec

LIMIT = 1.015


def main() -> int:
    arguments = read_options(__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as output:
        config = settings(arguments, "r3", output)
    here = ranks.join(config)
    minis = planned(sampled(config, here), config, here)

    def policy(measures: bool) -> Policy:
        trainer = config.trainer.model_copy(update={"routing_metrics": measures})
        return Policy(config.model_copy(update={"trainer": trainer}), here, model_folder(config.model.path))

    policies = {"without": policy(False), "without again": policy(False), "with": policy(True)}
    steps: dict[str, Callable[[], None]] = {
        name: functools.partial(_step, one, minis) for name, one in policies.items()
    }
    cuda = here.device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    seconds = time_rounds(steps, arguments.rounds, wait, time.perf_counter if cuda else time.process_time)
    slots = sum(len(micro.whole) for mini in minis for micro in mini.micro)
    print(f"\nScore + update of {slots} tokens with R3, {arguments.dtype}, {here.device.type}\n")
    print("| routing metrics | ms, median | against without |\n| --- | ---: | ---: |")
    shares = {name: Share.of(taken, seconds["without"]) for name, taken in seconds.items()}
    for name, taken in seconds.items():
        print(f"| {name} | {statistics.median(taken) * 1e3:.1f} | {shares[name]} |")
    own = alone(policies["with"].spec, slots, here.device)
    print(f"\nthe arithmetic of the metrics by itself takes {own * 1e3:.1f} ms")
    missed = shares["with"].low > LIMIT
    print(f"\nrouting metrics cost {shares['with'].median:.4f}x (limit {LIMIT}x): {'MISSED' if missed else 'ok'}")
    ranks.leave()
    return int(missed)


def alone(spec: RouterSpec, tokens: int, device: torch.device) -> float:
    """Return the seconds that the figures of `tokens` tokens take in all layers, without a model: the least of 20."""
    probabilities_TE = torch.rand(tokens, spec.num_experts, device=device).softmax(-1)
    ids_TK, gauge = probabilities_TE.topk(spec.top_k).indices, RouterGauge(spec)
    counted_T = torch.ones(tokens, dtype=torch.bool, device=device)

    def once() -> None:
        figures = [figures_of(probabilities_TE, ids_TK) for _ in spec.layers]
        gauge.add(figures, [ids_TK] * len(spec.layers), counted_T)
        gauge.take().tolist()

    return min(time_rounds({"alone": once}, 20, lambda: None)["alone"])


def _step(policy: Policy, minis: list[MiniBatch]) -> None:
    scored = [policy.score(mini) for mini in minis]
    for mini, old in zip(minis, scored, strict=True):
        policy.update(mini, old)
    policy.route_counts()
    policy.router_figures()


if __name__ == "__main__":
    sys.exit(main())
