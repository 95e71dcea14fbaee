"""A real server on the CPU engine against transformers' own torch code for the same weights, in float32.

One server start. For every prompt the logprobs of all prompt tokens (prefill) and of 64 greedy tokens
(decode) must equal those of one teacher-forced transformers forward over prompt + output.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_histate.demo import ensure_demo_model
from sglang_histate.upstream import build_overlay, overlay_env

pytestmark = pytest.mark.server

LENGTHS = [1, 63, 64, 65, 127, 128, 129, 300]
DECODE_STEPS = 64
TOLERANCE = 1e-3
START_TIMEOUT_S = 300

FLAGS = {
    "--dtype": "float32",
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--mamba-radix-cache-strategy": "extra_buffer",
    "--page-size": "64",
    "--max-total-tokens": "16384",
    "--max-mamba-cache-size": "64",
    "--max-running-requests": "8",
    "--host": "127.0.0.1",
}
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # bfloat16 otherwise, which would round every conv window
    # The ops of a small model are short: on a busy machine a second thread costs more than it brings.
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Answer:
    output_ids: list[int]
    prompt_logprobs: list[float]  # of prompt tokens 1.., each given the tokens before it
    output_logprobs: list[float]


@dataclass(frozen=True)
class Server:
    url: str

    def generate(self, prompts: list[list[int]]) -> list[Answer]:
        body = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": DECODE_STEPS, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            replies = json.load(response)
        return [
            Answer(
                output_ids=reply["output_ids"],
                prompt_logprobs=[row[0] for row in reply["meta_info"]["input_token_logprobs"][1:]],
                output_logprobs=[row[0] for row in reply["meta_info"]["output_token_logprobs"]],
            )
            for reply in replies
        ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = {**FLAGS, "--model-path": str(ensure_demo_model()), "--port": str(port)}
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *(part for pair in flags.items() for part in pair),
    ]
    env = {**overlay_env(build_overlay(("cpu",)), os.environ), **ENVIRONMENT}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        yield _wait_until_ready(Server(f"http://127.0.0.1:{port}"), process, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ensure_demo_model(), dtype=torch.float32).eval()


def prompt(length: int, vocab_size: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(vocab_size) for _ in range(length)]


def check(answer: Answer, ids: list[int], reference: torch.nn.Module) -> None:
    assert len(answer.output_ids) == DECODE_STEPS
    with torch.inference_mode():
        sequence = torch.tensor([ids + answer.output_ids])
        logprobs = reference(sequence, use_cache=False).logits[0].float().log_softmax(-1)
    wanted = logprobs[:-1].gather(-1, sequence[0, 1:, None]).squeeze(-1)
    given = torch.tensor(answer.prompt_logprobs + answer.output_logprobs)
    torch.testing.assert_close(given, wanted, rtol=0, atol=TOLERANCE)
    # Greedy: no other token may be better by more than the tolerance.
    best = logprobs[len(ids) - 1 : -1].max(-1).values
    assert (best - wanted[len(ids) - 1 :]).max() <= TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_one_prompt(length: int, server: Server, reference: torch.nn.Module):
    ids = prompt(length, reference.config.get_text_config().vocab_size)
    (answer,) = server.generate([ids])
    check(answer, ids, reference)


def test_batch_of_mixed_lengths(server: Server, reference: torch.nn.Module):
    vocab_size = reference.config.get_text_config().vocab_size
    prompts = [prompt(length + 1000, vocab_size)[:length] for length in (5, 64, 200, 1, 129, 63)]
    for ids, answer in zip(prompts, server.generate(prompts), strict=True):
        check(answer, ids, reference)


def _wait_until_ready(server: Server, process: subprocess.Popen, log: Path) -> Server:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    tail = log.read_text(errors="replace")[-3000:]
    pytest.fail(f"the server did not start within {START_TIMEOUT_S} s; the end of its log:\n{tail}")
