"""`pack` puts samples into bins of at most `max_tokens` slots. One layout is used for tokens, masks and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from router_replay.arguments import LARGEST, exact_int
from router_replay.batch.sample import Sample, SampleLike
from router_replay.batch.spans import RowSpans, Span
from router_replay.batch.types import NO_LABEL, Batch
from router_replay.errors import BatchError
from router_replay.route_source import RouteSource
from router_replay.routes import Routes


@dataclasses.dataclass(frozen=True)
class Layout:
    """The position of every sample in the bins. Tokens, masks and rows are all laid out by it."""

    bins: tuple[tuple[int, ...], ...]  # sample numbers per bin, in order
    lengths: tuple[int, ...]  # tokens of each sample
    padded: tuple[int, ...]  # slots of each sample

    @property
    def order(self) -> list[int]:
        """The sample numbers in the order of their slots, over all bins."""
        return [sample for members in self.bins for sample in members]

    def lay_out(self, arrays: Sequence[np.ndarray], fill: Any) -> np.ndarray:
        """Concatenate one array per sample in slot order, each padded at its end with `fill`."""
        pieces = []
        for sample in self.order:
            array = arrays[sample]
            pieces += [array, np.full(self.padded[sample] - len(array), fill, array.dtype)]
        return np.concatenate(pieces)

    def lay_out_rows(self, routes: Sequence[RouteSource]) -> Routes | RowSpans:
        """Concatenate the rows of all samples in slot order; padding is uncaptured.

        If all of them are Routes, they are read now; otherwise each stays in its source until it is used.
        """
        spans = []
        for sample in self.order:
            rows = len(routes[sample])
            spans += [Span(routes[sample], 0, rows), Span(None, 0, self.padded[sample] - rows)]
        laid = RowSpans(routes[0].spec, spans)
        return laid.read() if all(isinstance(one, Routes) for one in routes) else laid


def pack(
    samples: Sequence[SampleLike],
    max_tokens: int,
    pad_to_multiple_of: int = 1,
    *,
    pad_token_id: int = 0,
    on_missing: Literal["raise", "live"] = "raise",
) -> Batch:
    """Pack `samples` (Trajectory, Sample or similar) first-fit decreasing; the same input gives the same batch.

    A bin has at most `max_tokens` slots. Every sequence is padded at its end with `pad_token_id` to a multiple of
    `pad_to_multiple_of` slots, so that it can be sharded in either way; padding is uncaptured and has no loss. A row
    that predicts a token of the loss must be captured or BatchError is raised; `on_missing="live"` leaves such rows
    to the live router.
    """
    if on_missing not in ("raise", "live"):
        raise BatchError(f'on_missing must be "raise" or "live", got {on_missing!r}')
    pad_token_id = exact_int(pad_token_id, "pad_token_id", BatchError, least=-LARGEST)
    checked = [Sample.of(sample, where=f"sample {number}") for number, sample in enumerate(samples)]
    routes = _all_routes(checked)
    if on_missing == "raise":
        _refuse_missing(checked)
    layout = first_fit_decreasing([len(sample) for sample in checked], max_tokens, pad_to_multiple_of)

    def laid(values: Sequence[np.ndarray], fill: Any) -> np.ndarray:
        return layout.lay_out(values, fill)

    tokens = [sample.token_ids for sample in checked]
    masks = [sample.loss_mask for sample in checked]
    logprobs = [sample.logprobs for sample in checked]
    advantages = [np.asarray(sample.advantages) for sample in checked]
    versions = [np.asarray(sample.versions) for sample in checked]
    ordered_slots = [layout.padded[sample] for sample in layout.order]
    bin_slots = [sum(layout.padded[sample] for sample in members) for members in layout.bins]
    return Batch(
        token_ids=laid(tokens, pad_token_id),
        position_ids=np.concatenate([np.arange(slots) for slots in ordered_slots]),
        sample_ids=laid([np.full(len(sample), number) for number, sample in enumerate(checked)], -1),
        loss_mask=laid(masks, False),
        logprobs=laid(logprobs, 0.0),
        advantages=laid(advantages, 0.0),
        versions=laid(versions, 0),
        labels=laid([array[1:] for array in tokens], NO_LABEL),
        label_mask=laid([array[1:] for array in masks], False),
        label_logprobs=laid([array[1:] for array in logprobs], 0.0),
        label_advantages=laid([array[1:] for array in advantages], 0.0),
        label_versions=laid([array[1:] for array in versions], 0),
        routes=None if routes is None else layout.lay_out_rows(routes),
        cu_seqlens=np.cumsum([0, *ordered_slots], dtype=np.int32),
        bin_ends=np.cumsum(bin_slots),
        slots=np.arange(sum(bin_slots)),
    )


def first_fit_decreasing(lengths: Sequence[int], max_tokens: int, multiple: int = 1) -> Layout:
    """Put the longest samples first, each into the first bin with room; ties keep the given order."""
    max_tokens = exact_int(max_tokens, "max_tokens", BatchError, least=1)
    multiple = exact_int(multiple, "pad_to_multiple_of", BatchError, least=1)
    if not lengths:
        raise BatchError("samples is empty: pack needs at least one sample")
    padded = [-(-length // multiple) * multiple for length in lengths]
    bins: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)  # free slots of the bins opened so far; 0 for the others
    for sample in sorted(range(len(lengths)), key=lambda number: -padded[number]):
        if padded[sample] > max_tokens:
            raise BatchError(
                f"sample {sample} needs {padded[sample]} slots ({lengths[sample]} tokens, padded to a multiple of "
                f"{multiple}), max_tokens is {max_tokens}: raise max_tokens or drop the sample"
            )
        fits = room[: len(bins)] >= padded[sample]
        chosen = int(fits.argmax()) if fits.any() else len(bins)
        if chosen == len(bins):
            bins.append([])
            room[chosen] = max_tokens
        bins[chosen].append(sample)
        room[chosen] -= padded[sample]
    return Layout(tuple(map(tuple, bins)), tuple(lengths), tuple(padded))


def _all_routes(samples: Sequence[Sample]) -> list[RouteSource] | None:
    routes = [sample.routes for sample in samples if sample.routes is not None]
    if not routes:
        return None
    for number, sample in enumerate(samples):
        if sample.routes is None:
            raise BatchError(
                f"sample {number} has no routes, but other samples have: give it Routes.missing(tokens, spec) to route "
                "it live"
            )
        if sample.routes.spec != routes[0].spec:
            raise BatchError(
                f"sample {number} is of another model: expected {routes[0].spec}, got {sample.routes.spec}"
            )
    return routes


def _refuse_missing(samples: Sequence[Sample]) -> None:
    for number, sample in enumerate(samples):
        row = sample.first_missing_loss_row()
        if row is not None:
            raise BatchError(
                f"sample {number}: row {row} predicts token {row + 1}, which bears loss, and was not captured: "
                'find out why the engine left it out, or pass on_missing="live" to route it live'
            )
