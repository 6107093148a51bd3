"""Connects to NVIDIA Dynamo with vLLM workers."""

from router_replay.engines.dynamo.engine import DynamoEngine as DynamoEngine
