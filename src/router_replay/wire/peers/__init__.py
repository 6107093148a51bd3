"""The formats in which other projects send routes: `from_*` reads one, `to_*` writes it.

Every format but Megatron's two has a column for each decoder layer, as the engine returned them; dense layers hold
zeros. Megatron's have columns for the routed layers alone; one is the answer of its server, the other its router trace.
No format has policy versions. Only NeMo RL's can mark a row as missing.

Reading is strict: it raises WireError with the name of the field, and never guesses a layout from a shape.

In all functions, `spec` is the RouterSpec of the model. `allow_zero_layers` has the meaning that it has in
`Routes.from_engine`: with top_k 1, it accepts a layer whose rows are all expert 0, which otherwise counts as not
captured from 64 rows on.
"""

from router_replay.wire.peers.megatron import from_megatron, to_megatron
from router_replay.wire.peers.megatron_trace import from_megatron_trace
from router_replay.wire.peers.nemo import from_nemo, to_nemo
from router_replay.wire.peers.prime_rl import from_dynamo, from_prime_rl, peer_start, to_dynamo, to_prime_rl
from router_replay.wire.peers.sglang import from_sglang, to_sglang
from router_replay.wire.peers.skyrl import from_skyrl, to_skyrl
from router_replay.wire.peers.vllm import from_vllm, to_vllm

__all__ = [
    "from_dynamo",
    "from_megatron",
    "from_megatron_trace",
    "from_nemo",
    "from_prime_rl",
    "from_sglang",
    "from_skyrl",
    "from_vllm",
    "peer_start",
    "to_dynamo",
    "to_megatron",
    "to_nemo",
    "to_prime_rl",
    "to_sglang",
    "to_skyrl",
    "to_vllm",
]
