"""Runs the forward passes of the embedded engine: prompts first, then one token of every running sample at a time.

Prompts of equal length share a pass and join the running batch afterwards. RouterReplay.record records the rows, and
RouterReplay.replay forces them. All of this runs on the engine's thread.

Shapes: G prompts in one pass, T tokens in each, B running samples, L routed layers, K top-k, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from router_replay.engines.embedded.cache import RaggedCache
from router_replay.engines.embedded.samples import Flight, Sample
from router_replay.engines.embedded.sampling import draw
from router_replay.errors import EngineError
from router_replay.forward.inner import inner_model
from router_replay.replay import RouterReplay
from router_replay.routes import Routes


class Runner:
    """Runs a model on the samples in progress. An error in a pass fails only the samples of that pass."""

    def __init__(self, model: Any, replayer: RouterReplay, *, one_at_a_time: bool) -> None:
        self._model = model
        self._inner = inner_model(model)
        self._replayer = replayer
        self._own_cache = one_at_a_time  # the model creates a cache of its own class
        self._last_logits_only = "logits_to_keep" in inspect.signature(type(self._inner).forward).parameters
        self._cache = RaggedCache()
        self.samples: list[Sample] = []

    def prefill(self, samples: Sequence[Sample], version: int) -> None:
        """Compute the prompts of these samples (all of one length), sample a token each, and add them to the batch."""
        flights = list(dict.fromkeys(sample.flight for sample in samples))
        length = len(flights[0].tokens)
        cache = None if self._own_cache else DynamicCache(config=self._inner.config)
        try:
            tokens_GT = torch.tensor([flight.tokens for flight in flights], device=self._inner.device)
            positions_GT = torch.arange(length, device=tokens_GT.device).expand_as(tokens_GT)
            forced = _forced(flights, self._replayer)
            logits_GV, rows, cache = self._forward(tokens_GT, positions_GT, None, cache, forced)
            places = [flights.index(sample.flight) for sample in samples]
            rows_GTLK = rows.reshape(len(flights), length, *rows.shape[1:])
            fresh = RaggedCache(cache, [length] * len(flights))
            fresh.select(places)  # the samples of one request share its prompt
            self._sample(samples, logits_GV[places], [rows_GTLK[place] for place in places], version)
            self._cache.join(fresh)
        except Exception as error:
            _fail(flights, error)
            return
        self.samples += samples
        self.drop_landed()

    def decode(self, version: int) -> None:
        """Generate one more token for every running sample."""
        cache, device = self._cache, self._inner.device
        try:
            tokens_B1 = torch.tensor([[sample.tokens[-1]] for sample in self.samples], device=device)
            mask = cache.mask(device)
            logits_BV, rows_BLK, cache.cache = self._forward(
                tokens_B1, cache.positions(device), mask, cache.cache, None
            )
            cache.advance()
            self._sample(self.samples, logits_BV, [rows_BLK[i : i + 1] for i in range(len(rows_BLK))], version)
        except Exception as error:
            # Some layers may have cached the token and some not, so no sample of this batch can continue.
            _fail([sample.flight for sample in self.samples], error)
        self.drop_landed()

    def drop_landed(self) -> None:
        """Remove finished, failed and aborted samples from the batch."""
        kept = [i for i, sample in enumerate(self.samples) if not sample.finish and not sample.flight.landed]
        if len(kept) < len(self.samples):
            self._cache.select(kept)
            self.samples = [self.samples[i] for i in kept]

    def _forward(
        self, tokens: Any, positions: Any, mask: Any, cache: Any, forced: Routes | None
    ) -> tuple[Any, np.ndarray, Any]:
        """Run a pass.

        Returns the logits of each sequence's last token, the rows of all tokens in order, and the cache.
        """
        replay = contextlib.nullcontext() if forced is None else self._replayer.replay(forced)
        last = {"logits_to_keep": 1} if self._last_logits_only else {}
        with replay, self._replayer.record() as recorded:
            output = self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                **last,
            )
        return output.logits[:, -1], recorded.tensors.ids.cpu().numpy(), output.past_key_values

    def _sample(self, samples: Sequence[Sample], logits: Any, rows: Sequence[np.ndarray], version: int) -> None:
        samplings = [sample.flight.request.sampling for sample in samples]
        tokens, logprobs, usable = draw(logits, samplings, [sample.uniform() for sample in samples])
        answers = zip(samples, rows, tokens.tolist(), logprobs.tolist(), usable.tolist(), strict=True)
        for sample, its_rows, token, logprob, good in answers:
            if good:
                sample.take(its_rows, token, logprob, version)
            elif not sample.flight.landed:
                place = len(sample.flight.tokens) + len(sample.tokens)
                reason = f"the logits of position {place} are not finite: check the weights of version {version}"
                sample.flight.fail(EngineError(f"{sample.flight.request.id}: {reason}"))


def _forced(flights: Sequence[Flight], replayer: RouterReplay) -> Routes | None:
    """Return the forced rows of one pass, in the order of its tokens; None if nothing is forced."""
    parts = []
    for flight in flights:
        forced = flight.request.forced_routes
        given = 0 if forced is None else len(forced)
        parts += [] if forced is None else [forced]
        parts.append(Routes.missing(len(flight.tokens) - given, replayer.spec))
    rows = Routes.concat(parts)
    return rows if rows.captured.any() else None


def _fail(flights: Sequence[Flight], error: Exception) -> None:
    for flight in dict.fromkeys(flights):
        if not flight.landed:
            failure = EngineError(f"{flight.request.id}: the model failed in a pass: {type(error).__name__}: {error}")
            failure.__cause__ = error
            flight.fail(failure)
