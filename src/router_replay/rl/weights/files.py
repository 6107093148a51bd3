"""Write Hugging Face folders and safetensors files a tensor at a time, and read the parts that a rank needs.

A file of safetensors is a header with the place of every tensor, and then the bytes. So names, shapes and dtypes are
enough to begin, and each tensor is written to its place when it is there. The files are the bytes that save_pretrained
would write.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from router_replay.engines.lazy_tensors import like_of
from router_replay.engines.pieces import Piece, by_tensor, in_checkpoint, pieces_of
from router_replay.engines.vllm.plugin.weights.sources import DTYPES, IN_FILES, Place, Weights, open_source
from router_replay.rl.weights.held import counted

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
LARGEST_FILE = "50GB"  # as save_pretrained has it
_NAMES = {DTYPES[name]: short for short, name in IN_FILES.items()}


class TensorFile:
    """Write a safetensors file at `path` with tensors like those of `like`; every one of them must be written."""

    def __init__(self, path: pathlib.Path, like: Mapping[str, torch.Tensor]) -> None:
        ordered = sorted(like.items(), key=lambda entry: (-entry[1].itemsize, entry[0]))
        told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, tensor in ordered:
            begin, end = end, end + tensor.numel() * tensor.itemsize
            self._places[name] = begin, end
            told[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
        self._start = 8 + len(header)
        self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        self._write(len(header).to_bytes(8, "little") + header, 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the whole tensor `name`, which may be on any device."""
        begin, end = self._places.pop(name)
        flat = counted(tensor.detach().cpu().contiguous()).flatten().view(torch.uint8)
        assert len(flat) == end - begin, name
        if len(flat):
            self._write(memoryview(flat.numpy()), self._start + begin)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data)
        while len(rest):  # the system writes at most 2 GiB at a time
            done = os.pwrite(self._file, rest, offset)
            rest, offset = rest[done:], offset + done

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        assert kind is not None or not self._places, f"never written: {sorted(self._places)[:3]}"


def write_folder(
    model: Any,
    tensors: Mapping[str, torch.Tensor],
    folder: pathlib.Path,
    pieces: list[Piece] | None = None,
    largest_file: str | int = LARGEST_FILE,
) -> None:
    """Write what save_pretrained of the transformers `model` writes, with the weights of `tensors`.

    `tensors` have the names of the model's state dict; each is read once and not kept. `pieces` are those of the
    model, if the caller has them. Weights of more than `largest_file` bytes become several files with an index.
    """
    pieces = pieces_of(model) if pieces is None else pieces
    model.save_pretrained(folder, state_dict={})  # config, generation config and a user's own code
    (folder / WEIGHTS).unlink(missing_ok=True)
    like = like_of(tensors)
    told = {piece.name: torch.empty(piece.shape, dtype=like[piece.tensor].dtype, device="meta") for piece in pieces}
    split = split_torch_state_dict_into_shards(
        told, filename_pattern="model{suffix}.safetensors", max_shard_size=largest_file
    )
    files = {
        file: TensorFile(folder / file, {name: told[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    }
    file_of = {name: file for file, names in split.filename_to_tensors.items() for name in names}
    try:
        for name, tensor in in_checkpoint(pieces, tensors):
            files[file_of[name]].write(name, tensor)
    finally:
        for file in files.values():
            file.close()
    if split.is_sharded:
        parameters = sum(tensor.numel() for tensor in told.values())
        index = {"metadata": {"total_parameters": parameters, **split.metadata}, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class PartOfTensor:
    """A tensor of the model in a checkpoint. `[place]` reads that rectangle of it and nothing else, in float32.

    A place is a tuple of slices and numbers, as for a tensor; dimensions at the end may be left out.
    """

    def __init__(self, weights: Weights, pieces: list[Piece], shape: tuple[int, ...]) -> None:
        self._weights, self._pieces, self.shape = weights, pieces, torch.Size(shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        asked = place if isinstance(place, tuple) else (place,)
        asked = (*asked, *(slice(None),) * (len(self.shape) - len(asked)))
        ranges = [
            range(*one.indices(size)) if isinstance(one, slice) else range(one, one + 1)
            for one, size in zip(asked, self.shape, strict=True)
        ]
        found = counted(torch.empty([len(one) for one in ranges]))
        for piece in self._pieces:
            both = [
                range(max(one.start, own.start), min(one.stop, own.stop))
                for one, own in zip(ranges, piece.place, strict=True)
            ]
            if all(both) or not both:
                here = tuple(slice(b.start - r.start, b.stop - r.start) for b, r in zip(both, ranges, strict=True))
                found[here].copy_(self._read(piece, both).view(found[here].shape))
        return found[tuple(slice(None) if isinstance(one, slice) else 0 for one in asked)]

    def _read(self, piece: Piece, both: list[range]) -> torch.Tensor:
        """Return the part `both`, given in the model's tensor, of a piece, whose dimensions of one entry may be gone.

        It is a view of the mapped file, so it takes no memory.
        """
        parts = [slice(b.start - own.start, b.stop - own.start) for b, own in zip(both, piece.place, strict=True)]
        sizes = [own.stop - own.start for own in piece.place]
        inside, at = [], 0
        for size in piece.shape:
            while sizes[at] != size:  # only dimensions of one entry are left out
                at += 1
            inside.append(parts[at])
            at += 1
        return self._weights.read_part(piece.name, tuple(inside))


class CheckpointTensors(Mapping[str, PartOfTensor]):
    """The tensors of a model, by the names of its state dict, in the checkpoint of `folder`.

    `shapes` are those of the model's tensors, and `pieces` say where they are in a checkpoint. Raises EngineError if
    the folder cannot be read. `missing` and `misshapen` name tensors of the checkpoint that are not as expected.
    """

    def __init__(self, folder: pathlib.Path, pieces: list[Piece], shapes: Mapping[str, torch.Size]) -> None:
        self._weights = open_source({"path": str(folder)})
        self._pieces, self._shapes = by_tensor(pieces), shapes
        index = self._weights.index
        self.missing = [piece.name for piece in pieces if piece.name not in index]
        self.misshapen = [piece.name for piece in pieces if index.get(piece.name, (0, piece.shape))[1] != piece.shape]

    def __getitem__(self, name: str) -> PartOfTensor:
        return PartOfTensor(self._weights, self._pieces[name], self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def open_parts(path: pathlib.Path) -> dict[str, PartOfTensor]:
    """Return the tensors of a safetensors file by their own names. Raises EngineError if it cannot be read."""
    weights = open_source({"path": str(path)})
    return {
        name: PartOfTensor(weights, [Piece(name, name, tuple(slice(0, size) for size in shape), shape)], shape)
        for name, (_, shape) in weights.index.items()
    }


def place_of_rank(shape: torch.Size, rank: int, world: int) -> Place:
    """Return the rows that FSDP2 gives to `rank` of `world`: equal shares, rounded up, and less for the last ranks."""
    share = -(-shape[0] // world)
    return (slice(min(rank * share, shape[0]), min((rank + 1) * share, shape[0])),)
