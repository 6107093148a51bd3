"""`router-replay verify` on real models and the embedded engine: clean runs pass, and each injected fault is named."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from router_replay.batch import Sample
from router_replay.cli import main
from router_replay.cli.verify import FAULTS
from router_replay.recording import TrajectoryRecord, TrajectoryWriter
from router_replay.routes import Routes
from router_replay.verify.inject import FAULT_NAMES
from router_replay.verify.rollouts import generate, open_engine, read_prompts
from router_replay.verify.run import verify
from tests.rl.conftest import settings_of


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(folder: pathlib.Path, layers: int = 3, experts: int = 16, top_k: int = 4) -> pathlib.Path:
    from transformers import Qwen3MoeForCausalLM

    from router_replay.recipes.tiny.model import make_config, make_tokenizer, recipe_for

    config = make_config(recipe_for("tiny"))
    config.num_hidden_layers, config.num_experts, config.num_experts_per_tok = layers, experts, top_k
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("verify") / "model"))


def rollouts(folder: str, dtype: str = "bfloat16") -> list[Sample]:
    path = pathlib.Path(folder)
    prompts, _ = read_prompts(None, path, seed=0)
    with open_engine("embedded", path, dtype, 64) as engine:
        return generate(engine, prompts[:8], 12)


@pytest.fixture(scope="module")
def samples(model: str) -> list[Sample]:
    return rollouts(model)


@pytest.fixture(scope="module")
def file(samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("file") / "routes"
    with TrajectoryWriter(path) as writer:
        writer.write(TrajectoryRecord(sample, episode=number) for number, sample in enumerate(samples))
    return str(path)


def called(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["verify", *arguments, "--json", "--device", "cpu"])
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, facts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clean_rows_of_a_bfloat16_engine_are_not_accused(
    dtype: str, model: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The routers do disagree in float32, so this is no empty promise."""
    status, facts = called([model, "--trajectories", file, "--dtype", dtype], capsys)
    assert (status, facts["belongs"], facts["finding"]) == (0, True, None)
    assert facts["sequences"] == 8
    assert (facts["missing"], facts["impossible"]) == (0, 0)
    if dtype == "float32":
        assert facts["disagree"] > 0.005
        assert list(facts["per_layer"]) == ["0", "1", "2"]


def test_the_verdict_shows_what_replay_repairs(capsys: pytest.CaptureFixture[str]) -> None:
    """With the tiny model that comes with the package: a random model has hardly a gap to repair."""
    status, facts = called(["tiny"], capsys)
    assert status == 0
    assert facts["replayed"]["k3"] < facts["live"]["k3"] / 1.5
    assert 0 < facts["disagree"] < facts["tokens_disagree"] < 1


@pytest.mark.parametrize("fault", [fault for fault in FAULT_NAMES if fault != "cast"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_injected_fault_is_found_and_named(
    fault: str, dtype: str, model: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, facts = called([model, "--trajectories", file, "--inject", fault, "--dtype", dtype], capsys)
    assert status == 1
    assert facts["finding"]["fault"] == fault
    assert (facts["impossible"] > 0) == (fault == "zero")
    assert (facts["replayed"] is None) == (fault == "zero")  # such rows cannot be replayed


def test_ids_cut_to_a_byte_are_found_in_a_model_with_more_experts(tmp_path: pathlib.Path) -> None:
    wide = str(make_model(tmp_path / "wide", layers=2, experts=320, top_k=4))
    samples = rollouts(wide)
    found = verify(samples, wide, "test", fault="cast", device="cpu")
    assert found.finding is not None
    assert found.finding.fault == "cast"
    clean = verify(samples, wide, "test", device="cpu")
    assert clean.finding is None


def test_the_engine_of_another_checkpoint_is_named_by_against(
    model: str, samples: list[Sample], tmp_path: pathlib.Path
) -> None:
    """The other weights have routers of their own; the tokens are those of the right engine."""
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    for name, weight in other.named_parameters():
        if "mlp.gate" in name:
            weight.data.add_(torch.randn_like(weight) * weight.std())
    other.save_pretrained(tmp_path / "other")
    trainer_view = verify(samples, str(tmp_path / "other"), "test", device="cpu")
    assert trainer_view.finding is not None
    assert trainer_view.finding.fault == "stale"
    assert "--against" in trainer_view.finding.cause
    named = verify(samples, str(tmp_path / "other"), "test", against=model, device="cpu")
    assert named.finding is not None
    assert named.finding.fault == "stale"
    assert "the suspected checkpoint" in named.finding.cause


def test_a_step_of_a_recorded_run_is_verified_with_the_weights_of_that_step(
    model: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of step 1 are of version 1: the weights at the start of the run do not explain them."""
    from router_replay.rl.config import load_config
    from router_replay.rl.loop.train import train

    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join(json.dumps({"prompt": f"{n + 10}+{n + 20}=", "answer": ""}) for n in range(6)))
    settings = settings_of(pathlib.Path(model), problems, tmp_path / "run")
    settings += ["optimizer.lr=0.005", "checkpoint.every=1", "rollout.max_tokens=8", f"record={tmp_path / 'routes'}"]
    train(load_config(None, settings))
    capsys.readouterr()
    file = ["--trajectories", str(tmp_path / "routes")]
    after_one = str(tmp_path / "run" / "checkpoints" / "step_000001")
    assert called([model, *file, "--step", "0"], capsys)[0] == 0
    assert called([after_one, *file, "--step", "1"], capsys)[0] == 0
    status, facts = called([model, *file], capsys)
    assert (status, facts["finding"]["fault"]) == (1, "stale")
    assert "policy version" in facts["finding"]["detail"]
    status, facts = called([model, *file, "--step", "1", "--against", after_one], capsys)
    assert status == 1
    assert "the suspected checkpoint" in facts["finding"]["cause"]


def test_json_lines_of_another_framework_are_verified(
    model: str, samples: list[Sample], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens, log-probs and vLLM's own field, one sequence in a line."""
    from router_replay import wire

    lines = []
    for sample in samples:
        assert sample.routes is not None
        line = {"token_ids": sample.token_ids.tolist(), "logprobs": sample.logprobs.tolist()}
        line |= {"loss_mask": sample.loss_mask.astype(int).tolist()}
        lines.append(json.dumps({**line, "routed_experts": wire.to_vllm(sample.routes[:-1])}))
    dump = tmp_path / "dump.jsonl"
    dump.write_text("\n".join(lines))
    status, facts = called([model, "--trajectories", str(dump)], capsys)
    assert (status, facts["missing"], facts["sequences"]) == (0, 0, 8)


def test_an_engine_with_fp8_weights_is_not_accused(model: str) -> None:
    """Its rows differ several times as much as those of a bfloat16 engine, and they are its own."""
    from transformers import AutoModelForCausalLM

    from router_replay.engines import EmbeddedEngine
    from router_replay.rl.weights.fp8 import fp8_rounded

    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for name, weight in rounded.named_parameters():
        if weight.ndim > 1 and "layers" in name:
            weight.data.copy_(fp8_rounded(weight.data))
    prompts, _ = read_prompts(None, pathlib.Path(model), seed=0)
    with EmbeddedEngine(rounded) as engine:
        found = verify(generate(engine, prompts[:8], 12), model, "test", device="cpu")
    assert found.finding is None
    assert found.disagree > 2 * found.expected


def test_a_router_that_is_wrong_in_one_layer_is_found_there() -> None:
    """Every later layer sees other inputs and disagrees too; replay takes that away."""
    from transformers import AutoModelForCausalLM

    from router_replay.engines import EmbeddedEngine
    from router_replay.rl.config import tiny_folder

    wrong = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.bfloat16)
    wrong.model.layers[2].mlp.gate.weight.data.neg_()
    prompts, _ = read_prompts(None, tiny_folder(), seed=0)
    with EmbeddedEngine(wrong) as engine:
        found = verify(generate(engine, prompts[:8], 12), "tiny", "test", device="cpu")
    assert found.finding is not None
    assert (found.finding.fault, found.finding.detail) == ("one-layer", "only layer 2 out of line")
    assert found.per_layer[0] < 0.2 < found.per_layer[9]


def test_rows_that_bear_loss_and_are_missing_are_a_fault(model: str, samples: list[Sample]) -> None:
    sample = samples[0]
    assert sample.routes is not None
    captured = sample.routes.captured.copy()
    captured[-4] = False
    cut = dataclasses.replace(sample, routes=Routes(sample.routes.ids, sample.routes.spec, captured=captured))
    found = verify([cut, *samples[1:]], model, "test", device="cpu")
    assert found.finding is not None
    assert (found.finding.fault, found.missing, found.missing_loss) == ("missing", 1, 1)


def test_the_command_offers_the_faults_that_there_are() -> None:
    assert set(FAULTS) == set(FAULT_NAMES)


def test_the_engine_generates_and_the_verdict_is_text(
    model: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(["12+34=", '{"prompt": "5+6="}', '{"token_ids": [3, 4, 5]}'] * 3))
    arguments = ["verify", model, "--prompts", str(prompts), "--tokens", "8", "--device", "cpu"]
    assert main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "The routes belong to the tokens."
    assert out[1] == f"engine embedded, 9 prompts of {prompts}; trainer {model} in float32"
    assert out[2].startswith("9 sequences, ")
    page = tmp_path / "page.html"
    assert main([*arguments, "--inject", "shift", "--json", "--report", str(page)]) == 1
    printed = capsys.readouterr()
    facts, twin = json.loads(printed.out), json.loads(page.with_suffix(".json").read_text())
    assert facts["finding"]["fault"] == "shift"
    assert twin["verdict"] == facts
    assert f"page: {page}" in printed.err
    _check_charts(twin["charts"], facts)


def _check_charts(charts: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """See that the page shows what the verdict counted."""
    heat, scatter, histogram, bars, load = charts
    assert bars["values"] == pytest.approx(list(facts["per_layer"].values()), rel=1e-5)
    assert sum(heat["counts"]) == facts["rows"]
    shares = np.array([[share or 0.0 for share in row] for row in heat["values"]])
    assert float((shares * heat["counts"]).sum(axis=1).mean()) == pytest.approx(
        facts["disagree"] * facts["rows"], rel=1e-4
    )
    assert [sum(counts) for counts in histogram["counts"]] == [facts["sampled"]] * 2
    gaps = [np.abs(np.subtract(group["y"], group["x"])).mean() for group in scatter["groups"]]
    assert gaps == pytest.approx([facts["live"]["abs_mean"], facts["replayed"]["abs_mean"]], rel=1e-3)
    assert np.mean(load["values"]) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "is not a folder with a config.json"),
        (["tiny", "--engine", "trt"], 'expected "embedded", "vllm", the URL of a vLLM server, or sglang=URL'),
        (["tiny", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["tiny", "--trajectories", "absent"], "No such file or directory: 'absent'"),
        (["tiny", "--engine", "http://a:1", "--api-key-env", "NOT_SET_HERE"], "this environment variable is not set"),
    ],
)
def test_what_cannot_be_verified_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err.splitlines()[-1]


def test_a_file_of_another_model_or_without_tokens_is_refused(
    model: str, file: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from router_replay import wire

    assert main(["verify", "tiny", "--trajectories", file, "--device", "cpu"]) == 1
    assert "sequence 0: its routes are of another model" in capsys.readouterr().err
    first = np.arange(4)
    blob = tmp_path / "blob"
    spec = next(iter_specs(file))
    blob.write_bytes(wire.encode(Routes(np.tile(first, (5, 3, 1)), spec)))
    assert main(["verify", model, "--trajectories", str(blob)]) == 1
    assert "holds routes without their tokens" in capsys.readouterr().err


def iter_specs(file: str) -> Iterator[Any]:
    from router_replay.recording import TrajectoryReader

    for record in TrajectoryReader(file):
        assert record.routes is not None
        yield record.routes.spec
