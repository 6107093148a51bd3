"""Replace a model's output matrix inside a `with` block, so that it computes log-probs of the labels and no logits.

The model and its wrappers run their own code; only the innermost matrix product is replaced. In place of logits
the model gets four known numbers per token (the probes), which show how it transforms its logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from router_replay.batch import NO_LABEL
from router_replay.errors import ReplayError
from router_replay.forward.vocabulary import LogitRule, TokenLogprobs

PROBES = (-3.0, 0.0, 0.5, 20.0)

_BUSY: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # head -> the thread that uses it
_CHANGED = threading.Condition()
_PROBES: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


@dataclasses.dataclass(eq=False)
class Task:
    """Holds the inputs for the output matrix in one forward pass, and its results `found` and `vocabulary`."""

    labels_T: torch.Tensor
    rule: LogitRule
    temperature: float
    piece: int
    found: list[torch.Tensor] = dataclasses.field(default_factory=list)
    vocabulary: int = 0


@contextlib.contextmanager
def head_gives_logprobs(model: Any, task: Task) -> Iterator[None]:
    """Make a forward pass of `model` in this block and thread append the log-probs of the labels to `task.found`.

    Raises ReplayError if the model has no output matrix or it is not an nn.Linear.
    """
    head = _head_of(model)
    # A wrapper around the matrix (PEFT, FSDP) may hold several. The one in use is known only when it is called.
    matrices = [part for part in head.modules() if isinstance(part, nn.Linear) and _is_plain(part)]
    if not matrices:
        raise ReplayError(
            f"the output matrix of {type(model).__name__} must be a plain nn.Linear, got a {type(head).__name__}: "
            "compute log-probs from its own logits instead"
        )
    with _alone(head, type(model).__name__), contextlib.ExitStack() as stack:
        for matrix in matrices:
            stack.enter_context(_replaced(matrix, task, type(head).__name__))
        yield


def _head_of(model: Any) -> nn.Module:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ReplayError(f"{type(model).__name__} has no output matrix: expected a causal language model")
    return head


def _is_plain(matrix: nn.Linear) -> bool:
    """Return False for a quantized matrix: a subclass with its own forward, whose weight is not the matrix."""
    return type(matrix).forward is nn.Linear.forward


@contextlib.contextmanager
def _alone(head: nn.Module, name: str) -> Iterator[None]:
    """Lock the head for one call; calls from other threads wait."""
    thread = threading.get_ident()
    with _CHANGED:
        if _BUSY.get(head) == thread:
            raise ReplayError(
                f"logprobs() was called on {name} inside another logprobs() on it: call them one after the other"
            )
        _CHANGED.wait_for(lambda: head not in _BUSY)
        _BUSY[head] = thread
    try:
        yield
    finally:
        with _CHANGED:
            del _BUSY[head]
            _CHANGED.notify_all()


@contextlib.contextmanager
def _replaced(matrix: nn.Linear, task: Task, head: str) -> Iterator[None]:
    # accelerate's hooks (offloading) set a forward that loads the weight and then calls this attribute.
    attribute = "_old_forward" if hasattr(matrix, "_hf_hook") else "forward"
    before = vars(matrix).get(attribute)  # set by tensor parallelism; not needed with the whole matrix
    try:
        setattr(matrix, attribute, _forward_of(matrix, task, head, before))
        yield
    finally:
        vars(matrix).pop(attribute, None)
        if before is not None:
            setattr(matrix, attribute, before)


def _forward_of(matrix: nn.Linear, task: Task, head: str, before: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    thread = threading.get_ident()
    plain = functools.partial(nn.Linear.forward, matrix) if before is None else before

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and threading.get_ident() != thread:
            return plain(hidden)  # another thread uses the model in the ordinary way
        if task.found:
            raise ReplayError(
                f"the output matrix ({head}) must be one matrix that is called once, got a second call, as with a "
                "LoRA adapter on it: "
                "merge the adapter, leave the output matrix out of its targets, or use the model's own logits"
            )
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        if len(hidden_TH) != len(task.labels_T):
            raise ReplayError(
                f"the output matrix must get one hidden state per slot of the batch: expected {len(task.labels_T)}, "
                f"got {len(hidden_TH)}"
            )
        weight, bias = _whole(matrix.weight), _whole(matrix.bias)
        labels_T = task.labels_T.to(hidden.device)
        labels_T = torch.where(labels_T == NO_LABEL, 0, labels_T)
        found_T = TokenLogprobs.apply(hidden_TH, weight, bias, labels_T, task.rule, task.temperature, task.piece)
        task.found.append(found_T)
        task.vocabulary = len(weight)
        # The graph links the probes to the log-probs: DDP and FSDP search it for the parameters in use.
        tie = found_T.to(hidden.dtype).reshape(*hidden.shape[:-1], 1)
        return torch.where(torch.zeros_like(tie, dtype=torch.bool), tie, _probes(hidden))

    return forward


def _probes(like: torch.Tensor) -> torch.Tensor:
    """Return PROBES on the device and in the dtype of `like`. They are kept: a copy from the host waits for the GPU."""
    if torch.compiler.is_compiling():
        return like.new_tensor(PROBES)
    key = like.device, like.dtype
    if key not in _PROBES:
        with torch.inference_mode(False):
            _PROBES[key] = torch.tensor(PROBES, device=like.device, dtype=like.dtype)
    return _PROBES[key]


def _whole(weight: torch.Tensor | None) -> Any:
    """Gather a sharded output matrix (tensor parallel); backward scatters its gradient."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # type: ignore[union-attr]
