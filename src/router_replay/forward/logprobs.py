"""logprobs computes the log-prob of every label of a packed batch without storing all logits.

The model runs through its own `forward` (so FSDP2, tensor parallel and checkpointing hooks all fire).
Only its output matrix is replaced: instead of [T, V] logits it computes the log-probs of the labels,
piece by piece over the vocabulary.
"""

from __future__ import annotations

import math
import numbers
import weakref
from typing import Any

import numpy as np
import torch

from router_replay.batch import NO_LABEL, Batch, LocalBatch
from router_replay.batch.tensors import LocalTensors, TensorBatch
from router_replay.errors import ReplayError
from router_replay.families.from_modules import device_of
from router_replay.forward.inner import inner_model
from router_replay.forward.output_head import PROBES, Task, head_gives_logprobs
from router_replay.forward.packing import packed_arguments, reaching_the_decoder
from router_replay.forward.vocabulary import LogitRule

# The rules that each model was seen to follow, in training or in evaluation. To look again would wait for the device.
_SEEN: weakref.WeakKeyDictionary[Any, set[tuple[LogitRule, bool]]] = weakref.WeakKeyDictionary()


def logprobs(
    model: Any,
    batch: Batch | LocalBatch | TensorBatch | LocalTensors,
    *,
    temperature: float = 1.0,
    vocabulary_piece: int = 8192,
    **forward_arguments: Any,
) -> torch.Tensor:
    """Return the log-prob of `batch.labels[i]` at slot i, float32 [slots], and 0 where a slot has no label.

    The result is differentiable. `model` is a causal language model of transformers and may be wrapped (torch.compile,
    DDP, FSDP, PEFT). `batch` is one bin, or one rank's part of it. `temperature` divides the
    logits. `vocabulary_piece` is the number of vocabulary entries whose logits exist at one time. `forward_arguments`
    are passed to the model's forward.

    Sequences of a packed batch do not attend to each other; ReplayError is raised for a batch of several sequences
    if the family cannot keep them apart. It is also raised if the model changes its logits in an unknown way, has no
    usable output matrix, or a label is outside the vocabulary. Calls from several threads on one model run one at a
    time.
    """
    _refuse_numbers(temperature, vocabulary_piece)
    inner = inner_model(model)
    name = type(inner).__name__
    tensors = batch.to_torch(device_of(model) or "cpu") if isinstance(batch, Batch | LocalBatch) else batch
    rule = logit_rule(inner.config)
    inputs = packed_arguments(model, tensors.token_ids[None], tensors.position_ids[None], tensors.boundaries)
    task = Task(tensors.labels, rule, float(temperature), int(vocabulary_piece))
    with head_gives_logprobs(inner, task), reaching_the_decoder(model, inputs, tensors.boundaries):
        output = model(**inputs, use_cache=False, **forward_arguments)
    if not task.found:
        raise ReplayError(
            f"{name} did not call its output matrix (get_output_embeddings()): expected a causal language model"
        )
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ReplayError(
            f"the forward of {type(model).__name__} must return an object with logits, got a {type(output).__name__}: "
            f"pass the {name} in it to logprobs()"
        )
    _check_rule(model, logits, rule, name)
    _refuse_labels(batch.labels, task.vocabulary)
    found_T = task.found[0]
    labelled_T = (tensors.labels != NO_LABEL).to(found_T.device)
    # These zeros come from the model's output: DDP and FSDP start their part of backward at the forward's output.
    zero_T = logits.reshape(len(found_T), -1)[:, PROBES.index(0.0)].float()
    return torch.where(labelled_T, found_T, zero_T)


def logit_rule(config: Any) -> LogitRule:
    """Return how the model transforms its logits, from the three config fields that transformers uses for it."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    if getattr(text, "logits_scaling", None):
        scale = 1.0 / text.logits_scaling
    elif getattr(text, "logit_scale", None):
        scale = text.logit_scale
    return LogitRule(scale, getattr(text, "final_logit_softcapping", None))


def _refuse_numbers(temperature: Any, vocabulary_piece: Any) -> None:
    if not _is_number(temperature, numbers.Real) or not math.isfinite(temperature) or temperature <= 0:
        raise ReplayError(
            f"temperature must be a finite number above 0, got {temperature!r}: logits are divided by it; for tokens "
            "that were sampled greedily pass 1"
        )
    if not _is_number(vocabulary_piece, numbers.Integral) or vocabulary_piece < 1:
        raise ReplayError(
            f"vocabulary_piece must be an integer of 1 or more, got {vocabulary_piece!r}: it is the number of "
            "vocabulary entries whose logits exist at one time"
        )


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _refuse_labels(labels_T: np.ndarray | torch.Tensor, vocabulary: int) -> None:
    """Raise ReplayError for a label outside the vocabulary: its result would look like a log-prob.

    Labels on the host are checked there. Labels that are given on a device are read from it.
    """
    labels = labels_T.cpu().numpy() if isinstance(labels_T, torch.Tensor) else labels_T
    wrong = ((labels < 0) & (labels != NO_LABEL)) | (labels >= vocabulary)
    if wrong.any():
        slot = int(wrong.argmax())
        raise ReplayError(
            f"the label of slot {slot} must be in [0, {vocabulary}), the tokens of the output matrix, or {NO_LABEL} "
            f"for no label, got {int(labels[slot])}"
        )


def _check_rule(model: Any, logits: torch.Tensor, rule: LogitRule, name: str) -> None:
    """Raise ReplayError at the first pass of a model that transforms its logits in another way."""
    seen = _SEEN.setdefault(model, set())
    if (rule, model.training) in seen:
        return
    got = logits.reshape(-1, logits.shape[-1])[0, : len(PROBES)].float()
    expected = rule.apply(got.new_tensor(PROBES))
    if not torch.allclose(got, expected, rtol=2e-2, atol=1e-3):
        raise ReplayError(
            f"{name} transforms its logits in a way that logprobs() does not know: for {PROBES} "
            f"expected {expected.tolist()} by {rule}, got {got.tolist()}; "
            "compute log-probs from its own logits instead"
        )
    seen.add((rule, model.training))
