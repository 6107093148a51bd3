"""Measure the trainer's score + update on a GPU against commit 1b089bf, in turns in one run.

    python -m bench.train_gpu                                     # one GPU; the base comes from git
    python -m bench.train_gpu --base FOLDER                       # without git: FOLDER holds router_replay of 1b089bf
    python -m bench.train_gpu --compile --profile --syncs         # and compiled; the kernels; where the CPU waited
    python -m bench.train_gpu --rounds 40 --base-rounds 5         # R3 against off, with few steps of the slow base
    python -m bench.train_gpu --device cpu --tiny --rounds 2      # a check that all of it runs

The model is that of `router-replay make-model --size gpu` with random weights (446M parameters, 16 layers, 8 of 64
experts, bf16). `long` is 64 sequences of 1,024 tokens in bins of 16,384 slots, `short` 1,024 sequences of 12, both in 4
mini-batches. The routes are those that the model chooses itself. Each version is one process. The modes of this version
are policies in the same process, since the speeds of two equal processes differ by some percent. In each round every
mode runs one step. The modes alternate after every mini-batch (its score and its update), because the speed of the
machine changes from second to second. Ratios to the base are medians over rounds of the ratio within a round, those of
R3 to off are medians over mini-batches. "off again" shows what the method cannot tell apart, and bench.verdicts decides
with it whether R3 keeps its limit.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile
from typing import Any

import torch

from bench.train_step import MARK
from bench.verdicts import Share, verdict
from router_replay.rl.policy.operations import Operations, peak_of
from router_replay.spec import RouterSpec

BASE = "1b089bf"
GOALS = {"long": 2.5, "short": 1.5}
R3_LIMIT = 1.02
MINI_BATCHES = 4
HERE = pathlib.Path(__file__).resolve().parent.parent


class Process:
    """A worker with one version of the package and one policy per mode."""

    def __init__(self, source: pathlib.Path, job: dict[str, Any]) -> None:
        self.modes = list(job["modes"])
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(HERE / "bench" / "train_step.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=source
        )
        self._write(job)
        self._read()

    def ask(self, do: str, mode: str, workload: str, **more: int) -> dict[str, Any]:
        self._write({"do": do, "mode": mode, "workload": workload, **more})
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        raise RuntimeError(f"the process of {self.modes} ended with {self._process.wait()}; its error is above")


def base_source(given: str | None, folder: pathlib.Path) -> pathlib.Path | None:
    """Return the folder with the package at BASE, or None if there is neither a folder nor git."""
    if given:
        return pathlib.Path(given).resolve()
    done = subprocess.run(["git", "archive", BASE, "src"], cwd=HERE, capture_output=True, check=False)
    if done.returncode:
        print(f"not compared with {BASE}: {done.stderr.decode().strip()}. Pass --base FOLDER")
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def make_model(folder: pathlib.Path, tiny: bool, vocabulary: int | None = None) -> tuple[Operations, int]:
    """Write the model with random weights and its tokenizer; return its operation count and its number of parameters.

    With a `vocabulary` the model has so many tokens, and the logit of its end of sequence is always 0. The other logits
    vary around 0, so about one token in 1.2 * `vocabulary` ends an answer (1.0 for the tiny one), wherever it is: the
    lengths of answers have the long tail of a geometric distribution.
    """
    from transformers import Qwen3MoeForCausalLM

    from router_replay.recipes.tiny.model import make_config, make_tokenizer, recipe_for

    config = make_config(recipe_for("tiny" if tiny else "gpu"))
    config.max_position_embeddings = 4096
    config.vocab_size = vocabulary or config.vocab_size
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and not tiny else "cpu"
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config)
    if vocabulary:
        with torch.no_grad():
            model.lm_head.weight[config.eos_token_id] = 0
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    return Operations(model, RouterSpec.from_config(config)), size


def settings(arguments: argparse.Namespace, model: pathlib.Path, more: list[str]) -> list[str]:
    return [
        f"model.path={model}", f"model.dtype={arguments.dtype}", f"model.device={arguments.device}",
        f"output={model.parent / 'out'}", "engine.kind=embedded", f"trainer.max_tokens={arguments.tokens}",
        "optimizer.lr=1e-6", f"optimizer.mini_batches={MINI_BATCHES}", *more,
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="the tiny model and short sequences, as a check")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=16384, help="slots of a packed pass")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--base-rounds", type=int, help=f"rounds in which {BASE} takes part, the first ones; default: all"
    )
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=["long", "short"], choices=["long", "short"])
    parser.add_argument("--base", help=f"a folder that holds the package router_replay of {BASE}")
    parser.add_argument("--compile", action="store_true", help="also measure trainer.compile = true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the new version")
    parser.add_argument("--profile", action="store_true", help="print torch's table of kernels for each new mode")
    parser.add_argument("--syncs", action="store_true", help="print where the new version with R3 waits for the GPU")
    parser.add_argument("--out", help="write all figures to this JSON file")
    arguments = parser.parse_args()
    lengths = {"long": (64, 1024), "short": (1024, 12)} if not arguments.tiny else {"long": (8, 64), "short": (16, 12)}
    lengths = {name: lengths[name] for name in arguments.workloads}
    workloads = {name: {"sequences": count, "length": length} for name, (count, length) in lengths.items()}
    if arguments.base_rounds is None:
        arguments.base_rounds = arguments.rounds
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        operations, size = make_model(root / "model", arguments.tiny)
        source = base_source(arguments.base, root / "base") if arguments.base_rounds > 0 else None
        modes = {"new, R3": ["replay=r3"], "new, off": ["replay=off"], "new, off again": ["replay=off"]}
        if arguments.compile:
            modes |= {f"{name}, compiled": [*more, "trainer.compile=true"] for name, more in modes.items()}
        threads = 1 if arguments.device == "cpu" else 8

        def start(source: pathlib.Path, modes: dict[str, list[str]]) -> Process:
            chosen = {name: settings(arguments, root / "model", more) for name, more in modes.items()}
            return Process(source, {"modes": chosen, "workloads": workloads, "threads": threads})

        base = None if source is None else start(source, {f"{BASE}, R3": ["replay=r3"]})
        new = start(HERE / "src", {name: [*more, *arguments.set] for name, more in modes.items()})
        where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {threads} thread"
        print(f"\n{size / 1e6:.0f}M parameters, {arguments.dtype}, {where}, {arguments.rounds} rounds")
        figures, missed = {}, False
        for name, (count, length) in lengths.items():
            taken = measure(new, base, name, arguments)
            figures[name] = taken
            print(f"\n{name}: {count:,} sequences of {length:,} tokens, bins of {arguments.tokens:,}, 4 mini-batches\n")
            missed |= show(taken, name, operations.step([length] * count), count * length, arguments)
        for name in lengths if arguments.syncs and arguments.device == "cuda" else ():
            print(f"\nwhere {name} waits for the GPU, new, R3:")
            print("\n".join(new.ask("syncs", "new, R3", name)["places"]) or "nowhere")
        for name in lengths if arguments.profile else ():
            for mode in [mode for mode in modes if "again" not in mode]:
                print(f"\nprofile of {name}, {mode}:\n{new.ask('profile', mode, name)['table']}")
        for process in [new] if base is None else [new, base]:
            process.close()
        more = ["replay=r3", "model.gradient_checkpointing=non_reentrant", *arguments.set]
        checkpointed = start(HERE / "src", {"new, R3, checkpointing": more})
        show_memory(checkpointed, figures, lengths)
        checkpointed.close()
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(figures, indent=1))
    return int(missed and not arguments.tiny)


def _step_of(parts: list[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of a step from those of its mini-batches."""
    sums = {name: sum(part[name] for part in parts) for name in ("score", "update")}
    peaks = {name: max(part[name] for part in parts) for name in ("peak_bytes", "resting_bytes")}
    return {**sums, **peaks, "mini-batches": [part["score"] + part["update"] for part in parts]}


def measure(
    new: Process, base: Process | None, workload: str, arguments: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each mode by round; the base has those of the first rounds only."""
    processes = [new] if base is None else [base, new]
    taken: dict[str, list[dict[str, Any]]] = {mode: [] for process in processes for mode in process.modes}
    count, turn = len(new.modes), 0
    for number in range(-arguments.warm_up, arguments.rounds):
        parts: dict[str, list[dict[str, float]]] = {mode: [] for mode in taken}
        for mini in range(MINI_BATCHES):
            shift, turn = turn % count, turn + 1
            order = (new.modes[shift:] + new.modes[:shift])[:: -1 if turn // count % 2 else 1]
            turns = [(new, mode) for mode in order]  # no mode always follows the same one
            if base is not None and number < arguments.base_rounds:
                turns += [(base, mode) for mode in base.modes]  # at the end, so that each mode follows it equally often
            for process, mode in turns:
                parts[mode].append(process.ask("step", mode, workload, number=mini))
        for mode, found in parts.items():
            if number >= 0 and found:
                taken[mode].append(_step_of(found))
    return taken


def show(
    taken: dict[str, list[dict[str, Any]]], name: str, operations: float, tokens: int, arguments: argparse.Namespace
) -> bool:
    """Print the table of one workload; return whether a goal is missed."""
    peak = peak_of(torch.device(arguments.device))
    first = next(iter(taken))
    print(f"| version | score, ms | update, ms | tokens/s | TFLOP/s | of the peak | against {first} | peak memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    whole = {which: [one["score"] + one["update"] for one in rounds] for which, rounds in taken.items()}

    def faster(than: str, which: str) -> float:
        pairs = zip(whole[than], whole[which], strict=False)  # the base has the first rounds only
        return statistics.median(a / b for a, b in pairs)

    for which, rounds in taken.items():
        seconds = statistics.median(whole[which])
        score, update = (statistics.median(one[part] for one in rounds) * 1e3 for part in ("score", "update"))
        share = f"{operations / seconds / peak:.1%}" if peak else "unknown"
        memory = max(one["peak_bytes"] for one in rounds) / 2**30
        print(
            f"| {which} | {score:.1f} | {update:.1f} | {tokens / seconds:,.0f} | {operations / seconds / 1e12:.1f} | "
            f"{share} | {faster(first, which):.2f}x | {memory:.2f} GiB |"
        )
    missed = False
    if first.startswith(BASE):
        best = max((faster(first, which), which) for which in taken if "R3" in which and which != first)
        missed = best[0] < GOALS[name]
        print(f"\n{best[1]}: {best[0]:.2f}x of {BASE} (goal {GOALS[name]}x): {'MISSED' if missed else 'kept'}")
    for suffix in [suffix for suffix in ("", ", compiled") if f"new, off{suffix}" in taken]:
        off, again, r3 = (
            [seconds for one in taken[f"new, {mode}{suffix}"] for seconds in one["mini-batches"]]
            for mode in ("off", "off again", "R3")
        )
        speed, same = Share.of(off, r3), Share.of(off, again)
        said = verdict(speed, 1 / R3_LIMIT, same)
        missed |= said == "MISSED"
        print(
            f"R3 costs {1 / speed.median:.3f}x [{1 / speed.high:.3f}, {1 / speed.low:.3f}] of off{suffix} (limit "
            f"{R3_LIMIT}x; off again differs from off by up to {same.noise:.3f}): {said}"
        )
    return missed


def show_memory(process: Process, figures: dict[str, Any], lengths: dict[str, tuple[int, int]]) -> None:
    """Print the peak memory per token of a mini-batch with checkpointing; a CPU has no such figure."""
    for name, (count, length) in lengths.items():
        for _ in range(2):
            found = process.ask("step", process.modes[0], name)
        figures[f"{name}, checkpointing"] = found
        peak, resting = found["peak_bytes"], found["resting_bytes"]
        tokens = count * length / 4  # of one mini-batch
        print(
            f"\n{name} with checkpointing: peak {peak / 2**30:.2f} GiB, {peak / tokens / 2**10:.1f} KiB per token of a "
            f"mini-batch, {(peak - resting) / tokens / 2**10:.1f} KiB without the {resting / 2**30:.2f} GiB of weights "
            f"and optimizer; step {found['score'] + found['update']:.3f} s"
            + ("" if peak else "; no memory is measured on a CPU")
        )


if __name__ == "__main__":
    sys.exit(main())
