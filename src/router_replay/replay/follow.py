"""Following makes every forward pass find its own rows in a RouteStore, by the tokens that it is given.

    store = RouteStore(replayer.spec)
    store.add_completion(request, completion)        # for each answer of the rollout
    with replayer.follow(store):
        trainer.train()                              # shuffles, splits, pads and packs as it likes

The host's data path is not touched: the plan of a pass is made from the decoder's own arguments. Shapes: T slots of
the pass, L routed layers, K top-k.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Hashable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from router_replay.errors import ReplayError
from router_replay.families import by_class
from router_replay.replay import checkpoint
from router_replay.replay.adapters import Adapters
from router_replay.replay.callers import with_tokens
from router_replay.replay.departure import departure
from router_replay.replay.found_rows import FoundRows, Slots, part_of, refuse_missing
from router_replay.replay.layout import Layout, layout_of
from router_replay.replay.state import Plan, State
from router_replay.replay.stats import Counters
from router_replay.store import RouteStore

READS_TOKENS = (
    "follow() reads the tokens of each pass on the host, so the decoder cannot be one compiled graph: compile without "
    "fullgraph=True, or compile its layers (layer.compile() for each), or use replay(batch)"
)
OnMissing = Literal["raise", "live"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Holds the arguments of RouterReplay.follow, which describes them.

    These are `on_missing`, `evaluation`, `reference`, `pad_token_id` and `agreement`.
    """

    on_missing: OnMissing
    evaluation: bool
    reference: bool
    pad_token_id: int | None
    agreement: bool

    def __post_init__(self) -> None:
        if self.on_missing not in ("raise", "live"):
            raise ReplayError(f'on_missing must be "raise" or "live", got {self.on_missing!r}')


class Following:
    """Replays in each forward pass the rows that a RouteStore has for its tokens; RouterReplay.follow makes it.

    Use it in a `with` statement, or call `start` and `stop`. Both may be repeated.
    """

    def __init__(
        self,
        store: RouteStore,
        model: nn.Module,
        stack: nn.Module,
        state: State,
        counters: Counters,
        settings: Settings,
    ) -> None:
        """Take the `store`, the `model` with its decoder `stack`, its `state` and `counters`, and the `settings`."""
        self.store = store
        self._model = model
        self._state = state
        self._counters = counters
        self._settings = settings
        self._names = [name for name in inspect.signature(type(stack).forward).parameters if name != "self"]
        self._encoder_cache = by_class(type(stack)).cache_of_the_encoder
        self._open = contextlib.ExitStack()
        self._started = False
        self._keys: Sequence[Hashable] | None = None
        self._adapters: Adapters | None = None
        self._last: tuple[Plan | None, FoundRows | None] = (None, None)
        self._passes = {"followed": 0, "live": 0}
        self._totals = {"replayed": 0, "live": 0, "ambiguous": 0, "unmatched": 0}

    def start(self) -> Following:
        """Follow from now on, until `stop`. Raises ReplayError if this object has started already.

        Which adapters (PEFT) are those of the policy is read here.
        """
        if self._started:
            raise ReplayError("this follow block has started already: call stop() first")
        checkpoint.remember(self._model, self._state)
        self._adapters = Adapters(self._model)
        self._open.enter_context(self._state.block(self))
        self._started = True
        return self

    def stop(self) -> None:
        """End what `start` began; the model then routes as before. Nothing happens if it has not started."""
        self._started = False
        self._open.close()

    def __enter__(self) -> Following:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @contextlib.contextmanager
    def keys(self, keys: Sequence[Hashable]) -> Iterator[None]:
        """Name the samples of the forward passes in this block by the keys that they were stored with.

        `keys` has one entry per sequence of each pass, in the order of the batch rows, and within a row in the order of
        the tokens; None stands for a sample without a key.
        """
        before, self._keys = self._keys, list(keys)
        try:
            yield
        finally:
            self._keys = before

    def metrics(self) -> dict[str, int]:
        """Return the counts since this object was made, by the names of the metrics.

        `routes/replayed` and `routes/live` count rows, as `RouterReplay.stats` does. `routes/ambiguous` counts
        sequences whose tokens fit several samples with different rows, and `routes/unmatched` sequences that are not
        in the store. `routes/passes_followed` and `routes/passes_live` count forward passes; the latter are those of
        evaluation, generation and the reference. `routes/evicted` counts sequences that left the store.
        """
        passes = {f"routes/passes_{name}": count for name, count in self._passes.items()}
        totals = {f"routes/{name}": count for name, count in self._totals.items()}
        return {**totals, **passes, "routes/evicted": self.store.evicted}

    # -- one pass ---------------------------------------------------------------------------------

    @torch.compiler.disable(reason=READS_TOKENS)
    def plan_for(self, stack: nn.Module, args: Any, kwargs: dict[str, Any]) -> Plan | None:
        """Return the plan of a pass of the decoder `stack` with these `args` and `kwargs`; None for a live pass.

        Raises ReplayError if a row that bears loss is not in the store, unless `on_missing` is "live".
        """
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._last = (None, None)
        if self._is_live(stack, inputs):
            return None
        layout = layout_of(with_tokens(stack, inputs))
        found = self._find(layout)
        plan = found.plan(self.store.spec, layout.device, agreement=self._settings.agreement)
        self._last = (plan, found)
        return plan

    @torch.compiler.disable(reason=READS_TOKENS)
    def passed(self) -> None:
        """Count the pass of the last plan."""
        plan, found = self._last
        self._passes["live" if found is None else "followed"] += 1
        if found is None:
            return
        for name in self._totals:
            self._totals[name] += getattr(found, name)
        self._counters.ambiguous += found.ambiguous
        if plan is None:
            self._counters.add_live(found.live)
        else:
            self._counters.add(plan)

    def _is_live(self, stack: nn.Module, inputs: dict[str, Any]) -> bool:
        """Return whether the pass stays live: evaluation, the reference's adapters, or generation."""
        if not self._settings.evaluation and not stack.training:
            return True
        if not self._settings.reference and self._adapters is not None and self._adapters.changed():
            return True
        cache = inputs.get("past_key_values")
        if cache is None or self._encoder_cache:
            return False
        if not torch.is_grad_enabled():  # `generate` brings its cache; a pass that scores a sequence has none
            return True
        if cache.get_seq_length():
            raise ReplayError(
                "this pass has a gradient and a key-value cache that holds tokens already, but rows are found by whole "
                "sequences: run the whole sequence in one pass (use_cache=False)"
            )
        return False

    def _find(self, layout: Layout) -> FoundRows:
        """Return the rows of all sequences of a pass."""
        sequences = [slots for slots in layout.sequences if not self._is_padding(layout, slots)]
        keys = self._keys_of(sequences)
        found = FoundRows.empty(len(layout), self.store.spec, layout.device)
        for number, (slots, key) in enumerate(zip(sequences, keys, strict=True)):
            self._find_one(found, layout, number, slots, key)
        return found

    def _find_one(self, found: FoundRows, layout: Layout, number: int, slots: Slots, key: Hashable) -> None:
        tokens = layout.tokens_T[slots]
        match = self.store.find(tokens, key=key)
        if match is None and not layout.masked and self._settings.pad_token_id is not None:
            slots = self._without_padding(layout, slots, key)
            tokens = layout.tokens_T[slots]
            match = self.store.find(tokens, key=key)
        strict = self._settings.on_missing == "raise"
        if match is None:
            if strict and len(tokens) > 1:
                raise departure(self.store, layout, number, slots, key)
            found.unmatched += len(tokens) > 1
            match = self.store.find_beginning(tokens, key=key)
            if match is None:
                found.live += len(tokens) - 1
                return
            predicting = len(tokens) - 1
        else:
            predicting = min(len(tokens), match.tokens - 1)  # the last token of the stored sequence predicts nothing
            if strict and not match.routes.all_captured:
                refuse_missing(match.routes, match.bears_loss, predicting, number)
        found.ambiguous += match.ambiguous
        found.put(slots, match.routes, predicting)

    def _without_padding(self, layout: Layout, slots: Slots, key: Hashable) -> Slots:
        """Return the slots of a sequence without the padding at its end, of which the pass has no mask.

        A sequence often ends with the token that pads others, so that the longest stored one is preferred.
        """
        tokens, pad = layout.tokens_T[slots], self._settings.pad_token_id
        whole = self.store.find_beginning(tokens, key=key)
        if whole is not None and (tokens[whole.tokens :] == pad).all():
            return part_of(slots, 0, whole.tokens)
        return part_of(slots, 0, int(np.flatnonzero(tokens != pad)[-1]) + 1)

    def _is_padding(self, layout: Layout, slots: Slots) -> bool:
        pad = self._settings.pad_token_id
        return pad is not None and not layout.masked and bool((layout.tokens_T[slots] == pad).all())

    def _keys_of(self, sequences: Sequence[Any]) -> Sequence[Hashable]:
        if self._keys is None:
            return [None] * len(sequences)
        if len(self._keys) != len(sequences):
            raise ReplayError(
                f"keys must have one entry per sequence of the pass: expected {len(sequences)}, got {len(self._keys)}"
            )
        return self._keys
