"""NativeRules answers the calls of Megatron's RouterReplay while install() is in force.

Shapes: T tokens of this rank, K top-k.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from router_replay.errors import ReplayError
from router_replay.replay.checkpoint_calls import surrounding_checkpoints
from router_replay.replay.megatron.native_rows import MISSING, NativeSite, missing_rows, narrow, refuse_form
from router_replay.replay.megatron.routers import refuse_settings
from router_replay.replay.megatron.site import Choice
from router_replay.replay.state import in_backward

_LIVE = object()  # what a checkpoint's forward used, if it routed live


class NativeRules:
    """Keeps the rows of every object of Megatron's RouterReplay, and chooses the experts of their routers.

    `replayed` is Megatron's class; a `native` is one object of it.
    """

    def __init__(self, replayed: Any) -> None:
        self._class = replayed
        self._sites: weakref.WeakKeyDictionary[Any, NativeSite] = weakref.WeakKeyDictionary()

    @property
    def sites(self) -> list[NativeSite]:
        """What is known of the objects in Megatron's list, in its order."""
        return [self._site(native) for native in self._class.global_router_replay_instances]

    @property
    def waiting(self) -> bool:
        """Whether the forward of a checkpoint was replayed and not yet recomputed."""
        return any(site.waiting for site in self._sites.values())

    def bind(self, router: Any) -> None:
        """Note which RouterReplay belongs to `router`."""
        if router.router_replay is not None:
            self._site(router.router_replay).bind(router)

    def set_all(self, all_rows: Sequence[Tensor]) -> None:
        """Give each router of Megatron's list its rows of the next forward pass: all of `all_rows`, or none."""
        natives = list(self._class.global_router_replay_instances)
        if len(all_rows) != len(natives):
            raise ReplayError(
                f"expected the rows of {len(natives)} routers (RouterReplay.global_router_replay_instances), got "
                f"{len(all_rows)}: give one tensor per router, in the order in which they were built"
            )
        self.set_rows(natives, all_rows)

    def set_rows(self, natives: Sequence[Any], all_rows: Sequence[Tensor]) -> None:
        """Check `all_rows`, and keep them as the rows of the next forward pass of `natives`.

        The rows of all routers are checked together, so that this waits for the device once.
        """
        sites = [self._site(native) for native in natives]
        names = [self._name(native) for native in natives]
        for site, name, rows in zip(sites, names, all_rows, strict=True):
            self._refuse_bypass(site)
            refuse_form(rows, site, name)
        lengths = {len(rows) for rows in all_rows}
        if len(lengths) > 1:
            raise ReplayError(f"the rows of all routers must be of one micro-batch, got {sorted(lengths)} rows")
        missing = missing_rows(sites, names, all_rows)
        for native, site, rows, count in zip(natives, sites, all_rows, missing, strict=True):
            site.ids_TK, site.missing = rows, count if site.experts else None
            native.target_topk_idx = rows

    def set_action(self, native: Any, action: Any) -> None:
        """Set the action of a router. A replay with settings that bypass it is refused."""
        if action is not None and action.name != "RECORD":
            self._refuse_bypass(self._site(native))
        native.router_replay_action = action

    def clear(self, native: Any) -> None:
        """Drop the rows of a router. Checkpoints that await their backward keep their own."""
        self._site(native).ids_TK = None

    def choose(
        self,
        native: Any,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and ids of the chosen experts, as get_replay_topk does.

        The action decides in a forward pass only. In a recompute the checkpoint decides: it uses the experts of its
        own forward, whatever the action is by then.
        """
        site = self._site(native)
        entered, recomputed = surrounding_checkpoints()
        backward = recomputed is not None or in_backward()
        if backward:
            used, live_T1 = self._of_the_forward(native, site, recomputed), None
        else:
            used, live_T1 = self._rows_of_this_pass(native, site, scores, topk)
        choice = Choice(None if used is _LIVE else used.to(scores.device).long(), live_T1, False)
        out = choice.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        if not backward and used is _LIVE and _named(native, "RECORD"):
            native.record_indices(out[1])
        if entered and used is not _LIVE:  # a copy: the caller may fill its tensor with the rows of another micro-batch
            used = narrow(out[1], scores.shape[1])
        for checkpoint in entered:
            site.used[checkpoint] = used
            if used is not _LIVE:
                site.waiting.add(checkpoint)
        return out

    # -- private ----------------------------------------------------------------------------------

    def _rows_of_this_pass(self, native: Any, site: NativeSite, scores: Tensor, topk: int) -> tuple[Any, Tensor | None]:
        """Return the ids for a forward pass and the mask of missing rows, or _LIVE and None."""
        if native.router_replay_action is None or _named(native, "RECORD"):
            return _LIVE, None
        name, ids_TK = self._name(native), site.ids_TK
        if ids_TK is None:
            raise ReplayError(
                f"{name}: a forward pass runs with {native.router_replay_action.name}, and there are no rows for it: "
                "give each micro-batch its rows (set_replay_data or set_target_indices) before its forward pass, and "
                "clear the action of routers that route live"
            )
        tokens, experts = scores.shape
        if site.missing is None:  # this router was not found: its numbers are known only now
            site.top_k, site.experts = topk, experts
            refuse_form(ids_TK, site, name)
            (site.missing,) = missing_rows([site], [name], [ids_TK])
        if len(ids_TK) != tokens:
            raise ReplayError(
                f"{name}: the router got {tokens} tokens, and the rows are those of {len(ids_TK)}: give the rows of "
                "this micro-batch and this rank, in the order of its hidden states [s, b], padding included"
            )
        site.ids_TK = None
        site.passes += 1
        site.rows_replayed += tokens - site.missing
        site.rows_live += site.missing
        ids_TK = ids_TK.to(scores.device)
        if not site.missing:
            return ids_TK, None
        live_T1 = ids_TK[:, :1] == MISSING
        return torch.where(live_T1, 0, ids_TK), live_T1

    def _of_the_forward(self, native: Any, site: NativeSite, checkpoint: Any) -> Any:
        if checkpoint is not None and checkpoint in site.used:
            site.waiting.discard(checkpoint)
            return site.used[checkpoint]
        if native.router_replay_action is None and not site.passes:
            return _LIVE  # its forward ran before install
        raise ReplayError(
            f"{self._name(native)}: a layer is recomputed in backward, and it is not known which rows its forward "
            "used: use Megatron's checkpoints (recompute_granularity) or torch.utils.checkpoint, and call install() "
            "before the forward pass"
        )

    def _refuse_bypass(self, site: NativeSite) -> None:
        if site.router is not None:
            refuse_settings(site.router.config)

    def _site(self, native: Any) -> NativeSite:
        site = self._sites.get(native)
        if site is None:
            site = self._sites[native] = NativeSite()
        return site

    def _name(self, native: Any) -> str:
        site, natives = self._site(native), self._class.global_router_replay_instances
        if site.layer is not None:
            return f"layer {site.layer}"
        return f"router {natives.index(native)}" if native in natives else "a router outside of Megatron's list"


class Answer:
    """Takes the place of a router's RouterReplay, `native`, for the time of one call, and asks the `rules`."""

    def __init__(self, rules: NativeRules, native: Any) -> None:
        self.rules = rules
        self.native = native

    def get_replay_topk(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the scores and ids of the chosen experts; the arguments are those of Megatron's method."""
        return self.rules.choose(self.native, *args, **kwargs)


def _named(native: Any, action: str) -> bool:
    return native.router_replay_action is not None and native.router_replay_action.name == action
