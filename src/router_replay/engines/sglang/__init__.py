"""SGLang: a server by its URL."""

from router_replay.engines.sglang.engine import SglangEngine as SglangEngine
