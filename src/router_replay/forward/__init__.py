"""Run a packed batch through a transformers model: log-probs, separated sequences, sequence parallelism."""

from router_replay.forward.attention import use_packed_attention as use_packed_attention
from router_replay.forward.logprobs import logprobs as logprobs
from router_replay.forward.ulysses import Ulysses as Ulysses

__all__ = ["Ulysses", "logprobs", "use_packed_attention"]
