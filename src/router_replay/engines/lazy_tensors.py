"""Holds tensors by name that exist only while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch


class LazyTensors(Mapping[str, torch.Tensor]):
    """Makes the tensor of a name anew each time it is read, so that nobody holds all of them.

    `like` has a tensor without storage for each name, with its shape and dtype. `read` makes the tensor of a name.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> None:
        self.like, self._read = dict(like), read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.like:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)

    def __contains__(self, name: object) -> bool:
        return name in self.like  # Mapping itself would read the tensor


def like_of(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return tensors with the shapes and dtypes of `tensors`, which are not read if they are lazy."""
    return tensors.like if isinstance(tensors, LazyTensors) else tensors
