"""TRL's GRPOTrainer with replay.

The way of the rows: the engine returns them with its answers (`generation.py`), `_generate` puts them into the order of
the batch, and they ride in TRL's batch dict as two tensors, which TRL shuffles and splits with all others (`rows.py`).
Every pass of the policy goes through `_get_per_token_logps_and_entropies`, which calls the model for each chunk of a
batch; there the rows of the chunk are in force (`chunks.py`).
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from trl import GRPOConfig, GRPOTrainer

from router_replay import RouterReplay
from router_replay.engines.base import Engine
from router_replay.errors import ConfigError, ReplayError
from router_replay.integrations.routing import RoutingSums
from router_replay.integrations.trl import metrics, settings
from router_replay.integrations.trl.chunks import Chunks, RecordedChunks, ReplayedChunks
from router_replay.integrations.trl.generation import EngineGeneration
from router_replay.integrations.trl.rows import BatchRows, Laid, predicts
from router_replay.replay.stats import Stats
from router_replay.run_files import PER_LAYER

logger = logging.getLogger(__name__)


class RouterReplayGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with `replay` "off", "r2" (experts of the old-policy pass) or "r3" (experts of the rollout).

    `engine` is an engine of `router_replay.engines` that samples the completions, or a function that makes it, which is
    called in the first process only. Without one, TRL generates itself, and R3 needs a `rollout_func` that returns
    `routes`, one Routes per sequence. `on_missing` says what happens to a token whose experts are not known: "raise"
    raises ReplayError, "live" lets the router choose. `seeded` draws a seed for each request from `args.seed`; an
    SGLang server without deterministic inference needs False. `weights` is a folder that trainer and engine can both
    read, for an engine on another machine. `routing_metrics` measures the load of the experts, and the confidence and
    the entropy of the routers. All other arguments are those of GRPOTrainer.
    """

    def __init__(
        self,
        *arguments: Any,
        replay: Literal["off", "r2", "r3"] = "r3",
        engine: Engine | Callable[[], Engine] | None = None,
        on_missing: Literal["raise", "live"] = "raise",
        seeded: bool = True,
        weights: str = "",
        routing_metrics: bool = True,
        **named: Any,
    ) -> None:
        given = inspect.signature(GRPOTrainer.__init__).bind(self, *arguments, **named).arguments
        args = given.get("args") or GRPOConfig()
        tools = bool(given.get("tools") or given.get("environment_factory"))
        settings.refuse(
            args, replay, engine=engine, rollout_func=given.get("rollout_func"), tools=tools, processes=args.world_size
        )
        if on_missing not in ("raise", "live"):
            raise ConfigError(f'on_missing must be "raise" or "live", got {on_missing!r}')
        super().__init__(*arguments, **named)
        if self._is_vlm:
            raise ConfigError("this is a vision model: replay in TRL was tried with text models only")
        self.replay = replay
        self._on_missing = on_missing
        self._replayer = RouterReplay(self.accelerator.unwrap_model(self.model))
        self._has_old_pass = settings.has_old_pass(self.args, engine is not None)
        self._adapters = _active_adapters(self.model)
        self._sequences: list[Laid] = []  # of the newest batch, in its order
        self._rows: BatchRows | None = None  # of the batch whose passes run now
        self._logprobs: torch.Tensor | None = None  # of the policy's last pass
        self._measures_routing = routing_metrics
        self._routing = {mode: RoutingSums(self._replayer.spec) for mode in ("train", "eval")}
        self._scores = False  # whether the passes are those of a new batch, before its first update
        if engine is not None:
            self._use(engine, seeded, weights)

    def _use(self, engine: Engine | Callable[[], Engine], seeded: bool, weights: str) -> None:
        """Let TRL generate with `engine`, where its vLLM would be."""
        made = None
        if self.accelerator.is_main_process:
            made = engine if isinstance(engine, Engine) else engine()
            settings.refuse_engine(made, self._replayer.spec, self.replay)
        self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "server", -1
        self.vllm_generation = EngineGeneration(
            made,
            self._replayer.spec,
            {
                "max_tokens": self.max_completion_length,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "stop_token_ids": tuple(self._ends()),
            },
            seed=self.args.seed if seeded else None,
            weights=weights,
            model=self.model,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
        )

    def _ends(self) -> list[int]:
        """Return the tokens at which TRL ends a completion. TRL 1.9 knows only that of the tokenizer."""
        return list(getattr(self, "eos_token_ids", None) or [self._tokenizer.eos_token_id])

    @property
    def replayer(self) -> RouterReplay:
        """The RouterReplay of the policy; its `stats` count all passes of this process."""
        return self._replayer

    @property
    def engine(self) -> Engine | None:
        """The engine that samples, for a `rollout_func`; None without one, and in all processes but the first."""
        return getattr(getattr(self, "vllm_generation", None), "engine", None)

    def close(self) -> None:
        """Close the engine and remove the files of its weights; the model routes live again."""
        if isinstance(getattr(self, "vllm_generation", None), EngineGeneration):
            self.vllm_generation.close()
        self._replayer.detach()

    # -- the rollout ----------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        own = isinstance(getattr(self, "vllm_generation", None), EngineGeneration)
        if own:
            self.vllm_generation.sequences.clear()
            self.vllm_generation.step = self.state.global_step
        out = super()._generate(prompts)
        prompt_ids, completion_ids, extra_fields = out[0], out[1], out[5]
        routes = extra_fields.pop("routes", None)  # of a rollout_func; TRL would hand them to the reward functions
        if self.replay == "r3":
            pairs = list(zip(prompt_ids, completion_ids, strict=True))
            if routes is None and self.rollout_func is not None:
                raise ReplayError(
                    'the rollout_func returned no "routes": replay="r3" needs one Routes per sequence, over the tokens '
                    "of prompt_ids and completion_ids"
                )
            if routes is None:
                routes = [self.vllm_generation.sequences.take([*prompt, *answer]) for prompt, answer in pairs]
            self._sequences = [Laid(len(p), len(c), rows) for (p, c), rows in zip(pairs, routes, strict=True)]
        return out

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._rows, before = None, self._replayer.stats
        self._scores = True
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._scores = False
        if self.replay == "r3" and self._rows is None:  # there was no old-policy pass
            self._lay_out(_attention(output), output["completion_ids"].size(1))
        if self._rows is not None:
            output |= self._rows.as_batch()
        self._rows = None
        if "old_per_token_logps" in output:
            self._log_pass(before, output, output["old_per_token_logps"], "old_")
        return output

    def _lay_out(self, attention_mask: torch.Tensor, completion: int) -> None:
        """Lay the rows of the newest batch out like its tokens, of which the last `completion` slots are sampled."""
        width = attention_mask.size(1) - completion
        self._rows = BatchRows.laid_out(self._sequences, width, completion, self._replayer.spec)
        self._sequences = []
        if self._on_missing == "raise":
            self._rows.refuse_missing(attention_mask)

    # -- the passes -----------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *more: Any, **named: Any
    ) -> Any:
        if model is self.ref_model or _active_adapters(self.model) != self._adapters:  # the reference stays live
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *more, **named
            )
        if self._sequences:  # the first pass over a new batch
            self._lay_out(attention_mask, logits_to_keep)
        # Measured once per batch: in the old-policy pass, or in the loss if there is none.
        first = self._scores == self._has_old_pass
        gauge = self._routing[self._mode].gauge if first and self._measures_routing else None
        chunks = Chunks(self._replayer, model, gauge)
        if self._rows is not None:
            chunks = ReplayedChunks(self._replayer, model, gauge, self._rows, agreement=first and self.replay == "r3")
        elif self.replay == "r2":
            chunks = RecordedChunks(self._replayer, model, gauge)
        out = super()._get_per_token_logps_and_entropies(
            chunks, input_ids, attention_mask, logits_to_keep, *more, **named
        )
        self._rows = chunks.rows(len(input_ids))
        self._logprobs = out[0].detach()
        return out

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._rows, before = BatchRows.of_batch(inputs), self._replayer.stats
        if self._rows is None and self.replay != "off":
            raise ReplayError(f'replay="{self.replay}", but this batch has no rows: it did not come from this trainer')
        loss = super()._compute_loss(model, inputs)
        self._rows = None
        self._log_pass(before, inputs, None if "old_per_token_logps" in inputs else self._logprobs, "")
        return loss

    def _log_pass(self, before: Any, batch: Mapping[str, Any], trained: torch.Tensor | None, prefix: str) -> None:
        """Append the counts of the pass since `before` to TRL's metrics, and the gap of its log-probs if `trained`."""
        passed, routing = self._replayer.stats.since(before), self._routing[self._mode]
        if not passed.passes:
            passed = Stats.live(passed.layers, int(predicts(_attention(batch)).sum()))
        passed = routing.add(metrics.summed(self.accelerator, routing.sums(passed)))
        replayed, live = float(passed.rows_replayed[0]), float(passed.rows_live[0])
        found = {f"routes/{prefix}replayed": replayed, f"routes/{prefix}live": live}
        sampled = batch.get("sampling_per_token_logps")
        if trained is not None and sampled is not None:
            found |= metrics.mismatch(self.accelerator, trained, batch, sampled)
        for name, value in found.items():
            self._metrics[self._mode][name].append(value)

    # -- the log --------------------------------------------------------------------------------

    @property
    def _mode(self) -> str:
        """Under which of TRL's two names the passes are logged that run now."""
        return "train" if self.model.training else "eval"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what TRL logs, `logs` and its metrics since `start_time`, with the routing metrics since the last call.

        Lists with a value per layer are not for the tools that TRL logs to: they stand in `state.log_history` only.
        """
        mode = self._mode
        values, warnings = self._routing[mode].take(self.state.global_step)
        lists = {name: value for name, value in values.items() if name.endswith(PER_LAYER)}
        self._metrics[mode].update({name: [value] for name, value in values.items() if name not in lists})
        super().log(logs, start_time)
        if lists:
            before = "" if mode == "train" else "eval_"
            self.state.log_history[-1].update({before + name: value for name, value in lists.items()})
        if self.accelerator.is_main_process:
            for warning in warnings:
                logger.warning(warning)


def _attention(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the attention mask that TRL gives the model for this batch."""
    return torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def _active_adapters(model: Any) -> tuple[str, ...]:
    """Return the PEFT adapters in force; none for a model without them, or inside `disable_adapter`."""
    if "peft" not in sys.modules:
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
    return () if layer is None or layer.disable_adapters else tuple(layer.active_adapters)
