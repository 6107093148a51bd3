"""Show runs, a verdict of `verify` or a file of trajectories in one HTML page that opens from disk, with its JSON.

Runs are also compared in a terminal table.
"""

from router_replay.report.run_page import write_report
from router_replay.report.runs import Row, Run, as_text, comparison
from router_replay.report.trajectory_page import Lanes, write_trajectories
from router_replay.report.verdict_page import Seen, write_verdict
from router_replay.run_files import read_metrics

__all__ = [
    "Lanes",
    "Row",
    "Run",
    "Seen",
    "as_text",
    "comparison",
    "read_metrics",
    "write_report",
    "write_trajectories",
    "write_verdict",
]
