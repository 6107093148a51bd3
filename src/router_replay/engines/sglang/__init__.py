"""Connects to an SGLang server by URL."""

from router_replay.engines.sglang.engine import SglangEngine as SglangEngine
