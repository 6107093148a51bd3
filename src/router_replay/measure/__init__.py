"""Measures how much two passes over the same tokens differ, in their log-probs and in their experts."""

from router_replay.measure.agreement import RouteAgreement, route_agreement
from router_replay.measure.gap import LogprobGap, logprob_gap

__all__ = ["LogprobGap", "RouteAgreement", "logprob_gap", "route_agreement"]
