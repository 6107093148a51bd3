"""Routes: the experts that each token used, one row per token, with the capture state and version of each row.

Two tokens through a model whose routed layers are 1 and 3, with 2 of 8 experts:

    spec = RouterSpec(num_experts=8, top_k=2, layers=(1, 3))
    routes = Routes([[[5, 0], [2, 7]],      # token 0: experts 5 and 0 in layer 1, 2 and 7 in layer 3
                     [[1, 5], [7, 3]]],     # token 1
                    spec)
    routes.captured        # [True, True]
    routes[1:].ids         # [[[1, 5], [7, 3]]], a view

Shapes: T rows (tokens), L routed layers, K slots (top_k).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from router_replay import kernel
from router_replay.arguments import exact_int, int64_array
from router_replay.errors import RoutesError, shorten
from router_replay.route_source import RouteSource
from router_replay.row_checks import (
    NEVER_CAPTURED,
    as_integers,
    captured_runs,
    checked_ids,
    never_captured,
    read_only,
    version_runs,
    zero_layers,
)
from router_replay.runs import Runs
from router_replay.spec import RouterSpec


def row_count(prompt_tokens: int, completion_tokens: int, start: int = 0) -> int:
    """Return the number of rows of an answer from position `start` on.

    The last token was never forwarded, so it has no row.
    """
    return prompt_tokens + completion_tokens - 1 - start


class Routes(RouteSource):
    """Holds the expert ids of T tokens in every routed layer.

    `ids` [T, L, K] are the experts, in `spec.dtype` and read-only; `spec` is the RouterSpec of the model.
    `captured[i]` says whether row i is known; where it is not, the content of `ids[i]` has no meaning. By default all
    rows are captured. `versions[i]` is the policy version whose weights routed row i; one number stands for all rows.

    The constructor checks every captured row and raises RoutesError for a bad one. A Routes that is derived from
    another is not checked again. An array that other code could still write to is copied before the check, so that
    checked rows cannot change.
    """

    __slots__ = ("_captured", "_ids", "_spec", "_versions")

    def __init__(
        self,
        ids: ArrayLike,
        spec: RouterSpec,
        captured: ArrayLike | None = None,
        versions: ArrayLike | int | None = None,
    ) -> None:
        self._check_in(ids, spec, captured, versions, owned=False)

    def _check_in(self, ids: ArrayLike, spec: RouterSpec, captured: Any, versions: Any, owned: bool) -> None:
        """Check the arguments and store them.

        `owned` says that the caller made the array for this Routes and keeps no other way to write to it.
        """
        ids_TLK = as_integers(ids, "ids")
        if ids_TLK.ndim != 3 or ids_TLK.shape[1:] != spec.row_shape:
            raise RoutesError(
                f"ids must have the shape [rows, {spec.row_shape[0]} layers, {spec.top_k} slots] of the spec, "
                f"got {list(ids_TLK.shape)}; for an engine's array over all decoder layers use Routes.from_engine"
            )
        rows = len(ids_TLK)
        self._captured = captured_runs(captured, rows)
        self._versions = version_runs(versions, rows)
        self._ids = checked_ids(ids_TLK, spec, self._captured, owned)
        self._spec = spec

    # -- making ---------------------------------------------------------------------------------

    @classmethod
    def trusted(cls, ids: np.ndarray, spec: RouterSpec, captured: Runs, versions: Runs | None) -> Routes:
        """Make a Routes without checking it, for rows that were checked before, such as a part of another Routes.

        The caller guarantees the following; use Routes(...) where any of it is uncertain. `ids` [T, L, K] has the
        spec's dtype and shape, and no other code writes to it. Every captured row holds top_k different experts
        below num_experts. `captured` and `versions` are runs over the T rows.
        """
        self = object.__new__(cls)
        self._ids = read_only(ids)
        self._spec = spec
        self._captured = captured
        self._versions = versions
        return self

    @classmethod
    def missing(cls, rows: int, spec: RouterSpec) -> Routes:
        """Make `rows` uncaptured rows for the model of `spec`: padding, or rows that an engine did not return."""
        rows = exact_int(rows, "rows", RoutesError)
        ids = np.zeros((rows, *spec.row_shape), spec.dtype)
        return cls.trusted(ids, spec, Runs.constant(False, rows), None)

    @classmethod
    def from_engine(cls, array: ArrayLike, spec: RouterSpec, *, allow_zero_layers: bool = False) -> Routes:
        """Make a Routes from an engine's `array` over ALL decoder layers of the model of `spec`, [T, all layers, K].

        A routed layer that is zero in every row was never captured: the engine's hook did not run there. With
        top_k 2 or more, such a row repeats expert 0 and raises RoutesError. With top_k 1, a row of expert 0 can be
        real, so the layer is refused only if there are 64 rows or more; `allow_zero_layers=True` accepts it.
        """
        return cls._from_engine(array, spec, allow_zero_layers)

    @classmethod
    def _from_engine(
        cls,
        array: ArrayLike,
        spec: RouterSpec,
        allow_zero_layers: bool,
        captured: np.ndarray | None = None,
        owned: bool = False,
    ) -> Routes:
        """Do the work of `from_engine`; rows that are not `captured` must hold zeros."""
        array_TAK = as_integers(array, "the engine's array")
        width = spec.num_layers
        if len(set(spec.layers)) != len(spec.layers):
            raise RoutesError(
                f"a layer of this spec has two routers (layers [{shorten(spec.layers, 8)}]), but an engine's array has "
                "one column per decoder layer; pass one column per router to Routes(ids, spec)"
            )
        if array_TAK.ndim != 3 or array_TAK.shape[2] != spec.top_k:
            raise RoutesError(
                f"an engine's array must have the shape [rows, all decoder layers, {spec.top_k} slots], "
                f"got {list(array_TAK.shape)}"
            )
        if array_TAK.shape[1] <= spec.layers[-1] or (width is not None and array_TAK.shape[1] != width):
            expected = f"{width}" if width is not None else f"more than {spec.layers[-1]}"
            raise RoutesError(
                f"an engine's array must have a column for every decoder layer, dense ones included: expected "
                f"{expected} (routed layers [{shorten(spec.layers, 8)}]), got {array_TAK.shape[1]}; "
                "for an array over the routed layers only use Routes(ids, spec)"
            )
        every_layer = spec.layers == tuple(range(array_TAK.shape[1]))
        ids_TLK = array_TAK if every_layer else array_TAK[:, list(spec.layers)]  # list indexing makes a copy
        self = object.__new__(cls)
        known = len(ids_TLK) if captured is None else int(captured.sum())
        refused_from = 2 if spec.top_k > 1 else NEVER_CAPTURED
        if known >= refused_from and spec.num_experts > 1 and not (allow_zero_layers and spec.top_k == 1):
            columns = zero_layers(ids_TLK)
            if columns:
                advice = "; if expert 0 is the real choice, pass allow_zero_layers=True" if spec.top_k == 1 else ""
                raise never_captured(spec, columns, known, advice)
        self._check_in(ids_TLK, spec, captured, None, owned or not every_layer)
        return self

    @staticmethod
    def concat(parts: Sequence[Routes]) -> Routes:
        """Concatenate the rows of all `parts`, in order. A single part is returned unchanged.

        Raises RoutesError if there is no part, or if the parts belong to different models.
        """
        if not parts:
            raise RoutesError("Routes.concat needs at least one part; Routes.missing(0, spec) is an empty Routes")
        first = parts[0]
        for number, part in enumerate(parts):
            if part.spec != first.spec:
                raise RoutesError(f"part {number} is of another model: expected {first.spec}, got {part.spec}")
        if len(parts) == 1:
            return first
        versions = None
        if any(part._versions is not None for part in parts):
            versions = Runs.concat([part.version_runs_or_zero() for part in parts])
        captured = Runs.concat([part._captured for part in parts])
        return Routes.trusted(np.concatenate([part._ids for part in parts]), first.spec, captured, versions)

    @staticmethod
    def join_prefill_decode(
        prefill: Routes, decode: Routes, *, prompt_length: int | None = None, decode_start: int | None = None
    ) -> Routes:
        """Join the prompt rows of a prefill worker and the remaining rows of a decode worker.

        `prefill` must have one captured row for each of the `prompt_length` prompt tokens (default: its own length).
        `decode_start` is the position of the first row of `decode`; by default its rows follow the prompt.
        Prompt rows that the decode worker also returns must be uncaptured there: it received their KV
        over the network and never routed them.
        """
        if prefill.spec != decode.spec:
            raise RoutesError(f"prefill and decode must be of the same model, got {prefill.spec} and {decode.spec}")
        prompt = len(prefill) if prompt_length is None else exact_int(prompt_length, "prompt_length", RoutesError)
        start = prompt if decode_start is None else exact_int(decode_start, "decode_start", RoutesError)
        if len(prefill) != prompt:
            raise RoutesError(
                f"the prefill worker must return one row per prompt token: expected {prompt}, got {len(prefill)}"
            )
        if not prefill.all_captured:
            raise RoutesError(
                f"prompt row {prefill.first_missing} is not captured: the prefill worker must capture all prompt rows; "
                "check that capture is switched on there"
            )
        if start > prompt:
            raise RoutesError(
                f"gap: the decode rows must start at {prompt} or before, where the prefill rows end, got {start}"
            )
        if start + len(decode) < prompt:
            raise RoutesError(
                f"gap: the decode rows must reach the prompt's end at {prompt}, got rows up to {start + len(decode)}"
            )
        repeated = decode[: prompt - start]
        if repeated._captured.spans(True):
            row = start + repeated._captured.spans(True)[0][0]
            raise RoutesError(
                f"overlap: row {row} of the prompt is captured by both workers; "
                "pass decode_start, or mark the rows that the decode worker did not route as uncaptured"
            )
        return Routes.concat([prefill, decode[prompt - start :]])

    # -- reading --------------------------------------------------------------------------------

    @property
    def ids(self) -> np.ndarray:
        """The expert ids [T, L, K] in `spec.dtype`, read-only; uncaptured rows have no meaning."""
        return self._ids

    @property
    def spec(self) -> RouterSpec:
        """The RouterSpec of the model that the rows belong to."""
        return self._spec

    @property
    def captured_runs(self) -> Runs:
        """The mask `captured` as runs of equal values."""
        return self._captured

    @property
    def versions(self) -> np.ndarray:
        """The policy version of each row [T], read-only int64; 0 if none was given. It is made new at each access."""
        return read_only(self.version_runs_or_zero().expand().astype(np.int64))

    @property
    def version_runs(self) -> Runs | None:
        """The policy versions as runs; None if no versions were given."""
        return self._versions

    @property
    def nbytes(self) -> int:
        """The number of bytes of `ids`."""
        return self._ids.nbytes

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, rows: slice) -> Routes:
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise RoutesError(
                f"Routes can be indexed only by a slice of rows with step 1, got {rows!r}; use .ids for single values"
            )
        start, stop, _ = rows.indices(len(self))
        stop = max(start, stop)
        versions = None if self._versions is None else self._versions.slice(start, stop)
        return Routes.trusted(self._ids[start:stop], self._spec, self._captured.slice(start, stop), versions)

    def read(self, first: int = 0, last: int | None = None, layers: Sequence[int] | None = None) -> Routes:
        """Return the rows from `first` up to but without `last` (default: all), of these `layers` (default: all).

        Nothing is copied if the layers are those of the spec.
        """
        rows = self if first == 0 and last in (None, len(self)) else self[first:last]
        return rows if layers is None or tuple(layers) == self._spec.layers else rows.select_layers(layers)

    def take(self, index: ArrayLike) -> Routes:
        """Return a Routes whose row i is row `index[i]` of this one, copied; an index of -1 makes an uncaptured row."""
        index = int64_array(index, "row numbers", RoutesError)
        if len(index) and (index.min() < -1 or index.max() >= len(self)):
            raise RoutesError(f"row numbers must lie in [-1, {len(self)}), got {index.min()} to {index.max()}")
        absent = index < 0
        if not len(self):
            return Routes.missing(len(index), self._spec)
        ids = self._ids[index]
        ids[absent] = 0
        captured = self.captured[index] & ~absent
        versions = None if self._versions is None else Runs.of(np.where(absent, 0, self.versions[index]))
        return Routes.trusted(ids, self._spec, Runs.of(captured), versions)

    def select_layers(self, layers: Sequence[int]) -> Routes:
        """Return a Routes with only the columns of `layers` (absolute ids), such as those of a pipeline stage."""
        spec = self._spec.select(layers)
        columns = [column for column, layer in enumerate(self._spec.layers) if layer in set(spec.layers)]
        ids = np.ascontiguousarray(self._ids[:, columns])
        return Routes.trusted(ids, spec, self._captured, self._versions)

    def copy(self) -> Routes:
        """Copy the rows into new memory, so that a slice does not keep the whole array alive."""
        return Routes.trusted(self._ids.copy(), self._spec, self._captured, self._versions)

    def sorted(self) -> Routes:
        """Sort the slots of each set, so that equal sets have equal bytes; returns self if the spec is ordered."""
        if self._spec.ordered:
            return self
        return Routes.trusted(kernel.sort_sets(self._ids), self._spec, self._captured, self._versions)

    def with_versions(self, versions: ArrayLike | int) -> Routes:
        """Return the same rows with these policy versions: one integer for all rows, or one per row."""
        runs = version_runs(versions, len(self))
        return Routes.trusted(self._ids, self._spec, self._captured, runs)

    # -- comparing ------------------------------------------------------------------------------

    def same_sets(self, other: Routes) -> bool:
        """Return whether `other` has the same spec, captured rows and experts; the order of the slots is ignored."""
        if self._spec != other._spec or len(self) != len(other) or self._captured != other._captured:
            return False
        mine, theirs = self._captured_ids(), other._captured_ids()
        return np.array_equal(mine, theirs) or np.array_equal(kernel.sort_sets(mine), kernel.sort_sets(theirs))

    def __eq__(self, other: object) -> bool:
        """Compare exactly, including slot order and versions; the content of uncaptured rows is ignored."""
        if not isinstance(other, Routes):
            return NotImplemented
        return (
            self._spec == other._spec
            and self._captured == other._captured
            and self.version_runs_or_zero() == other.version_runs_or_zero()
            and np.array_equal(self._captured_ids(), other._captured_ids())
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        known = sum(end - start for start, end in self._captured.spans(True))
        return (
            f"Routes({len(self)} rows, {known} captured, {len(self._spec.layers)} layers, "
            f"{self._spec.top_k} of {self._spec.num_experts} experts)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the rows as checked ones; NumPy's own pickling would restore the arrays as writable."""
        return Routes.trusted, (self._ids, self._spec, self._captured, self._versions)

    def _captured_ids(self) -> np.ndarray:
        return self._ids if self.all_captured else self._ids[self.captured]

    def version_runs_or_zero(self) -> Runs:
        """Return the policy versions as runs; version 0 for all rows if no versions were given."""
        return Runs.constant(0, len(self)) if self._versions is None else self._versions
