"""Joins the turns, resumes and branches of one rollout into one sequence of tokens and rows."""

from router_replay.stitch.trajectory import Trajectory as Trajectory

__all__ = ["Trajectory"]
