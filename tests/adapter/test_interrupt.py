"""Ctrl-C: handed on as SIGTERM once, then obeyed at once; spawned processes leave it to their parent."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from typing import Any

import sglang.launch_server

from sglang_histate.adapter import interrupt, serve

SERVER = """
import asyncio, os, signal, sys
import uvicorn
from fastapi import FastAPI
from sglang.srt.utils import kill_process_tree  # as in a server, where it is long imported
from sglang_histate.adapter.interrupt import end_gracefully_while_serving

app = FastAPI()
app.is_single_tokenizer_mode = sys.argv[1] == "one"
end_gracefully_while_serving(app)

async def main():
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    # SGLang's handler, which begins a long drain.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: print("term", flush=True))
    print("up", flush=True)
    await serving
    print("left", flush=True)

asyncio.run(main())
"""


def start(mode: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_the_first_drains_and_the_second_ends() -> None:
    process = start("one")
    try:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stdout.readline() == "term\n"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == interrupt.INTERRUPTED == 130
    assert out == "" and "Ctrl-C again ends at once" in err


def test_several_http_workers_keep_their_own_way() -> None:
    process = start("several")
    try:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "term" not in out and "HiState" not in err


def _disposition(pipe: Any) -> None:
    interrupt.leave_it_to_the_parent()
    pipe.send(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)


def test_a_spawned_process_ignores_it_and_its_parent_does_not() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_disposition, args=(there,))
    process.start()
    assert here.poll(120) and here.recv() is True
    process.join(60)
    before = signal.getsignal(signal.SIGINT)
    interrupt.leave_it_to_the_parent()
    assert signal.getsignal(signal.SIGINT) is before is not signal.SIG_IGN


def test_while_the_model_is_loaded_it_ends_without_a_traceback(monkeypatch) -> None:
    def interrupted(server_args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sglang.launch_server, "run_server", interrupted)
    killed: list[bool] = []
    monkeypatch.setattr(serve, "kill_process_tree", lambda pid, include_parent: killed.append(include_parent))
    assert serve._run(None) == interrupt.INTERRUPTED
    assert killed == [False], "the schedulers that have started are ended too"
