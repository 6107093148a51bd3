"""Folders that are written a tensor at a time are those that save_pretrained writes, to the byte."""

from __future__ import annotations

import filecmp
import pathlib

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from router_replay.engines.lazy_tensors import LazyTensors
from router_replay.engines.pieces import in_checkpoint, pieces_of
from router_replay.errors import EngineError
from router_replay.rl.weights.files import CheckpointTensors, TensorFile, open_parts, write_folder
from tests.families.found import folders
from tests.replay import tiny


@pytest.mark.parametrize("family", sorted(folders()))
def test_the_pieces_of_every_family_are_what_save_pretrained_writes(family: str, tmp_path: pathlib.Path) -> None:
    """Fused experts are taken apart, and of tied weights there is one."""
    model = tiny.build(family).model
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    got = dict(in_checkpoint(pieces_of(model), model.state_dict()))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_a_folder_is_that_of_save_pretrained_to_the_byte(random_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model)
    state, reads = model.state_dict(), []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return state[name]

    model.save_pretrained(tmp_path / "expected")
    write_folder(model, LazyTensors(state, read), tmp_path / "got")
    assert sorted(reads) == sorted(state)  # each once
    names = sorted(path.name for path in (tmp_path / "expected").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "got").iterdir())
    _, wrong, missing = filecmp.cmpfiles(tmp_path / "expected", tmp_path / "got", names, shallow=False)
    assert (wrong, missing) == ([], [])


def test_more_than_a_file_may_hold_becomes_several_files_with_an_index(
    random_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model)
    write_folder(model, model.state_dict(), tmp_path, largest_file="300KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 4
    assert not (tmp_path / "model.safetensors").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_any_rectangle_of_a_tensor_is_read_from_its_pieces(random_model: pathlib.Path) -> None:
    """As FSDP2 needs rows and Megatron a half of one expert."""
    model = AutoModelForCausalLM.from_pretrained(random_model)
    state = model.state_dict()
    tensors = CheckpointTensors(random_model, pieces_of(model), {name: tensor.shape for name, tensor in state.items()})
    assert (tensors.missing, tensors.misshapen, set(tensors)) == ([], [], set(state))
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    middle = state[fused].shape[1] // 2
    places = [
        (slice(3, 9),), (5,), (slice(None),), (5, slice(middle - 3, middle + 4)), (0, slice(0, middle), slice(7, 20)),
        (slice(2, 4), slice(None), 3), (slice(4, 4),),
    ]  # fmt: skip
    for place in places:
        assert torch.equal(tensors[fused][place], state[fused][place])
    assert torch.equal(tensors["model.norm.weight"][slice(2, 50)], state["model.norm.weight"][2:50])


def test_a_tensor_that_is_never_written_or_does_not_fit_is_an_error(tmp_path: pathlib.Path) -> None:
    like = {"a": torch.empty(2, 3), "b": torch.empty(()), "c": torch.empty(0, 2, dtype=torch.bfloat16)}
    with TensorFile(tmp_path / "whole", like) as file:
        for name, tensor in like.items():
            file.write(name, torch.full_like(tensor, 3))
    parts = open_parts(tmp_path / "whole")
    assert torch.equal(parts["a"][(slice(1, 2),)], torch.full((1, 3), 3.0))
    assert float(parts["b"][()]) == 3
    with pytest.raises(AssertionError, match="never written: "), TensorFile(tmp_path / "half", like) as file:
        file.write("a", torch.zeros(2, 3))
    with pytest.raises(EngineError, match="not a complete safetensors file"):
        open_parts(tmp_path / "half")
