"""Replay inside the trainers of other projects."""
