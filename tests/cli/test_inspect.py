"""`router-replay inspect` shows what a file holds, in every form, and says in plain words why it cannot."""

from __future__ import annotations

import base64
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from router_replay import RouterSpec, Routes, wire
from router_replay.cli import main
from router_replay.recording import TrajectoryWriter
from tests.makers import random_ids, random_routes
from tests.recording.test_files import record

SPEC = RouterSpec(num_experts=16, top_k=2, layers=(1, 2), num_layers=3)
CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
}
ROUTES = random_routes(6, SPEC)


@pytest.fixture
def model(tmp_path: pathlib.Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    return line


@pytest.mark.parametrize("seekable", [False, True])
def test_a_blob_shows_rows_gaps_versions_and_size(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], seekable: bool
) -> None:
    captured = np.arange(6) != 4
    routes = Routes(random_ids(6, SPEC), SPEC, captured=captured, versions=np.array([3, 3, 3, 7, 7, 7]))
    file = tmp_path / "routes.bin"
    file.write_bytes(wire.encode(routes, codec="sets", token_ids=range(16), start=10, seekable=seekable))
    assert main(["inspect", str(file)]) == 0
    first, form, digest, spec, rows, one, two, size, head, *layers = capsys.readouterr().out.splitlines()
    assert first == f"blob, {file.stat().st_size:,} bytes"
    assert form == f"wire format {2 if seekable else 1}, codec sets"
    assert digest == "token digest: yes"
    assert spec == "2 of 16 experts in 2 layers: (1, 2)"
    assert rows == "rows 10 to 16, 5 captured, 1 missing (the file: row 14)"
    assert (one, two) == ("rows 10 to 13: policy version 3", "rows 13 to 16: policy version 7")
    assert "of the 9 bytes at the information bound" in size  # 5 rows * 2 layers * log2(120) bits = 8.6 bytes
    assert head.startswith("layer")
    assert [line.split()[0] for line in layers] == ["1", "2"]


def test_the_load_is_that_of_the_captured_rows(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = np.array([[[0, 1], [0, 1]], [[0, 2], [2, 3]], [[0, 3], [4, 5]], [[9, 8], [9, 8]]])
    routes = Routes(ids, SPEC, captured=np.array([True, True, True, False]))
    file = tmp_path / "routes.bin"
    file.write_bytes(wire.encode(routes))
    found = shown([str(file)], capsys)
    # three rows of two experts over 16: a mean of 6/16; the largest is 3 and 1
    assert [one["load"] for one in found["layers"]] == [8.0, 16 / 6]
    assert [one["unused"] for one in found["layers"]] == [12, 10]


def test_a_file_of_trajectories_is_summed_up(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "routes"
    with TrajectoryWriter(file) as writer:
        writer.write([record(0, step=0), record(1, step=3)])
    found = shown([str(file)], capsys)
    assert (found["format"], found["sequences"], found["steps"]) == ("trajectories", 2, [0, 3])
    assert (found["tokens"], found["sampled"], found["rows"], found["captured"]) == (10, 6, 10, 8)
    assert found["gaps"] == []  # the last token of a sequence is never forwarded
    assert found["versions"] == {"0": 4, "1": 4, "2": 2}
    assert found["reward"] == 0.5
    file.write_bytes(file.read_bytes()[:-3])  # as after a kill
    assert shown([str(file)], capsys)["sequences"] == 1
    assert main(["inspect", str(file)]) == 0
    assert "1 trajectories, 5 tokens" in capsys.readouterr().out


def npy() -> bytes:
    return base64.b64decode(wire.to_vllm(ROUTES))


@pytest.mark.parametrize(
    ("content", "form", "needs"),
    [
        (wire.to_vllm(ROUTES), "vllm", False),
        (npy(), "vllm", False),
        (json.dumps({"choices": [{"routed_experts": wire.to_vllm(ROUTES)}]}), "vllm", False),
        (wire.to_sglang(ROUTES), "sglang", True),
        (json.dumps({"meta_info": {"routed_experts": wire.to_sglang(ROUTES)}}), "sglang", False),
        (json.dumps(wire.to_prime_rl(ROUTES)), "prime-rl", False),
        (json.dumps({"nvext": {"routed_experts": wire.to_dynamo(ROUTES)}}), "dynamo", False),
        (json.dumps(wire.to_skyrl(ROUTES)), "skyrl", False),
        (wire.to_nemo(ROUTES), "nemo", False),
        (json.dumps(wire.to_megatron(ROUTES)), "megatron", False),
        (json.dumps({"choices": [wire.to_megatron(ROUTES)]}), "megatron", False),
    ],
)
def test_the_form_of_every_peer_is_read(
    content: str | bytes,
    form: str,
    needs: bool,
    tmp_path: pathlib.Path,
    model: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A form without a mark must be named; one whose model is not given is refused."""
    file = tmp_path / "routes.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    named = ["--format", form] if needs else []
    found = shown([str(file), "--model", model, *named], capsys)
    assert (found["format"], found["rows"], found["captured"]) == (form, 6, 6)
    assert found["spec"]["layers"] == [1, 2]
    assert "does not say the model's experts: give --model" in refused([str(file), *named], capsys)
    if needs:
        assert "has no mark that tells its form: give --format" in refused([str(file), "--model", model], capsys)


def trace(step: int, layer: int, ids: Any, **more: Any) -> str:
    line = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
    return json.dumps({**line, "num_tokens": len(ids), "topk": 2, "top_indices": ids, **more}) + "\n"


def test_megatrons_router_trace_is_read_by_step_and_layer(
    tmp_path: pathlib.Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ROUTES.ids.tolist()
    first, second = [row[0] for row in ids], [row[1] for row in ids]
    lines = trace(0, 1, first) + trace(0, 2, second) + trace(0, 1, first, block="mtp", mtp_idx=0)
    lines += trace(1, 1, first[:2]) + trace(1, 2, second[:2]) + trace(1, 1, first[2:3]) + trace(1, 2, second[2:3])
    file = tmp_path / "router_trace_rank0.jsonl"
    file.write_text(lines)
    found = shown([str(file), "--config", model + "/config.json"], capsys)
    assert (found["format"], found["sequences"], found["rows"]) == ("megatron-trace", 2, 9)
    read = wire.from_megatron_trace(lines, SPEC)
    assert read[0] == ROUTES
    assert read[1] == ROUTES[:3]
    file.write_text(trace(0, 7, first))
    assert "layers [7] have no router" in refused([str(file), "--model", model], capsys)
    file.write_text(trace(0, 1, first) + trace(0, 2, second[:3]))
    assert "equally many tokens in every layer, got [3, 6]" in refused([str(file), "--model", model], capsys)
    file.write_text(trace(0, 1, [[3, 3]]))
    assert "repeat an expert" in refused([str(file), "--model", model], capsys)


def test_json_lines_with_tokens_are_trajectories(
    tmp_path: pathlib.Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blob = base64.b64encode(wire.encode(ROUTES)).decode()
    line = {"token_ids": list(range(7)), "logprobs": [0.0] * 7, "loss_mask": [0] * 3 + [1] * 4, "reward": 1.0}
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps({**line, "routes": blob}) + "\n" + json.dumps({**line, "routes": blob}) + "\n")
    found = shown([str(file)], capsys)
    assert (found["format"], found["tokens"], found["sampled"], found["captured"]) == ("jsonl", 14, 8, 12)
    file.write_text(json.dumps({**line, "routed_experts": wire.to_sglang(ROUTES)}))
    found = shown([str(file), "--model", model, "--format", "sglang"], capsys)
    assert (found["rows"], found["captured"], found["gaps"]) == (7, 6, [])
    file.write_text(json.dumps({**line, "routed_experts": wire.to_prime_rl(ROUTES[2:], start=2)}))
    found = shown([str(file), "--model", model], capsys)
    assert found["gaps"] == [{"place": "line 1", "from": 0, "to": 2}]
    file.write_text(json.dumps({**line, "token_ids": [1, 2], "routes": blob}))
    assert "line 1: 6 rows for 2 tokens, expected at most one row per token" in refused([str(file)], capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: expected a file of routes or trajectories"),
        (b"hello", "has no mark that tells its form: give --format"),
        (b'{"a": 1}', "has no mark that tells its form"),
        (b"router-replay trajectories 2\n", "has no mark that tells its form"),
    ],
)
def test_what_is_no_file_of_routes_is_refused_in_one_line(
    content: bytes, words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert words in refused([str(file)], capsys)


def test_a_damaged_blob_a_wrong_format_and_a_wrong_model_are_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blob = bytearray(wire.encode(ROUTES, codec="dense"))
    blob[-1] ^= 1
    file = tmp_path / "routes.bin"
    file.write_bytes(blob)
    assert "the blob was damaged or changed" in refused([str(file)], capsys)
    assert "--format must be one of blob, trajectories" in refused([str(file), "--format", "pickle"], capsys)
    file.with_name("config.json").write_text("{}")
    assert "--model" in refused([str(file), "--model", str(tmp_path)], capsys)
