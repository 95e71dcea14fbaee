from __future__ import annotations

import pytest
from fake_answers import Script, fake_server

from eval.internal_hits.client import AskFailed, Cached, ask, cached_of


def test_times_the_first_token_and_reads_tokens_and_tiers() -> None:
    script = Script([7, 8, 9], cached=128, details={"device": 64, "host": 64, "ssd_checkpoint": 128})
    script.delay_s = 0.15
    with fake_server(script) as port:
        answer = ask(port, [1, 2, 3, 4], 3)
    assert answer.output_ids == (7, 8, 9)
    assert answer.prompt_tokens == 4
    assert answer.cached == Cached(total=128, device=64, host=64, ssd_checkpoint=128)
    assert 0.15 <= answer.ttft_s < answer.total_s
    (body,) = script.bodies
    assert body["input_ids"] == [1, 2, 3, 4] and body["stream"] is True
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": 503}, "status 503: no"),
        ({"stop_after": 2}, "ended early"),
        ({"error": "out of memory"}, "out of memory"),
        ({"output": [7, 8]}, "2 output tokens came back instead of 3"),
        ({"cached": None}, "does not report cached tokens"),
    ],
)
def test_an_incomplete_answer_is_an_error(change: dict[str, object], message: str) -> None:
    script = Script([7, 8, 9])
    for name, value in change.items():
        setattr(script, name, value)
    with fake_server(script) as port, pytest.raises(AskFailed, match=message):
        ask(port, [1, 2], 3)


def test_no_details_means_device() -> None:
    assert cached_of({"cached_tokens": 64, "cached_tokens_details": None}) == Cached(total=64, device=64)
    assert cached_of({"cached_tokens": 0}) == Cached()


def test_storage_counts_and_parts_must_add_up() -> None:
    details = {"device": 64, "host": 0, "storage": 64, "storage_backend": "HiCacheFile"}
    assert cached_of({"cached_tokens": 128, "cached_tokens_details": details}).storage == 64
    with pytest.raises(AskFailed, match="do not add up to 192"):
        cached_of({"cached_tokens": 192, "cached_tokens_details": details})
