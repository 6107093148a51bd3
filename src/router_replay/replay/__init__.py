"""Routes into the routers of a transformers model, and log-probs out of it."""

from router_replay.replay.logprobs import logprobs as logprobs
from router_replay.replay.replayer import RouterReplay as RouterReplay
from router_replay.replay.ulysses import Ulysses as Ulysses

__all__ = ["RouterReplay", "Ulysses", "logprobs"]
