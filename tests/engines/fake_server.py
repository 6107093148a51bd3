"""One server that speaks as vLLM, SGLang and Dynamo do, whose requests end when a test lets them.

A token is 10 + the version of the weights that sampled it, so a completion whose versions are wrong shows it. A request
that is kept while weights change has sampled one more token under the old ones.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from router_replay import wire
from router_replay.engines import DynamoEngine, Engine, SglangEngine, VllmHttpEngine
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.engines.dynamo import server as dynamo_server
from tests.engines.stub import Reply, Stub, serving
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=4, layers=(0, 1), num_layers=2)
FIRST_TOKEN = 10
CONFIG = {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
}
HOSTILE: dict[str, Callable[[], Reply]] = {
    "an error": lambda: Reply({"error": "out of memory"}, 500),
    "no JSON": lambda: Reply(b"<html>"),
    "another object": lambda: Reply({"choices": [], "meta_info": {}}),
    "half an answer": lambda: Reply({"choices": []}, sent=3),
}


@dataclasses.dataclass
class Job:
    prompt: int
    wanted: int
    versions: list[int]  # of the tokens so far
    start: int
    ended: bool = False
    aborted: bool = False


class FakeServer:
    """The state behind the stub: jobs, a pause, a version of the weights."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.url = stub, stub.url
        self.jobs: dict[str, Job] = {}
        self.version, self.name = 0, "default"
        self.paused = self.freely = False
        self.spoil: Callable[[], Reply] | None = None  # of the next generation
        self.refuses_weights = False
        self.silent = False  # aborted requests are not answered
        self._changed = threading.Condition()
        ok = Reply({"status": "ok"})
        stub.answers |= {
            "/version": Reply({"version": "0.30.0"}),
            "/inference/v1/generate": self._vllm,
            "/collective_rpc": self._workers,
            "/get_world_size": Reply({"world_size": 1}),
            "/abort_requests": lambda body: self._abort(body["request_ids"]),
            "/pause": lambda _: self._pause(True),
            "/resume": lambda _: self._pause(False),
            "/reset_prefix_cache": Reply({"success": True}),
            "/server_info": Reply({"version": "0.5.23", "enable_return_routed_experts": True}),
            "/model_info": Reply({"model_path": "/not/here", "weight_version": "default"}),
            "/generate": self._sglang,
            "/abort_request": lambda body: self._abort([body["rid"]]),
            "/pause_generation": lambda _: self._pause(True),
            "/continue_generation": lambda _: self._pause(False),
            "/update_weights_from_disk": self._sglang_load,
            "/flush_cache": ok,
            "/v1/models": Reply({"data": [{"id": "moe"}]}),
            "/v1/completions": self._dynamo,
            "/engine/abort_request": lambda body: self._abort([body["request_id"]]),
            "/engine/pause_generation": lambda _: self._pause(True),
            "/engine/resume_generation": lambda _: self._pause(False),
            "/engine/update_weights_from_disk": self._dynamo_load,
        }

    # -- what a test does -----------------------------------------------------------------------

    def finish(self) -> None:
        """Let all that run end, as soon as the server is not paused."""
        with self._changed:
            for job in self.jobs.values():
                job.ended = True
            self._changed.notify_all()

    def answer_aborted(self) -> None:
        """Answer the requests that were aborted, and those that will be."""
        with self._changed:
            self.silent = False
            self._changed.notify_all()

    def run_freely(self) -> None:
        """From now on requests end by themselves."""
        self.freely = True
        self.finish()

    # -- what a server does ---------------------------------------------------------------------

    def _job(self, name: str, prompt: int, wanted: int, start: int) -> Job:
        with self._changed:
            job = self.jobs[name] = Job(prompt, wanted, [self.version], start, ended=self.freely)
            self._changed.wait_for(lambda: self._through(job), timeout=300)
            if not job.aborted:
                job.versions += [self.version] * (wanted - len(job.versions))
            del self.jobs[name]
            return job

    def _through(self, job: Job) -> bool:
        # As the real ones: SGLang ends nothing while it is held, and a client that has gone is noticed late.
        aborted = job.aborted and not self.silent
        return aborted or (job.ended and not self.paused) or self.stub.released.is_set()

    def _abort(self, names: list[str]) -> Reply:
        with self._changed:
            for name in names:
                job = self.jobs.get(name.removeprefix("generate-tokens-"))
                if job is not None:
                    job.aborted = True
            self._changed.notify_all()
        return Reply({"status": "ok"})

    def _pause(self, paused: bool) -> Reply:
        with self._changed:
            self.paused = paused
            self._changed.notify_all()
        return Reply({"status": "ok"})

    def _load(self, path: str, name: str) -> dict[str, int]:
        with self._changed:
            for job in self.jobs.values():
                if len(job.versions) < job.wanted:
                    job.versions.append(self.version)
            self.version, self.name = int(path.rpartition("/")[2]), name
            return {f"generate-tokens-{name}": job.prompt - 1 + len(job.versions) for name, job in self.jobs.items()}

    def _spoilt(self) -> Reply | None:
        spoil, self.spoil = self.spoil, None
        return spoil() if spoil else None

    # -- vLLM -----------------------------------------------------------------------------------

    def _vllm(self, body: Any) -> Reply:
        if not body:  # the client asks whether the route is there
            return Reply({"error": "no body"}, 400)
        if "model" in body:  # a client of Dynamo, whose frontend is one without this route
            return dynamo_server.NO_ROUTE
        spoilt = self._spoilt()
        if spoilt is not None:
            return spoilt
        given = body["sampling_params"]
        start = given["routed_experts_prompt_start"]
        job = self._job(body["request_id"], len(body["token_ids"]), given["max_tokens"], start)
        choice = {
            "index": 0,
            "token_ids": tokens_of(job),
            "finish_reason": "abort" if job.aborted else "length",
            "logprobs": {"content": [{"logprob": -0.5}] * len(job.versions)},
            "routed_experts": wire.to_vllm(rows_of(job)),
        }
        return Reply({"choices": [{**choice, "index": index} for index in range(given["n"])]})

    def _workers(self, body: Any) -> Reply:
        if body["method"] == "router_replay_report":
            report = {
                "captures": True, "forced_routes": False, "reason": "", "logprobs_mode": "processed_logprobs",
                "config": json.dumps(CONFIG), "generation_config": "{}",
            }  # fmt: skip
            return Reply({"results": [report]})
        if self.refuses_weights:
            return Reply({"results": [{"reason": "no .safetensors file"}]})
        if body["method"] == "router_replay_find_weights":
            return Reply({"results": [{"reason": ""}]})
        progress = self._load(json.loads(body["kwargs"]["source"])["path"], "")
        return Reply({"results": [{"reason": "", "progress": progress}]})

    # -- SGLang ---------------------------------------------------------------------------------

    def _sglang(self, body: Any) -> Reply:
        spoilt = self._spoilt()
        if spoilt is not None:
            return spoilt
        started = self.version
        wanted = body["sampling_params"]["max_new_tokens"]
        job = self._job(body["rid"], len(body["input_ids"]), wanted, body["routed_experts_start_len"])
        names, ends = {started: body["extra_key"].removeprefix("router-replay-"), self.version: self.name}, []
        for place, version in enumerate(job.versions):
            if not ends or ends[-1]["version"] != names.get(version, str(version)):
                ends.append({"version": names.get(version, str(version)), "start": place, "end": place + 1})
            ends[-1]["end"] = place + 1
        information = {
            "finish_reason": {"type": "abort" if job.aborted else "length"},
            "prompt_tokens": job.prompt,
            "num_retractions": 0,
            "weight_versions": ends,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens_of(job)],
            "routed_experts": wire.to_sglang(rows_of(job)),
        }
        return Reply({"output_ids": tokens_of(job), "meta_info": information})

    def _sglang_load(self, body: Any) -> Reply:
        if self.refuses_weights:
            return Reply({"success": False, "message": "Failed to get model loader: nothing there"}, 400)
        self._load(body["model_path"], body["weight_version"])
        return Reply({"success": True, "message": ""})

    # -- Dynamo ---------------------------------------------------------------------------------

    def _dynamo(self, body: Any) -> Reply:
        if "routed_experts_prompt_start" in body["nvext"]:
            return dynamo_server.UNKNOWN_FIELD
        name = self.stub.request.headers.get("x-dynamo-request-id")
        if name is None:  # the client's first request, by which it sees what there is
            return dynamo_server.answer(1, routes=random_routes(4, SPEC))
        spoilt = self._spoilt()
        if spoilt is not None:
            return spoilt
        job = self._job(name, len(body["prompt"]), body["max_tokens"], 0)
        nvext = {"completion_token_ids": tokens_of(job), "routed_experts": wire.to_dynamo(rows_of(job))}
        logprobs = {"token_logprobs": [-0.5] * len(job.versions)}
        ended = "stop" if job.aborted else "length"  # Dynamo's word for an abort
        usage = {"prompt_tokens": job.prompt, "completion_tokens": len(job.versions)}
        choice = {"index": 0, "finish_reason": ended, "logprobs": logprobs}
        return Reply({"choices": [choice], "nvext": nvext, "usage": usage})

    def _dynamo_load(self, body: Any) -> Reply:
        if self.refuses_weights:
            return Reply({"status": "error"})
        self._load(body["model_path"], body["weight_version"])
        return Reply({"status": "ok"})


def tokens_of(job: Job) -> list[int]:
    return [FIRST_TOKEN + version for version in job.versions]


def rows_of(job: Job) -> Routes:
    return random_routes(job.prompt + len(job.versions) - 1 - job.start, SPEC)


CONNECT: dict[str, Callable[[str], Engine]] = {
    "vllm_http": lambda url: VllmHttpEngine(url, timeout=300),
    "sglang": lambda url: SglangEngine(url, SPEC, timeout=300),
    "dynamo": lambda url: DynamoEngine(url, SPEC, workers=[url], end_of_sequence=[0], timeout=300, gpu_workers=True),
}


@contextmanager
def fake_engine(kind: str) -> Iterator[tuple[FakeServer, Engine]]:
    """A fake server, and an engine of this kind that is connected to it."""
    with serving() as stub:
        server = FakeServer(stub)
        with CONNECT[kind](stub.url) as engine:
            yield server, engine
