"""`router-replay watch`: reads as the run writes, answers on loopback only, waits, refuses, and ends with Ctrl-C."""

from __future__ import annotations

import http.client
import json
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from router_replay.cli import main
from router_replay.errors import MeasureError
from router_replay.report import Run
from router_replay.report.watch import Server, check_folder
from router_replay.run_files import MetricsTail
from tests.report.test_report import data_of


def append(folder: pathlib.Path, *steps: int, **values: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "reward": float(step), **values}) + "\n" for step in steps)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def server(folder: pathlib.Path) -> Iterator[Server]:
    with Server([Run("r3", folder)]) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def get(server: Server, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def news(server: Server, have: int) -> dict[str, Any]:
    """What the page gets; it asks again until the page may be made anew."""
    while True:
        found: dict[str, Any] = json.loads(get(server, f"/state?have={have}")[1])
        if found["have"] != have:
            return found


def test_the_tail_reads_each_line_once_and_leaves_a_torn_one(folder: pathlib.Path) -> None:
    tail = MetricsTail(folder)
    assert not tail.read()  # no file yet
    append(folder, 0, 1)
    assert tail.read()
    assert [line["step"] for line in tail.lines] == [0, 1]
    assert not tail.read()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
        file.flush()
        assert not tail.read()
        file.write('ard": 0.5}\n')
    assert tail.read()
    assert tail.lines[2] == {"step": 2, "reward": 0.5}


def test_the_tail_begins_again_after_a_resume(folder: pathlib.Path) -> None:
    append(folder, 0, 1, 2, 3)
    tail = MetricsTail(folder)
    tail.read()
    beside = folder / "metrics.jsonl.new"
    beside.write_text('{"step": 0, "reward": 9.0}\n')
    beside.replace(folder / "metrics.jsonl")
    assert tail.read()
    assert tail.lines == [{"step": 0, "reward": 9.0}]
    longer = [{"step": step, "reward": 7.0} for step in range(9)]  # its size alone does not tell
    beside.write_text("".join(json.dumps(line) + "\n" for line in longer))
    beside.replace(folder / "metrics.jsonl")
    assert tail.read()
    assert tail.lines == longer
    append(folder, 9)
    tail.read()
    assert [line["step"] for line in tail.lines] == list(range(10))


def test_the_tail_names_the_line_that_cannot_be_read(folder: pathlib.Path) -> None:
    append(folder, 0)
    tail = MetricsTail(folder)
    tail.read()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no json\n")
    with pytest.raises(MeasureError, match=r"metrics\.jsonl:2 is not JSON"):
        tail.read()


def test_the_page_waits_for_the_first_step_and_then_updates(server: Server, folder: pathlib.Path) -> None:
    status, page = get(server, "/")
    assert status == 200
    assert "waiting for its first step" in page
    assert data_of(page)["charts"] == []
    append(folder, 0, 1)
    first = news(server, 0)
    assert first["message"] == "Watching. r3: step 1."
    assert [chart["metric"] for chart in first["data"]["charts"]] == ["reward"]
    append(folder, 2)
    second = news(server, first["have"])
    assert second["data"]["charts"][0]["curves"][0]["m"] == [0.0, 1.0, 2.0]
    assert "<table>" in second["summary"]
    page = get(server, "/")[1]
    assert data_of(page)["have"] == second["have"]
    assert "connect-src 'self'" in page
    unchanged = json.loads(get(server, f"/state?have={second['have']}")[1])
    assert unchanged == {"have": second["have"], "message": "Watching. r3: step 2."}


def test_a_line_that_cannot_be_read_is_said_and_the_page_stays(server: Server, folder: pathlib.Path) -> None:
    append(folder, 0)
    have = news(server, 0)["have"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no json\n")
    assert "metrics.jsonl:2 is not JSON" in json.loads(get(server, f"/state?have={have}")[1])["message"]
    assert get(server, "/")[0] == 200


def test_only_the_page_is_served_and_only_under_its_own_name(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/", host="evil.example")[0] == 403
    assert get(server, "/", host=f"localhost:{server.server_port}")[0] == 200
    assert get(server, "/../../etc/passwd")[0] == 404
    assert get(server, "/state?have=x")[0] == 200


def test_a_wrong_folder_is_refused_with_what_to_do(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "nothing")]) == 1
    assert "start the run first" in capsys.readouterr().err
    for name in ("off", "r3"):
        (tmp_path / "demo" / name).mkdir(parents=True)
        append(tmp_path / "demo" / name, 0)
    with pytest.raises(MeasureError, match="it holds the runs off, r3: give their folders"):
        check_folder(tmp_path / "demo")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(MeasureError, match=r"is not the `output` folder of a training run: it has no metrics\.jsonl$"):
        check_folder(tmp_path / "other")
    (tmp_path / "other" / "run.lock").touch()
    check_folder(tmp_path / "other")  # a run that has just started
    assert main(["watch", str(tmp_path / "other"), "--port", "70000"]) == 1
    assert "--port must be between 0 and 65535, got 70000" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_with_status_0(folder: pathlib.Path) -> None:
    command = [sys.executable, "-m", "router_replay.cli", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert re.match(r"the page: http://127\.0\.0\.1:\d+/  Ctrl-C ends it", process.stdout.readline())
        assert f"waiting for {folder} to finish its first step" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
