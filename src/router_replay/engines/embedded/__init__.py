"""Provides the embedded engine, which runs a transformers model in this process."""

from router_replay.engines.embedded.engine import EmbeddedEngine as EmbeddedEngine
