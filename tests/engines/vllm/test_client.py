"""What the vLLM client does when vLLM does not do as it is told, and what it tells whom: by a vLLM that plays a script.

Real engines are in the contract; here are moments that they cannot be brought to.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router_replay.engines import Completion, Request, Sampling
from router_replay.engines.types import InFlight
from router_replay.engines.vllm.client import Transport, VllmClient
from router_replay.errors import EngineError
from tests.engines.vllm.script import PROMPT, Script


async def submitted(client: VllmClient, script: Script, running: int = 1) -> asyncio.Task[list[Completion]]:
    task = asyncio.create_task(client.submit(Request(PROMPT, Sampling(2))))
    while len(script.running) < running:
        await asyncio.sleep(0.001)
    return task


def fails() -> dict[str, Any]:
    raise RuntimeError("out of memory")


def test_a_load_that_fails_ends_what_was_kept_and_all_that_follows(client: VllmClient, script: Script) -> None:
    async def work() -> None:
        kept = await submitted(client, script)
        script.load = fails
        with pytest.raises(
            EngineError,
            match=r"it is unknown which weights vLLM has: out of memory\. Restart vLLM, then create a new engine",
        ):
            await asyncio.to_thread(client.update_weights, "folder", 1, "keep")
        with pytest.raises(EngineError, match="Restart vLLM, then create a new engine"):
            await kept
        script.load = Script().load
        with pytest.raises(EngineError, match="Restart vLLM, then create a new engine"):
            await asyncio.to_thread(client.update_weights, "folder", 2)
        with pytest.raises(EngineError, match="Restart vLLM, then create a new engine"):
            await client.submit(Request(PROMPT))
        assert (client.version, script.paused) == (0, False)

    asyncio.run(work())


def test_a_cache_that_is_not_reset_ends_the_engine_too(client: VllmClient, script: Script) -> None:
    script.resets = False
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        client.update_weights("folder", 1)
    assert not script.paused


def test_weights_that_vanish_before_they_are_loaded_change_nothing(client: VllmClient, script: Script) -> None:
    async def work() -> None:
        kept = await submitted(client, script)
        script.load = lambda: {"reason": "no .safetensors file in folder"}
        with pytest.raises(EngineError, match=r"no \.safetensors file"):
            await asyncio.to_thread(client.update_weights, "folder", 1, "keep")
        assert (client.version, script.paused) == (0, False)
        script.finish()
        assert [set(one.versions) for one in await kept] == [{0}]

    asyncio.run(work())


def test_the_progress_of_a_request_comes_from_the_rank_that_computes_it(client: VllmClient, script: Script) -> None:
    async def work() -> None:
        kept = await submitted(client, script)
        [name] = script.running
        script.other_ranks = [{"reason": "", "progress": {name: 3}}, {"reason": "", "progress": {}}]
        await asyncio.to_thread(client.update_weights, "folder", 1, "keep")
        script.finish()
        [completion] = await kept
        assert completion.routes.versions.tolist() == [0, 0, 0, 1]
        assert completion.versions.tolist() == [0, 1]

    asyncio.run(work())


def test_weights_that_one_rank_alone_refuses_end_the_engine(client: VllmClient, script: Script) -> None:
    script.other_ranks = [{"reason": "no .safetensors file in folder"}]
    with pytest.raises(EngineError, match=r"others refused it: no \.safetensors file in folder\. Restart vLLM"):
        client.update_weights("folder", 1)


def test_every_update_has_a_salt_of_its_own_whatever_its_version(client: VllmClient, script: Script) -> None:
    """With requests kept, vLLM resets no cache; a version that is used again must not find the old one's KV."""

    async def work() -> None:
        for _ in range(2):
            task = await submitted(client, script)
            script.finish()
            await task
            await asyncio.to_thread(client.update_weights, "folder", 0)

    asyncio.run(work())
    assert len(set(script.salts)) == 2


def test_a_request_that_waits_for_an_update_can_be_aborted(client: VllmClient, script: Script) -> None:
    async def work() -> None:
        update = asyncio.create_task(asyncio.to_thread(client.update_weights, "folder", 1))
        while client._open:
            await asyncio.sleep(0.001)
        waits = asyncio.create_task(client.submit(Request(PROMPT, id="waits")))
        await asyncio.sleep(0.01)
        [aborted] = await asyncio.to_thread(client.abort, ["waits"])
        assert not update.done()
        assert (aborted.finish_reason, len(aborted.token_ids), await waits) == ("abort", 0, [aborted])
        await update

    asyncio.run(work())
    assert script.salts == []


def test_tokens_without_rows_are_no_sample(client: VllmClient, script: Script) -> None:
    async def work() -> None:
        script.rows = False
        task = await submitted(client, script)
        script.finish()
        with pytest.raises(EngineError, match="2 tokens without their experts"):
            await task

    asyncio.run(work())


def test_an_abort_that_is_not_heard_is_an_error(
    client: VllmClient, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router_replay.engines.remote.ABORT_ROUNDS", 3)

    async def work() -> None:
        script.deaf = True
        task = await submitted(client, script)
        with pytest.raises(EngineError, match=r"asked 3 times to abort .*, and these requests still run"):
            await asyncio.to_thread(client.abort)
        script.finish()
        await task

    asyncio.run(work())


def test_what_vllm_raises_is_an_engine_error(client: VllmClient, script: Script) -> None:
    async def dead(mode: InFlight) -> None:
        raise ConnectionError("engine core is dead")

    script.pause = dead  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="vLLM failed: ConnectionError: engine core is dead"):
        client.pause()


def test_an_answer_that_comes_while_it_closes_is_still_an_answer(script: Script) -> None:
    async def start() -> Transport:
        return script

    async def work() -> None:
        client = VllmClient(start)
        task = await submitted(client, script)
        await asyncio.to_thread(client.close)
        try:
            [completion] = await task
            assert completion.finish_reason == "length"
        except EngineError as error:
            assert "closed" in str(error)  # noqa: PT017  either is right: which comes first is a race

    asyncio.run(work())
