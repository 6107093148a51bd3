"""logprobs: what the model thinks of every label of a packed batch, without the logits of all of it.

The model runs through its own `forward` (so FSDP2, tensor parallel and checkpointing hooks all fire);
only its output matrix is asked for something else: instead of [T, V] logits it gives the log-probs of
the labels, computed piece by piece over the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from router_replay.batch import NO_LABEL, Batch
from router_replay.batch.tensors import TensorBatch
from router_replay.errors import ReplayError
from router_replay.replay.packing import packed_arguments
from router_replay.replay.vocabulary import LogitRule, TokenLogprobs

# Sent through the model's own code behind the output matrix, to see that it does what we think it does.
_PROBES = (-3.0, 0.0, 0.5, 20.0)


def logprobs(
    model: Any,
    batch: Batch | TensorBatch,
    *,
    temperature: float = 1.0,
    vocabulary_piece: int = 8192,
    **forward_arguments: Any,
) -> torch.Tensor:
    """The log-prob of `batch.labels[i]` at slot i, float32 [slots], 0 where a slot has no label.

    Differentiable. Sequences of a packed batch do not see each other; a family that cannot keep them
    apart refuses a batch of more than one. `forward_arguments` go to the model's forward.
    """
    device = next(model.parameters()).device
    tensors = batch.to_torch(device) if isinstance(batch, Batch) else batch
    labelled_T = tensors.labels != NO_LABEL
    labels_T = torch.where(labelled_T, tensors.labels, 0)
    rule = logit_rule(model.config)
    inputs = packed_arguments(model, tensors.token_ids[None], tensors.position_ids[None])
    with _head_gives_logprobs(model, labels_T, rule, temperature, vocabulary_piece) as found:
        output = model(**inputs, use_cache=False, **forward_arguments)
    if not found:
        raise ReplayError(
            f"{type(model).__name__} did not call its output matrix (get_output_embeddings()): "
            "log-probs need a causal language model"
        )
    _check_rule(output.logits, rule, type(model).__name__)
    return torch.where(labelled_T, found[0], 0.0)


def logit_rule(config: Any) -> LogitRule:
    """How this model treats its logits, by the three fields that transformers' families use."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    if getattr(text, "logits_scaling", None):
        scale = 1.0 / text.logits_scaling
    elif getattr(text, "logit_scale", None):
        scale = text.logit_scale
    return LogitRule(scale, getattr(text, "final_logit_softcapping", None))


@contextlib.contextmanager
def _head_gives_logprobs(
    model: Any, labels_T: torch.Tensor, rule: LogitRule, temperature: float, piece: int
) -> Iterator[list[torch.Tensor]]:
    head = model.get_output_embeddings()
    if head is None:
        raise ReplayError(f"{type(model).__name__} has no output matrix: log-probs need a causal language model")
    outer = vars(head).get("forward")  # tensor parallelism sets one; with the whole matrix at hand it is not needed
    found: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        if len(hidden_TH) != len(labels_T):
            raise ReplayError(f"the output matrix got {len(hidden_TH)} tokens, the batch has {len(labels_T)} slots")
        weight, bias = _whole(head.weight), _whole(getattr(head, "bias", None))
        found.append(TokenLogprobs.apply(hidden_TH, weight, bias, labels_T, rule, temperature, piece))
        return hidden.new_tensor(_PROBES).expand(*hidden.shape[:-1], len(_PROBES))

    head.forward = forward
    try:
        yield found
    finally:
        del head.forward
        if outer is not None:
            head.forward = outer


def _whole(weight: torch.Tensor | None) -> torch.Tensor | None:
    """A sharded output matrix (tensor parallel) is gathered, its gradient scattered."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # type: ignore[union-attr]


def _check_rule(logits: torch.Tensor, rule: LogitRule, name: str) -> None:
    got = logits.reshape(-1, logits.shape[-1])[0, : len(_PROBES)].float()
    expected = rule.apply(got.new_tensor(_PROBES))
    if not torch.allclose(got, expected, rtol=2e-2, atol=1e-3):
        raise ReplayError(
            f"{name} changes its logits in a way that logprobs() does not know: it turned {_PROBES} "
            f"into {got.tolist()}, expected {expected.tolist()} from {rule}; "
            "compute log-probs from its own logits instead"
        )
