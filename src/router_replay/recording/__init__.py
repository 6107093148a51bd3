"""Keep trajectories in a file: tokens, log-probs, routes and rewards, in a form that survives a kill.

Nothing here imports torch.
"""

from router_replay.recording.file import TrajectoryReader, TrajectoryRecord, TrajectoryWriter

__all__ = ["TrajectoryReader", "TrajectoryRecord", "TrajectoryWriter"]
