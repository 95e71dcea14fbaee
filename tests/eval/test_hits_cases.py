from __future__ import annotations

import pytest

from eval.internal_hits.cases import CASES, LONG, Ask, Draw, Scale

SCALE = Scale(device_kv_tokens=32768, host_kv_tokens=98304, repeats=3, points=10)


def play(key: str, seed: str = "0", output: int = 5) -> list[Ask]:
    case = next(case for case in CASES if case.key == key)
    dialogue = case.dialogue(Draw(seed), SCALE)
    asks = [next(dialogue)]
    while True:
        try:
            asks.append(dialogue.send((output,) * asks[-1].output_tokens))
        except StopIteration:
            return asks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_what_a_request_shares_with_earlier_ones_is_what_it_says(case: object) -> None:
    key = case.key  # type: ignore[attr-defined]
    seen: list[list[int]] = []
    for request in play(key):
        if request.flush_before:
            seen.clear()
        longest = 0
        for earlier in seen:
            pairs = zip(request.prompt, earlier, strict=False)
            longest = max(longest, next((i for i, (a, b) in enumerate(pairs) if a != b), len(earlier)))
        if request.match is not None:
            # A random token may repeat the original one by chance, so the match may be a little longer.
            assert request.match <= longest + 1 and longest <= request.match + 3
        seen.append(request.prompt + [5] * (request.output_tokens - 1))


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert play("d", "x") == play("d", "x")
    assert play("d", "x") != play("d", "y")


def test_reusable_is_whole_pages_and_leaves_one_token() -> None:
    assert Ask("x", [1] * 5200, match=5000).reusable == 4992
    assert Ask("x", [1] * 128, match=128).reusable == 64
    assert Ask("x", [1] * 128).reusable == 0


def test_push_out_sends_more_than_the_device_holds() -> None:
    others = [request for request in play("e") if request.row == "others"]
    assert len(others) * LONG > SCALE.device_kv_tokens


def test_returning_late_sends_more_than_the_host_holds() -> None:
    others = [request for request in play("h") if request.row == "others"]
    assert len(others) * LONG > SCALE.host_kv_tokens


def test_repeats_have_seeds_of_their_own() -> None:
    seeds = {case.key: list(case.seeds(7, SCALE)) for case in CASES}
    assert [repeat for repeat, _ in seeds["b"]] == [0, 1, 2]
    assert len(seeds["d"]) == 1
    texts = [text for pairs in seeds.values() for _, text in pairs]
    assert len(set(texts)) == len(texts)
