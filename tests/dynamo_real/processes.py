"""Real Dynamo processes: frontends and workers that find each other through files in one state folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from tests.dynamo_real import environment
from tests.engines.conftest import OWN_WORKER, SHAPE

SECONDS = 600  # to start, on a machine that does other work
WORKER = pathlib.Path(__file__).with_name("worker.py")


@dataclasses.dataclass
class Process:
    process: subprocess.Popen[bytes]
    url: str
    log: pathlib.Path

    def sampled(self) -> float:
        """How many tokens a worker has sampled since it started."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    def kill(self) -> None:
        """End the whole group that we started: a worker has an engine core of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Dynamo:
    """One Dynamo: workers, and frontends with different settings in front of them."""

    def __init__(self, state: pathlib.Path) -> None:
        self.state = state
        self.workers: list[Process] = []
        self.frontends: dict[str, Process] = {}

    def start_worker(self, model: str, *flags: str, **variables: str) -> Process:
        shape = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items() if value is not True]
        arguments = ["--model", model, "--served-model-name", "moe", "--enforce-eager", *shape, *flags]
        arguments += ["--worker-extension-cls=tests.dynamo_real.slow_steps.SlowSteps"]
        port = free_port()
        worker = self._start(
            f"worker-{len(self.workers)}", [str(WORKER), *arguments], port,
            DYN_SYSTEM_HOST="127.0.0.1", DYN_SYSTEM_PORT=str(port), **OWN_WORKER, **variables,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def start_frontend(self, name: str, *flags: str, generate: bool) -> Process:
        port = free_port()
        variables = {"DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1"} if generate else {}
        command = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *flags]
        self.frontends[name] = self._start(f"frontend-{name}", command, port, DYN_RL_PORT=str(free_port()), **variables)
        return self.frontends[name]

    def wait(self) -> None:
        """Return when every frontend sees every worker."""
        deadline = time.monotonic() + SECONDS
        while not all(self._seen_by(frontend) for frontend in self.frontends.values()):
            for one in (*self.workers, *self.frontends.values()):
                if one.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Dynamo did not start: {one.log}\n{one.log.read_text(errors='replace')[-3000:]}"
                    )
            time.sleep(0.3)

    def sampled(self) -> float:
        """How many tokens all workers have sampled since they started."""
        return sum(worker.sampled() for worker in self.workers)

    def stop(self) -> None:
        for process in (*self.frontends.values(), *self.workers):
            process.kill()
        shutil.rmtree(self.state, ignore_errors=True)

    def _start(self, name: str, command: list[str], port: int, **variables: str) -> Process:
        shared = {
            "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(self.state / "kv"), "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{environment.ROOT / 'src'}{os.pathsep}{environment.ROOT}",
        }  # fmt: skip
        (self.state / "kv").mkdir(parents=True, exist_ok=True)
        log = self.state / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [environment.python(), *command],
                env={**os.environ, **shared, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Process(process, f"http://127.0.0.1:{port}", log)

    def _seen_by(self, frontend: Process) -> bool:
        try:
            status, health = call(f"{frontend.url}/health")
            served = call(f"{frontend.url}/v1/models")[1].get("data")
        except OSError:
            return False
        instances = [one for one in health.get("instances", []) if one["endpoint"] == "generate"]
        return status == 200 and bool(served) and len(instances) == len(self.workers)


def call(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Ask past our engine, as another client would: the status and the parsed answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def free_port() -> int:
    """A free port below 32768: Dynamo keeps the port of a worker's system server in 16 bits with a sign."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port below 32768 is free")
