"""Causal attention within each sequence of a packed bin. No mask over the whole bin is built: cost follows the tokens.

Three kernels compute the same:

- "varlen": `torch.nn.attention.varlen` on CUDA, in bfloat16 and float16.
- "flash": the package flash-attn, on CUDA, in bfloat16 and float16.
- "segments": torch's own attention on groups of sequences of near lengths, on every device and in every dtype. It also
  takes attention sinks and soft caps.

Shapes: H query heads, G key heads (H is a multiple of G), T slots of the bin, D head size, N sequences of a group, L
slots of each of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from router_replay.errors import ReplayError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

_VARLEN_TAKES = frozenset(inspect.signature(varlen_attn).parameters if varlen_attn else ())
# Lets it take fewer key heads than query heads. Versions without this argument take them as they are.
_FEWER_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_TAKES else {}

KERNELS = ("varlen", "flash", "segments")
HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # of the flash kernels
# What one more group costs, counted in slots of short sequences, and the length at which attention costs a slot as much
# again as the rest. Measured on CPUs (bench/attention.py).
GROUP_COST, LENGTH_COST = 200.0, 100


class Sequences:
    """The borders of the sequences of one bin. One object serves every layer of a pass, and its recompute.

    It is made on the host, so that no layer waits for the device. It is not a dataclass: FSDP2 copies dataclasses among
    a forward's arguments, and the copy would be counted up.
    """

    def __init__(self, boundaries: Sequence[int], device: torch.device | str) -> None:
        """Take `boundaries`, the sequence borders in slots from 0 to the end of the bin, and the model's `device`."""
        self.boundaries = tuple(boundaries)
        self.lengths = [end - start for start, end in itertools.pairwise(self.boundaries)]
        self.attention_calls = 0
        # Both are rounded up, so that compiled code meets few values: sequences of no slot cost next to nothing.
        self.longest = _power_of_two(max(self.lengths, default=0), least=128)
        padded = [*self.boundaries] + [self.boundaries[-1]] * (_power_of_two(len(self.lengths)) - len(self.lengths))
        self.cumulative = torch.tensor(padded, dtype=torch.int32).to(device, non_blocking=True)

    def __len__(self) -> int:
        return self.boundaries[-1]

    @functools.cached_property
    def groups(self) -> list[_Group]:
        """The groups of near lengths that the kernel "segments" computes together."""
        return _groups(self.boundaries, self.cumulative.device)


def checked_kernel(wanted: str) -> str:
    """Return `wanted`; raise ReplayError if it is neither "auto" nor a kernel."""
    if wanted not in ("auto", *KERNELS):
        raise ReplayError(f"the attention kernel must be one of auto, {', '.join(KERNELS)}, got {wanted!r}")
    return wanted


@torch._dynamo.assume_constant_result  # compiled code asks once, when it is compiled
def kernel_for(device: torch.device, dtype: torch.dtype, *, special: bool = False, wanted: str = "auto") -> str:
    """Return the kernel that computes attention on `device` in `dtype`: "varlen", "flash" or "segments".

    `special` means that the attention has sinks or a soft cap. `wanted` is a kernel, or "auto". Raises ReplayError with
    the reason if the kernel that is wanted cannot do it.
    """
    reasons = {"segments": ""}
    if device.type != "cuda":
        reasons["varlen"] = reasons["flash"] = f"it runs on CUDA only, and the model is on {device.type}"
    elif dtype not in HALF:
        reasons["varlen"] = reasons["flash"] = f"it computes in bfloat16 and float16 only, and the model in {dtype}"
    elif special:
        reasons["varlen"] = reasons["flash"] = "it knows no attention sinks and no soft caps"
    else:
        reasons["varlen"], reasons["flash"] = _why_no_varlen(device), _why_no_flash()
    if wanted == "auto":
        return next(kernel for kernel in KERNELS if not reasons[kernel])
    if reasons[wanted]:
        raise ReplayError(f'attention "{wanted}" is not possible: {reasons[wanted]}. "auto" chooses what is')
    return wanted


def attention(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    sequences: Sequences,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    wanted: str = "auto",
) -> torch.Tensor:
    """Return [1, T, H, D]: each slot attends to its own sequence, up to itself.

    `scale` multiplies the scores (1 / sqrt(D) by default). A slot sees the last `window` slots, itself included; None
    means all. `softcap` limits the scores by a tanh. `sinks` [H] are one more score per head, which takes weight and
    gives no value. `wanted` is as in `kernel_for`.
    """
    # Compiled code must not look at the borders on the host: it would be compiled again for each bin.
    if not torch.compiler.is_compiling() and (query_1HTD.shape[0] != 1 or query_1HTD.shape[2] != len(sequences)):
        raise ReplayError(
            f"packed attention expects one bin of {len(sequences)} slots, got queries {list(query_1HTD.shape)}: pass "
            "the arguments that belong to this batch"
        )
    scale = query_1HTD.shape[-1] ** -0.5 if scale is None else scale
    window = None if window is None or window >= sequences.longest else window
    special = softcap is not None or sinks is not None or query_1HTD.shape[-1] > LARGEST_HEAD
    kernel = kernel_for(query_1HTD.device, query_1HTD.dtype, special=special, wanted="segments" if special else wanted)
    if kernel == "segments":
        found = _segments(query_1HTD, key_1GTD, value_1GTD, sequences, _Rule(scale, window, softcap, sinks))
        return found[None]
    size, value_size = query_1HTD.shape[-1], value_1GTD.shape[-1]
    wide = max(-(-size // 8) * 8, value_size)  # these kernels take one head size, a multiple of 8
    query, key, value = (
        pad(part[0].transpose(0, 1), (0, wide - part.shape[-1])) if part.shape[-1] != wide else part[0].transpose(0, 1)
        for part in (query_1HTD, key_1GTD, value_1GTD)
    )
    return _by_lengths(kernel, query, key, value, sequences, scale, window)[None, :, :, :value_size]


# -- kernels over cumulative lengths ----------------------------------------------------------------


def _by_lengths(
    kernel: str,
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    sequences: Sequences,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    borders = (sequences.cumulative, sequences.cumulative, sequences.longest, sequences.longest)
    sides = (-1 if window is None else window - 1, 0)  # how many slots are seen to the left and to the right
    if kernel == "varlen":
        more = {"scale": scale, "window_size": sides, **_FEWER_KEYS}
        return varlen_attn(query_THD, key_TGD, value_TGD, *borders, **more)
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return flash_attn_varlen_func(query_THD, key_TGD, value_TGD, *borders, 0.0, scale, causal=True, window_size=sides)


@functools.cache
def _why_no_varlen(device: torch.device) -> str:
    if varlen_attn is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if not {"scale", "window_size"} <= _VARLEN_TAKES:
        return f"torch.nn.attention.varlen of torch {torch.__version__} takes no scale or no window"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without FlashAttention"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs a GPU of compute capability 8.0, and this is a {torch.cuda.get_device_name(device)}"
    return ""


@functools.cache
def _why_no_flash() -> str:
    return "" if importlib.util.find_spec("flash_attn") else "the package flash-attn is not installed"


# -- groups of near lengths -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How scores become weights; as in `attention`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Sequences that are computed together, each padded at its end to the longest of them.

    `start` and `end` are the borders of their slots. If nothing is padded the group is a view of them. Otherwise
    `padded_NL` are the slots to read and `places` [slots] where each slot stands among them. Padding reads a slot of
    another sequence: nothing but padding sees it, since it comes later.
    """

    start: int
    end: int
    count: int
    length: int
    padded_NL: torch.Tensor | None = None
    places: torch.Tensor | None = None


def _groups(boundaries: tuple[int, ...], device: torch.device) -> list[_Group]:
    """Group consecutive sequences. `pack` puts the longest first, so that neighbours have near lengths."""

    def cost(length: int) -> float:
        return length * (1 + length / LENGTH_COST)

    spans = list(itertools.pairwise(boundaries))
    chosen: list[list[tuple[int, int]]] = []
    longest, waste = 0, 0.0
    for start, end in spans:
        length = end - start
        grown = max(longest, length)
        added = cost(grown) - cost(length)
        added += len(chosen[-1]) * (cost(grown) - cost(longest)) if chosen and grown > longest else 0.0
        if not chosen or waste + added > GROUP_COST:
            chosen.append([])
            longest, waste, added, grown = 0, 0.0, 0.0, length
        chosen[-1].append((start, end))
        longest, waste = grown, waste + added
    return [_group(members, device) for members in chosen]


def _group(members: list[tuple[int, int]], device: torch.device) -> _Group:
    start, end = members[0][0], members[-1][1]
    length = max(b - a for a, b in members)
    if length * len(members) == end - start:
        return _Group(start, end, len(members), length)
    starts_N1 = torch.tensor([a - start for a, _ in members])[:, None]
    lengths_N1 = torch.tensor([b - a for a, b in members])[:, None]
    along_L = torch.arange(length)
    real_NL = along_L < lengths_N1
    padded_NL = torch.where(real_NL, starts_N1 + along_L, 0)
    places = real_NL.flatten().nonzero()[:, 0]
    return _Group(start, end, len(members), length, padded_NL.to(device), places.to(device))


class _Pad(torch.autograd.Function):
    """Reads the slots of a padded group. Its gradient takes those of the real slots: padding's are zero."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, group: _Group) -> torch.Tensor:
        assert group.padded_NL is not None
        ctx.group = group
        return slots.index_select(0, group.padded_NL.flatten())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.group.places), None


class _Unpad(torch.autograd.Function):
    """Takes the real slots of a padded group. Its gradient is zero in the padding."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, group: _Group) -> torch.Tensor:
        assert group.places is not None
        ctx.group, ctx.rows = group, len(padded)
        return padded.index_select(0, group.places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0]
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, ctx.group.places, grad), None


@torch.compiler.disable  # its groups differ from bin to bin: compiled code would be compiled again for each
def _segments(
    query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTD: torch.Tensor, sequences: Sequences, rule: _Rule
) -> torch.Tensor:
    found = [
        _one_group(query_1HTD, key_1GTD, value_1GTD, group, rule, whole=len(sequences.groups) == 1)
        for group in sequences.groups
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _one_group(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    group: _Group,
    rule: _Rule,
    *,
    whole: bool,
) -> torch.Tensor:
    def sequences_of(part_1HTD: torch.Tensor) -> torch.Tensor:
        part = part_1HTD[0] if whole else part_1HTD[0, :, group.start : group.end]
        if group.padded_NL is None:
            return part.unflatten(1, (group.count, group.length)).transpose(0, 1)
        padded = _Pad.apply(part.transpose(0, 1).flatten(1), group)
        return padded.view(group.count, group.length, len(part), -1).transpose(1, 2)

    query, key, value = (sequences_of(part) for part in (query_1HTD, key_1GTD, value_1GTD))
    out_NHLD = _equal_lengths(query, key, value, rule)
    out = out_NHLD.transpose(1, 2).flatten(0, 1)
    if group.padded_NL is None:
        return out
    return _Unpad.apply(out.flatten(1), group).view(-1, *out.shape[1:])


def _equal_lengths(
    query_NHLD: torch.Tensor, key_NGLD: torch.Tensor, value_NGLD: torch.Tensor, rule: _Rule
) -> torch.Tensor:
    heads, length = query_NHLD.shape[1:3]
    grouped = heads != key_NGLD.shape[1]
    in_window = rule.window is None or rule.window >= length
    plain = rule.softcap is None and rule.sinks is None
    if plain and in_window:
        return scaled_dot_product_attention(
            query_NHLD, key_NGLD, value_NGLD, is_causal=True, scale=rule.scale, enable_gqa=grouped
        )
    along = torch.arange(length, device=query_NHLD.device)
    distance_LL = along[:, None] - along
    seen_LL = distance_LL >= 0
    if not in_window:
        seen_LL &= distance_LL < rule.window
    if grouped:
        repeats = heads // key_NGLD.shape[1]
        key_NGLD, value_NGLD = (part.repeat_interleave(repeats, dim=1) for part in (key_NGLD, value_NGLD))
    if plain:
        return scaled_dot_product_attention(query_NHLD, key_NGLD, value_NGLD, attn_mask=seen_LL, scale=rule.scale)
    scores = query_NHLD @ key_NGLD.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = (scores / rule.softcap).tanh() * rule.softcap
    scores = scores.masked_fill(~seen_LL, -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks[None, :, None, None].expand(len(scores), -1, length, 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.float().softmax(-1)[..., :length]
    return weights.to(value_NGLD.dtype) @ value_NGLD


def _power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << max(0, number - 1).bit_length())
