"""What is read from a server's answers, and which servers are refused. The server is a fake, the connection is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from eval.internal_hits.client import AskFailed, Cached
from eval.replay.client import Answer, Client, NoCacheReport
from eval.replay.probe import (
    Target,
    Unusable,
    check_lengths,
    check_recorded_answers,
    check_reports_cache,
    find,
)
from eval.replay.recorded_tokens import RecordedTokens
from eval.replay.requests import SessionRequests, Shape
from tests.eval.replay_fakes import Script, fake_server, request

SHAPE = Shape(tokens_per_block=4)


def asked(script: Script, *, sglang: bool = True, force: bool = False, times: int = 1) -> Answer:
    async def main() -> Answer:
        async with fake_server(script) as url, Client(url, "fake", sglang=sglang, force=force) as client:
            for _ in range(times):
                answer = await client.ask([1, 2, 3], [4, 5, 6])
            return answer

    return asyncio.run(main())


def probed(script: Script, check: Callable[[Client], Any], *, force: bool = False) -> None:
    async def main() -> None:
        async with fake_server(script) as url, Client(url, "fake", sglang=True, force=force) as client:
            await check(client)

    asyncio.run(main())


def test_times_are_those_of_the_first_and_the_last_token() -> None:
    answer = asked(Script(first_after_s=0.2, between_s=0.1))
    assert 0.2 <= answer.first_token_s - answer.sent_s < 2.0
    assert 0.1 <= answer.end_s - answer.first_token_s < 2.0  # the first may have come late
    assert answer.end_s - answer.sent_s >= 0.4
    assert (answer.prompt_tokens, answer.output_tokens, answer.output_ids) == (3, 3, (5, 5, 5))


def test_the_request_is_exact() -> None:
    script = Script()
    asked(script, force=True)
    body = script.bodies[0]
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (3, True, 0)
    assert body["custom_params"] == {"recorded": [4, 5, 6]}
    assert body["return_cached_tokens_details"]
    plain = Script(owner="vllm")
    asked(plain, sglang=False)
    assert not {"custom_params", "custom_logit_processor", "return_token_ids"} & set(plain.bodies[0])


def test_cached_tokens_come_by_tier_where_the_server_tells() -> None:
    details = {"device": 30, "host": 20, "storage": 14, "ssd_checkpoint": 64}
    answer = asked(Script(details=details, cached=lambda prompt, times: 64))
    assert (answer.cached, answer.by_tier) == (Cached(64, 30, 20, 14, 64), True)
    answer = asked(Script(), times=2)
    assert (answer.cached, answer.by_tier) == (Cached(64, 64), False)
    with pytest.raises(AskFailed, match="do not add up"):
        asked(Script(details={**details, "host": 1}, cached=lambda prompt, times: 64))


def test_a_wrong_answer_is_an_error() -> None:
    with pytest.raises(AskFailed, match="not the recorded one"):
        asked(Script(obeys=False), force=True)
    with pytest.raises(AskFailed, match="out of luck"):
        asked(Script(fails=lambda body: True))
    with pytest.raises(AskFailed, match="without"):
        asked(Script(ends_early=True))
    with pytest.raises(AskFailed, match="peer closed"):
        asked(Script(breaks_off=True, ends_early=True))
    with pytest.raises(NoCacheReport):
        asked(Script(cached=lambda prompt, times: None))

    async def nobody() -> None:
        async with Client("http://127.0.0.1:9/v1", "fake", sglang=True, force=False) as client:
            await client.ask([1], [2])

    with pytest.raises(AskFailed, match="onnect"):
        asyncio.run(nobody())


def test_a_server_is_known_by_its_models() -> None:
    async def main(script: Script, model: str | None = None) -> Target:
        async with fake_server(script) as url:
            found = await find(url, model)
            assert found.base_url == url
            return found

    found = asyncio.run(main(Script()))
    assert (found.model, found.sglang, found.context_tokens) == ("fake", True, 4096)
    found = asyncio.run(main(Script(owner="vllm", context=None), "fake"))
    assert (found.sglang, found.context_tokens) == (False, None)
    with pytest.raises(Unusable, match=r"--model other: .* serves fake"):
        asyncio.run(main(Script(), "other"))
    with pytest.raises(Unusable, match="ends in /v1"):
        asyncio.run(find("http://127.0.0.1:9/v1"))


def test_a_server_without_cache_report_is_refused_in_one_sentence() -> None:
    def check(client: Client) -> Any:
        return check_reports_cache(client, SHAPE, "1")

    with pytest.raises(
        Unusable, match=r"^the server does not report cached tokens .*--enable-cache-report"
    ) as caught:
        probed(Script(cached=lambda prompt, times: None), check)
    assert "\n" not in str(caught.value)
    # Left out where nothing was cached, told later: fine.
    probed(Script(cached=lambda prompt, times: 64 if times else None), check)


def test_a_server_that_never_hits_is_refused_unless_that_is_meant(monkeypatch) -> None:
    monkeypatch.setattr("eval.replay.probe._PAUSE_S", 0.01)
    never = Script(cached=lambda prompt, times: 0)
    with pytest.raises(Unusable, match="--no-cache"):
        probed(never, lambda client: check_reports_cache(client, SHAPE, "1"))
    probed(never, lambda client: check_reports_cache(client, SHAPE, "1", expects_hits=False))
    # A state may be published a moment later.
    probed(
        Script(cached=lambda prompt, times: 64 if times > 2 else 0),
        lambda client: check_reports_cache(client, SHAPE, "1"),
    )


def test_the_probe_sends_the_same_prompt_of_allowed_ids() -> None:
    script = Script()
    shape = Shape(tokens_per_block=4, vocabulary=10, first_id=500)
    probed(script, lambda client: check_reports_cache(client, shape, "1"))
    assert len(script.bodies) == 2
    assert script.bodies[0]["prompt"] == script.bodies[1]["prompt"]
    assert {token // 10 for token in script.bodies[0]["prompt"]} == {50}


def test_a_server_that_says_what_it_likes_is_refused() -> None:
    probed(Script(), lambda client: check_recorded_answers(client, SHAPE), force=True)
    probed(Script(obeys=False), lambda client: check_recorded_answers(client, SHAPE))
    with pytest.raises(Unusable, match=r"--enable-custom-logit-processor, or replay with --outputs free"):
        probed(Script(obeys=False), lambda client: check_recorded_answers(client, SHAPE), force=True)


def test_prompts_longer_than_the_context_are_refused_in_one_sentence() -> None:
    sessions = [SessionRequests("s", (request("s", 0), request("s", 1, prompt=range(100))))]
    assert check_lengths(sessions, 103, "context") == 103
    assert check_lengths(sessions, None, "context") == 103
    with pytest.raises(
        Unusable, match=r"103 tokens \(turn 1 of s\), the server's context 102: lower --context"
    ):
        check_lengths(sessions, 102, "context")


class _Kv:
    def __init__(self, committed: int) -> None:
        self.kv_committed_len = committed


class _Request:
    """As SGLang's scheduler keeps one."""

    def __init__(self, prompt: int, committed: int) -> None:
        self.origin_input_ids = [0] * prompt
        self.kv = _Kv(committed)


def test_the_processor_leaves_the_recorded_token_of_each_row_s_place() -> None:
    import torch

    logits = torch.arange(60.0).reshape(6, 10)
    committed = [
        20,
        21,
        23,
        24,
        8,
        22,
    ]  # prompt end, two steps, past the end, a chunk of the prompt, again a step
    params = [{"__req__": _Request(20, count), "recorded": [3, 1, 4, 1]} for count in committed]
    found = RecordedTokens()(logits.clone(), params)
    assert found.argmax(dim=-1).tolist() == [3, 1, 1, 9, 9, 4]
    assert torch.equal(found[3:5], logits[3:5])
