"""Packs, pads and shards samples for a trainer. The same code moves tokens and rows."""

from router_replay.batch.local import LocalBatch as LocalBatch
from router_replay.batch.packing import pack as pack
from router_replay.batch.sample import Sample as Sample
from router_replay.batch.sharding import shard_index as shard_index
from router_replay.batch.spans import RowSpans as RowSpans
from router_replay.batch.spans import Span as Span
from router_replay.batch.types import NO_LABEL as NO_LABEL
from router_replay.batch.types import Batch as Batch

__all__ = ["NO_LABEL", "Batch", "LocalBatch", "RowSpans", "Sample", "Span", "pack", "shard_index"]
