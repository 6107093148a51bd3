"""Measures how much two passes over the same tokens differ, in log-probs and experts, and the load of the experts."""

from router_replay.measure.agreement import RouteAgreement, route_agreement
from router_replay.measure.gap import LogprobGap, logprob_gap
from router_replay.measure.load import expert_load

__all__ = ["LogprobGap", "RouteAgreement", "expert_load", "logprob_gap", "route_agreement"]
