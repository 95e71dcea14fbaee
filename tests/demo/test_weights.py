"""The output depends on the whole history through the recurrent state, and does so without chaos."""

from __future__ import annotations

import time

import pytest
import torch

from .runner import linear_layers, text_tokens, with_states

CASES = 8
LENGTHS = (70, 300, 640, 1500)


def log_probs(logits):
    return logits.log_softmax(-1)


def change_of(runner, tokens, past, changed) -> float:
    """Return the largest change of a plausible token's log probability after `tokens`."""
    before = log_probs(runner.forward(tokens, past)[0])
    after = log_probs(runner.forward(tokens, changed)[0])
    plausible = before > -10
    return float((before - after).abs()[plausible].max())


@pytest.mark.parametrize("kind", ["zeros", "of another prompt"])
def test_a_wrong_state_changes_the_continuation(runner, kind):
    differing = 0
    for case in range(CASES):
        length = LENGTHS[case % len(LENGTHS)]
        _, past = runner.forward(text_tokens(case, length))
        _, other = runner.forward(text_tokens(1000 + case, length))
        foreign = [layer.recurrent_states[0] for layer in linear_layers(other)]
        wrong = with_states(past, lambda state, i: state * 0 if kind == "zeros" else foreign[i])  # noqa: B023
        next_token = text_tokens(2000 + case, 1)
        assert change_of(runner, next_token, past, wrong) > 0.1
        differing += runner.greedy(next_token, 24, past)[0] != runner.greedy(next_token, 24, wrong)[0]
    assert differing >= CASES - 1


@pytest.mark.parametrize("layer", range(6))
def test_every_linear_layer_counts(runner, layer):
    _, past = runner.forward(text_tokens(7, 500))
    wrong = with_states(past, lambda state, i: state * 0 if i == layer else state)
    assert change_of(runner, text_tokens(8, 1), past, wrong) > 0.05


def test_keys_and_values_count(runner):
    _, past = runner.forward(text_tokens(7, 500))
    _, other = runner.forward(text_tokens(9, 500))
    mixed = with_states(other, lambda _, i: linear_layers(past)[i].recurrent_states[0])
    for ours, theirs in zip(linear_layers(mixed), linear_layers(past), strict=True):
        ours.conv_states[0] = theirs.conv_states[0].clone()
    assert change_of(runner, text_tokens(8, 1), past, mixed) > 0.05


@pytest.mark.parametrize("case", range(3))
def test_an_early_token_still_shows_in_the_state_after_2000(runner, case):
    tokens = text_tokens(20 + case, 2000)
    altered = tokens.clone()
    altered[10] = ord("x")
    _, past = runner.forward(tokens)
    _, past_altered = runner.forward(altered)
    only_state = with_states(past, lambda _, i: linear_layers(past_altered)[i].recurrent_states[0])
    assert change_of(runner, text_tokens(8, 1), past, only_state) > 1e-2


def test_same_input_gives_the_same_bits(runner):
    tokens = text_tokens(1, 700)
    assert torch.equal(runner.forward(tokens, keep=700)[0], runner.forward(tokens, keep=700)[0])
    assert runner.greedy(tokens, 16) == runner.greedy(tokens, 16)


def test_in_pieces_equals_in_one_piece(runner):
    tokens = text_tokens(3, 4500)
    whole, _ = runner.forward(tokens, keep=len(tokens))
    pieces, past, start = [], None, 0
    for end in (2000, 2064, 3001, 4480, *range(4481, 4501)):
        logits, past = runner.forward(tokens[start:end], past, keep=end - start)
        pieces.append(logits)
        start = end
    assert whole.isfinite().all()
    # The unlikely tokens' logits are near -30, where float32 itself is coarser.
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-5)


def test_a_tiny_disturbance_stays_tiny(runner):
    tokens = text_tokens(4, 4600)
    head, tail = tokens[:500], tokens[500:]
    _, past = runner.forward(head)
    generator = torch.Generator().manual_seed(0)
    disturbed = with_states(past, lambda s, _: s + 1e-6 * torch.randn(s.shape, generator=generator))
    before = log_probs(runner.forward(tail, past, keep=len(tail))[0])
    after = log_probs(runner.forward(tail, disturbed, keep=len(tail))[0])
    change = (before - after).abs().amax(-1)
    assert change.max() < 1e-3
    assert change[-500:].mean() < 2 * change[:500].mean() + 1e-4  # does not build up


def test_text_is_varied_printable_and_decided(runner):
    for case in range(3):
        tokens, leads = runner.greedy(text_tokens(30 + case, 400), 150)
        assert len(set(tokens)) > 15
        assert len({tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)}) > 75
        assert sum(t == 10 or 32 <= t < 127 for t in tokens) >= 0.97 * len(tokens)
        assert sorted(leads)[len(leads) // 2] > 0.1


def test_turns_end_rarely_but_do(runner):
    """Sampled at temperature 1, a turn ends about once in some hundreds to some thousands of tokens."""
    tokens = text_tokens(5, 1500)
    logits, _ = runner.forward(tokens, keep=len(tokens))
    ends = logits.softmax(-1)[:, 258].mean()
    assert 1e-4 < ends < 1e-2


def test_prefill_is_quick(runner):
    """The aim is 8,000 tokens/s on two idle cores; this bound only catches a wrong order of magnitude."""
    tokens = text_tokens(6, 2048)
    start = time.perf_counter()
    runner.forward(tokens)
    assert len(tokens) / (time.perf_counter() - start) > 500
