"""How other projects write routes on the wire: read with `from_*`, written with `to_*`.

Every format here carries what the engine gave: a column for each decoder layer, dense ones included
(as zeros). None carries policy versions. All but NeMo RL's have no way to say that a row is missing.

Reading is strict, and raises WireError with the field; it never guesses a layout from a shape.
"""

from router_replay.wire.peers.nemo import from_nemo, to_nemo
from router_replay.wire.peers.prime_rl import from_dynamo, from_prime_rl, peer_start, to_dynamo, to_prime_rl
from router_replay.wire.peers.sglang import from_sglang, to_sglang
from router_replay.wire.peers.skyrl import from_skyrl, to_skyrl
from router_replay.wire.peers.vllm import from_vllm, to_vllm

__all__ = [
    "from_dynamo",
    "from_nemo",
    "from_prime_rl",
    "from_sglang",
    "from_skyrl",
    "from_vllm",
    "peer_start",
    "to_dynamo",
    "to_nemo",
    "to_prime_rl",
    "to_sglang",
    "to_skyrl",
    "to_vllm",
]
