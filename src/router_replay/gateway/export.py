"""Writes the trajectories of a session as JSON with routes in the wire format, and reads them back as samples.

{"id": "game-7", "answers": 3, "trajectories": [
    {"token_ids": [...], "logprobs": [...], "loss_mask": [0, 1, ...], "versions": [...],
     "finish_reason": "stop", "routes": "base64 of router_replay.wire bytes"}]}

samples = read_session(body)                          # ready for router_replay.pack
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

import numpy as np

from router_replay import wire
from router_replay.batch import Sample
from router_replay.errors import WireError
from router_replay.gateway.sessions import Session
from router_replay.spec import RouterSpec


def write_session(session: Session) -> dict[str, Any]:
    """Return what `GET /sessions/NAME` answers for this `session`."""
    trajectories = []
    for place, trajectory in enumerate(session.trajectories):
        tokens = trajectory.token_ids
        routes = wire.encode(trajectory.routes, codec="sets", token_ids=tokens)
        trajectories.append(
            {
                "token_ids": tokens.tolist(),
                "logprobs": trajectory.logprobs.tolist(),
                "loss_mask": trajectory.loss_mask.astype(int).tolist(),
                "versions": trajectory.versions.tolist(),
                "finish_reason": session.finish_reasons.get(place),
                "routes": base64.b64encode(routes).decode(),
            }
        )
    return {**session.summary(), "trajectories": trajectories}


def read_session(
    body: str | bytes | dict[str, Any], spec: RouterSpec | None = None, advantages: float = 0.0
) -> list[Sample]:
    """Return one checked Sample per trajectory of `body`, the answer of `GET /sessions/NAME`.

    `spec`, if given, must be that of the routes. `advantages` is given to every sample. The digest of the tokens is
    checked. Raises WireError if the body is not such an answer.
    """
    try:
        parsed = body if isinstance(body, dict) else json.loads(body)
        items = parsed["trajectories"]
        blobs = [base64.b64decode(item["routes"], validate=True) for item in items]
        samples = []
        for place, (item, blob) in enumerate(zip(items, blobs, strict=True)):
            tokens = np.asarray(item["token_ids"], np.int64)
            sample = Sample(
                tokens,
                np.asarray(item["logprobs"], np.float32),
                np.asarray(item["loss_mask"], bool),
                wire.decode(blob, token_ids=tokens, spec=spec),
                advantages,
                np.asarray(item["versions"], np.int64),
            )
            samples.append(Sample.of(sample, where=f"trajectory {place}"))
    except (KeyError, TypeError, binascii.Error, json.JSONDecodeError) as error:
        raise WireError(
            f"this is not the answer of GET /sessions/NAME ({type(error).__name__}: {error}): expected a JSON object "
            "with trajectories, each with token_ids, logprobs, loss_mask, versions and routes"
        ) from error
    return samples
