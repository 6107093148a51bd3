"""Measures how much two passes over the same tokens differ, in log-probs and experts, and how experts are used."""

from router_replay.measure.agreement import RouteAgreement, route_agreement
from router_replay.measure.gap import LogprobGap, logprob_gap
from router_replay.measure.load import expert_load
from router_replay.measure.out_of_line import out_of_line
from router_replay.measure.routing import RouterFigures

__all__ = [
    "LogprobGap",
    "RouteAgreement",
    "RouterFigures",
    "expert_load",
    "logprob_gap",
    "out_of_line",
    "route_agreement",
]
