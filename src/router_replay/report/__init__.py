"""Compare runs in one HTML page that opens from disk, in JSON with the same numbers, and in a terminal table."""

from router_replay.report.page import write_report
from router_replay.report.runs import Row, Run, as_text, comparison
from router_replay.run_files import read_metrics

__all__ = ["Row", "Run", "as_text", "comparison", "read_metrics", "write_report"]
