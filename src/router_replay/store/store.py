"""RouteStore keeps routes by the content of their tokens, so that a forward pass can find its own rows.

    store = RouteStore(spec)
    store.add_completion(request, completion)         # an engine's answer; also add_trajectory, add_blob and add
    with replayer.follow(store):                      # see RouterReplay.follow
        loss = ...

A sequence is found by the digest that the wire format has for its tokens, and its tokens are then compared. A forward
pass may also hold only the beginning of a stored sequence: a trainer may leave out the last token, which predicts
nothing, or cut a sequence that is too long. Row i depends on no token after token i, so these rows are the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from router_replay import wire
from router_replay.arguments import as_array, exact_int, int64_array
from router_replay.errors import StoreError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.store.captures import Capture, Stored, agree, completed
from router_replay.store.index import SequenceIndex, tokens_of
from router_replay.store.types import CompletionLike, Match, Nearest, RequestLike, TrajectoryLike
from router_replay.wire.envelope import digest_of

DEFAULT_BYTES = 4 << 30


class RouteStore:
    """Holds routes by the content of their tokens. Threads may fill and read it at the same time.

    `spec` is the RouterSpec of the model. `max_bytes` bounds the memory of tokens and rows: the sequences that were
    not used for the longest time leave first, and are counted in `evicted`. Bad input raises StoreError, or
    RoutesError and WireError from the parts that read it.

    Two samples can have the same tokens and other rows. A `key` that is passed with each of them keeps both apart;
    the forward pass then names the key (see `Following.keys`). Without a key the first capture wins, unless a later
    one has rows of a newer policy version: then the newer one wins. Each use of such rows is counted as ambiguous.
    Call `clear` when the samples of a step are trained, and rows of an older policy cannot be met.
    """

    def __init__(self, spec: RouterSpec, *, max_bytes: int = DEFAULT_BYTES) -> None:
        self._spec = spec
        self._max_bytes = exact_int(max_bytes, "max_bytes", StoreError, least=1)
        self._stored: OrderedDict[bytes, Stored] = OrderedDict()  # by the digest; the last used one is last
        self._index = SequenceIndex()
        self._lock = threading.Lock()
        self._nbytes = 0
        self._evicted = 0
        self._added = 0

    # -- filling ----------------------------------------------------------------------------------

    def add(
        self,
        token_ids: ArrayLike,
        routes: Routes,
        *,
        start: int = 0,
        loss_mask: ArrayLike | None = None,
        key: Hashable = None,
    ) -> bool:
        """Add the `routes` of a whole sequence, prompt and completion; return whether the store changed.

        `token_ids` are all tokens. `routes` are the rows [start, tokens), or all of these but the last, which no engine
        computes; rows before `start` count as missing. `loss_mask` [tokens] is True for the tokens of the loss: a row
        that is missing where it predicts none of them is no error. Without it every token bears loss. `key` tells
        samples with the same tokens apart; any hashable value but None.

        Tokens and key that are in the store already keep their rows, and missing ones are filled in. StoreError is
        raised if rows and tokens do not fit together, or if the sequence alone exceeds `max_bytes`.
        """
        tokens = int64_array(token_ids, "token_ids", StoreError)
        start = exact_int(start, "start", StoreError)
        self._refuse_unfit(tokens, routes, start)
        bears_loss = None if loss_mask is None else _loss_rows(loss_mask, len(tokens))
        whole = routes.copy() if not start else _from_the_first_token(routes, start)
        if not whole.any_captured and (bears_loss is None or bears_loss.any()):
            raise StoreError(
                f"none of the {len(routes)} rows is captured: switch on capture in the engine. A sequence that is "
                "meant to be routed live is added with a loss_mask of zeros"
            )
        sequence = _bytes_of(tokens)
        with self._lock:
            self._added += 1
            return self._keep(digest_of(tokens, 0), sequence, key, Capture(whole, bears_loss, self._added))

    def add_completion(self, request: RequestLike, completion: CompletionLike, *, key: Hashable = None) -> bool:
        """Add an engine's answer, `completion`, to a `request`; return whether the store changed.

        The sampled tokens bear loss. An answer without tokens, aborted before the first one, adds nothing. `key` is as
        in `add`.
        """
        prompt = int64_array(request.token_ids, "the prompt", StoreError)
        sampled = int64_array(completion.token_ids, "the completion", StoreError)
        if not len(sampled):
            return False
        mask = np.arange(len(prompt) + len(sampled)) >= len(prompt)
        tokens = np.concatenate([prompt, sampled])
        return self.add(tokens, completion.routes, start=completion.start, loss_mask=mask, key=key)

    def add_trajectory(self, trajectory: TrajectoryLike, *, key: Hashable = None) -> bool:
        """Add the rows of a `trajectory`, or of a Sample, with its loss mask; return whether the store changed.

        `key` is as in `add`.
        """
        routes = trajectory.routes
        if routes is None:
            raise StoreError("the trajectory has no routes: expected one row per token")
        return self.add(trajectory.token_ids, routes.read(), loss_mask=trajectory.loss_mask, key=key)

    def add_blob(
        self, blob: Any, token_ids: ArrayLike, *, loss_mask: ArrayLike | None = None, key: Hashable = None
    ) -> bool:
        """Add the rows of a wire `blob`; return whether the store changed.

        The blob must carry the digest of `token_ids`, all tokens of its sequence. `loss_mask` and `key` are as in
        `add`. WireError is raised if the blob is damaged, or belongs to other tokens or to another model.
        """
        tokens = int64_array(token_ids, "token_ids", StoreError)
        routes = wire.decode(blob, token_ids=tokens, spec=self._spec)
        return self.add(tokens, routes, start=wire.read_header(blob).start, loss_mask=loss_mask, key=key)

    def clear(self) -> None:
        """Remove all sequences. They are not counted as evicted."""
        with self._lock:
            self._stored.clear()
            self._index = SequenceIndex()
            self._nbytes = 0

    # -- finding ----------------------------------------------------------------------------------

    def find(self, token_ids: ArrayLike, *, key: Hashable = None) -> Match | None:
        """Return the rows of the stored sequence that is, or begins with, `token_ids`; None if there is none.

        The whole sequence is preferred, then the shortest that begins so, then the first capture. `key` selects the
        capture with this key, and no other.
        """
        tokens = int64_array(token_ids, "token_ids", StoreError)
        with self._lock:
            digest = digest_of(tokens, 0)
            exact = self._stored.get(digest)
            sequence = _bytes_of(tokens)
            if exact is not None and exact.sequence == sequence and (key is None or key in exact.captures):
                return self._use(digest, exact, key, len(tokens), [exact])
            longer = [self._stored[_digest(one)] for one in self._index.beginning_with(sequence)]
            fitting = [one for one in longer if key is None or key in one.captures]
            if not len(tokens) or not fitting:
                return None
            best = min(fitting, key=lambda one: (len(one.sequence), _first(one, key).order))
            return self._use(_digest(best.sequence), best, key, len(tokens), fitting)

    def find_beginning(self, token_ids: ArrayLike, *, key: Hashable = None) -> Match | None:
        """Return the rows of the longest stored sequence with which `token_ids` begin; None if there is none.

        `key` is as in `find`.
        """
        tokens = int64_array(token_ids, "token_ids", StoreError)
        with self._lock:
            found = self._index.longest_beginning_of(_bytes_of(tokens))
            stored = None if found is None else self._stored[_digest(found)]
            if found is None or stored is None or (key is not None and key not in stored.captures):
                return None
            return self._use(_digest(found), stored, key, len(tokens), [stored])

    def nearest(self, token_ids: ArrayLike) -> Nearest | None:
        """Return the stored sequence that shares the most first tokens with `token_ids`; None if the store is empty."""
        tokens = int64_array(token_ids, "token_ids", StoreError)
        with self._lock:
            found = self._index.nearest_to(_bytes_of(tokens))
            return None if found is None else Nearest(tokens_of(found[0]), found[1])

    def keys(self, token_ids: ArrayLike) -> tuple[Hashable, ...]:
        """Return the keys under which the sequence `token_ids` is stored, the first capture first; () if it is not."""
        tokens = int64_array(token_ids, "token_ids", StoreError)
        with self._lock:
            stored = self._stored.get(digest_of(tokens, 0))
            return () if stored is None else tuple(stored.captures)

    # -- reading ----------------------------------------------------------------------------------

    @property
    def spec(self) -> RouterSpec:
        """The RouterSpec of the model that the rows belong to."""
        return self._spec

    @property
    def max_bytes(self) -> int:
        """The most bytes of tokens and rows that are kept."""
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """The bytes of the tokens and rows that are kept now."""
        return self._nbytes

    @property
    def evicted(self) -> int:
        """How many sequences left because of `max_bytes`, since the store was made."""
        return self._evicted

    def __len__(self) -> int:
        return len(self._stored)

    def __repr__(self) -> str:
        return f"RouteStore({len(self)} sequences, {self._nbytes} of {self._max_bytes} bytes, {self._evicted} evicted)"

    # -- the work ---------------------------------------------------------------------------------

    def _refuse_unfit(self, tokens: np.ndarray, routes: Routes, start: int) -> None:
        if not isinstance(routes, Routes):
            raise StoreError(
                f"routes must be a Routes, got {type(routes).__name__}; make one with Routes.from_engine or wire.from_*"
            )
        if routes.spec != self._spec:
            raise StoreError(f"routes are of another model: expected {self._spec}, got {routes.spec}")
        most = len(tokens) - start
        if not len(tokens) or most < 1 or len(routes) not in (most, most - 1):
            raise StoreError(
                f"rows and tokens do not fit: expected {max(most - 1, 0)} rows (tokens {len(tokens)} - 1 - start "
                f"{start}), or one more where the row of the last token is known, got {len(routes)}"
            )

    def _keep(self, digest: bytes, sequence: bytes, key: Hashable, capture: Capture) -> bool:
        """Store a checked capture; the lock is held."""
        size = len(sequence) + capture.nbytes
        if size > self._max_bytes:
            raise StoreError(
                f"the sequence of {len(capture.routes)} rows needs {size} bytes, max_bytes is {self._max_bytes}: raise "
                "max_bytes"
            )
        stored = self._stored.get(digest)
        if stored is None:
            stored = self._stored[digest] = Stored(sequence, {})
            self._index.add(sequence)
            before = 0
        elif stored.sequence != sequence:
            raise StoreError(f"two sequences have the same digest {digest.hex()}: the second cannot be stored")
        else:
            before = stored.nbytes
        self._stored.move_to_end(digest)
        changed = _merge(stored, key, capture)
        self._nbytes += stored.nbytes - before
        while self._nbytes > self._max_bytes:
            self._evict()
        return changed

    def _evict(self) -> None:
        """Drop the sequence that was used least recently; of the last one, its first capture."""
        self._evicted += 1
        oldest = next(iter(self._stored.values()))
        if len(self._stored) == 1 and len(oldest.captures) > 1:
            self._nbytes -= oldest.captures.pop(next(iter(oldest.captures))).nbytes
            return
        self._stored.popitem(last=False)
        self._index.remove(oldest.sequence)
        self._nbytes -= oldest.nbytes

    def _use(self, digest: bytes, best: Stored, key: Hashable, rows: int, fitting: list[Stored]) -> Match:
        """Return the match of `best`, which then counts as used; `fitting` are all that fit the tokens and the key."""
        self._stored.move_to_end(digest)
        chosen = _first(best, key)
        ambiguous = chosen.disagrees
        if len(fitting) > 1 or (key is None and len(best.captures) > 1):
            others = [capture for one in fitting for name, capture in one.captures.items() if key in (None, name)]
            ambiguous |= any(not agree(chosen.routes, other.routes, rows) for other in others if other is not chosen)
        tokens = len(tokens_of(best.sequence))
        return Match(chosen.routes, tokens, chosen.bears_loss_R, ambiguous)


def _first(stored: Stored, key: Hashable) -> Capture:
    return stored.captures[key] if key is not None else next(iter(stored.captures.values()))


def _merge(stored: Stored, key: Hashable, capture: Capture) -> bool:
    """Add a capture to a stored sequence: the first one wins, or that of a newer version; return what changed."""
    known = stored.captures.get(key)
    if known is None:
        stored.captures[key] = capture
        return True
    if agree(known.routes, capture.routes):
        merged = completed(known.routes, capture.routes)
        grew = merged.captured.sum() > known.routes.captured.sum()
        if grew:
            known.routes = merged
        return bool(grew)
    if _newest(capture.routes) <= _newest(known.routes):
        known.disagrees = True
        return False
    capture.disagrees = True
    stored.captures[key] = capture
    return True


def _newest(routes: Routes) -> int:
    return max(routes.version_runs_or_zero().values, default=0)


def _from_the_first_token(routes: Routes, start: int) -> Routes:
    return Routes.concat([Routes.missing(start, routes.spec), routes])


def _loss_rows(loss_mask: ArrayLike, tokens: int) -> np.ndarray:
    """Return for each row but the last whether it predicts a token of the loss."""
    mask = as_array(loss_mask, "loss_mask", StoreError)
    if mask.shape != (tokens,) or not np.isin(mask, (0, 1)).all():
        raise StoreError(
            f"loss_mask must have one entry per token, 0 or 1: expected [{tokens}], got {mask.dtype} {list(mask.shape)}"
        )
    return mask[1:].astype(bool)


def _bytes_of(tokens: np.ndarray) -> bytes:
    return tokens.astype("<i8", copy=False).tobytes()


def _digest(sequence: bytes) -> bytes:
    return digest_of(tokens_of(sequence), 0)
