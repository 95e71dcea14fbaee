"""The gated delta rule against a float64 recurrence, and bit-exact independence of how calls are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.cpu.gdn import (
    chunk_gated_delta_rule_cpu,
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
)

from .naive_ops import gated_delta_rule, gates

LENGTHS = st.sampled_from([0, 1, 2, 5, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300])
HEADS = st.sampled_from([(1, 1), (1, 2), (2, 4), (2, 2), (1, 3), (4, 4)])
DIMS = st.sampled_from([(32, 32), (64, 64), (16, 32), (48, 16)])
PROPERTY = settings(max_examples=25)


class Inputs:
    """Random projections for `tokens` tokens; the gates cover slow and fast decay."""

    def __init__(self, tokens: int, heads: tuple[int, int], dims: tuple[int, int], seed: int):
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng)

        self.q = normal(1, tokens, key_heads, key_dim)
        # A common direction makes keys correlated, the hard case for the triangular solve.
        self.k = normal(1, tokens, key_heads, key_dim) + 2 * normal(1, 1, key_heads, key_dim)
        self.v = normal(1, tokens, value_heads, value_dim)
        self.a, self.b = normal(tokens, value_heads), normal(tokens, value_heads)
        self.A_log, self.dt_bias = normal(value_heads) * 2, normal(value_heads)
        self.pool = normal(8, value_heads, value_dim, key_dim)

    def prefill(self, pool: torch.Tensor, pieces: list[tuple[int, int]], slots: list[int]):
        """One call over the token ranges `pieces`, laid end to end."""
        rows = torch.cat([torch.arange(lo, hi) for lo, hi in pieces])
        bounds = torch.tensor([0] + [hi - lo for lo, hi in pieces]).cumsum(0).to(torch.int32)
        g, beta = fused_gdn_gating_cpu(self.A_log, self.a[rows], self.b[rows], self.dt_bias)
        return chunk_gated_delta_rule_cpu(
            q=self.q[:, rows],
            k=self.k[:, rows],
            v=self.v[:, rows],
            g=g,
            beta=beta,
            initial_state=pool,
            cu_seqlens=bounds,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=torch.tensor(slots, dtype=torch.int32),
        )


def close(actual: torch.Tensor, expected: torch.Tensor, tol: float = 2e-4) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tol, atol=tol)


@PROPERTY
@given(st.lists(LENGTHS, min_size=1, max_size=4), HEADS, DIMS, st.integers(0, 1000))
def test_prefill_matches_the_recurrence(lengths, heads, dims, seed):
    x = Inputs(sum(lengths), heads, dims, seed)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    slots = [5, 2, 7, 0][: len(lengths)]
    pool = x.pool.clone()
    o, last, h = x.prefill(pool, pieces, slots)

    assert h.shape == (1, sum(-(-n // 64) for n in lengths), *x.pool.shape[1:])
    assert h.dtype == torch.float32
    g, beta = gates(x.A_log, x.a, x.b, x.dt_bias)
    row = 0
    for i, (lo, hi) in enumerate(pieces):
        want_o, want_last, want_h = gated_delta_rule(
            x.q[0, lo:hi], x.k[0, lo:hi], x.v[0, lo:hi], g[lo:hi], beta[lo:hi], x.pool[slots[i]]
        )
        close(o[0, lo:hi], want_o)
        close(last[i], want_last)
        assert torch.equal(pool[slots[i]], last[i])
        for state in want_h:
            close(h[0, row], state)
            row += 1
    untouched = [s for s in range(8) if s not in slots]
    assert torch.equal(pool[untouched], x.pool[untouched])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (48, 16)])
@pytest.mark.parametrize("heads", [(2, 4), (1, 1)])
def test_cutting_a_prompt_changes_no_bit(threads, dims, heads):
    x = Inputs(1000, heads, dims, seed=3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = x.pool.clone()
        o, _, h = x.prefill(whole, [(0, 1000)], [4])
        for step in (64, 256, 832):
            pool = x.pool.clone()
            parts = [x.prefill(pool, [(lo, min(lo + step, 1000))], [4]) for lo in range(0, 1000, step)]
            assert torch.equal(torch.cat([p[0] for p in parts], dim=1), o)
            assert torch.equal(torch.cat([p[2] for p in parts], dim=1), h)
            assert torch.equal(pool, whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_other_sequences_in_the_batch_change_no_bit(threads):
    x = Inputs(1000, (2, 4), (64, 64), seed=4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = x.pool.clone()
        o, _, h = x.prefill(alone, [(100, 517)], [1])
        batched = x.pool.clone()
        o2, _, h2 = x.prefill(batched, [(700, 1000), (100, 517), (0, 0), (0, 1), (517, 700)], [0, 1, 2, 3, 4])
        assert torch.equal(o2[:, 300:717], o)
        assert torch.equal(h2[:, 5:12], h)
        assert torch.equal(batched[1], alone[1])
        assert torch.equal(batched[2], x.pool[2])
    finally:
        torch.set_num_threads(before)


def test_state_before_a_chunk_ignores_what_follows():
    x = Inputs(200, (2, 4), (32, 32), seed=5)
    _, _, h = x.prefill(x.pool.clone(), [(0, 200)], [1])
    for length in (128, 129, 191):
        pool = x.pool.clone()
        _, last, h2 = x.prefill(pool, [(0, length)], [1])
        assert torch.equal(h2, h[:, : h2.shape[1]])
        if length == 128:
            assert torch.equal(last[0], h[0, 2])


def test_negative_slot_writes_nothing():
    x = Inputs(130, (2, 4), (32, 32), seed=6)
    pool = x.pool.clone()
    o, _, _ = x.prefill(pool, [(0, 65), (65, 130)], [-1, 3])
    assert torch.equal(pool[[0, 1, 2, 4, 5, 6, 7]], x.pool[[0, 1, 2, 4, 5, 6, 7]])
    assert torch.isfinite(o).all()


def test_bfloat16_activations_keep_an_fp32_state():
    x = Inputs(150, (2, 4), (32, 32), seed=7)
    expected = x.prefill(x.pool.clone(), [(0, 150)], [1])
    x.q, x.k, x.v = x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16()
    o, last, _ = x.prefill(x.pool.clone(), [(0, 150)], [1])
    assert o.dtype == torch.bfloat16 and last.dtype == torch.float32
    close(o, expected[0], tol=0.1)


def test_strong_decay_does_not_overflow():
    x = Inputs(128, (1, 1), (32, 32), seed=8)
    x.A_log = torch.tensor([6.0])  # exp(6) = 403 per token: any unmasked exponent is inf
    o, last, h = x.prefill(x.pool.clone(), [(0, 128)], [1])
    assert all(torch.isfinite(t).all() for t in (o, last, h))


@PROPERTY
@given(st.integers(1, 9), HEADS, DIMS, st.integers(0, 1000))
def test_decode_step_matches_the_recurrence(batch, heads, dims, seed):
    x = Inputs(batch, heads, dims, seed)
    slots = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:batch].tolist()
    slots += [-1] * (batch - len(slots))
    slots[0] = -1
    pool = x.pool.clone()
    o = fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        q=x.q,
        k=x.k,
        v=x.v,
        a=x.a,
        b=x.b,
        initial_state_source=pool,
        initial_state_indices=torch.tensor(slots, dtype=torch.int32),
        cu_seqlens=torch.arange(batch + 1, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
    )
    assert o.shape == x.v.shape
    g, beta = gates(x.A_log, x.a, x.b, x.dt_bias)
    for i, slot in enumerate(slots):
        if slot < 0:
            assert not o[0, i].any()
            continue
        one = slice(i, i + 1)
        want_o, want_state, _ = gated_delta_rule(
            x.q[0, one], x.k[0, one], x.v[0, one], g[one], beta[one], x.pool[slot]
        )
        close(o[0, one], want_o, tol=1e-5)
        close(pool[slot], want_state, tol=1e-5)
    untouched = [s for s in range(8) if s not in slots]
    assert torch.equal(pool[untouched], x.pool[untouched])


def test_gates_of_large_inputs():
    a = torch.tensor([[-200.0, -20.0, 0.0, 19.0, 21.0, 200.0]])
    g, beta = fused_gdn_gating_cpu(torch.zeros(6), a, a, torch.zeros(6))
    close(g[0], -torch.nn.functional.softplus(a.double()), tol=1e-6)
    close(beta[0], a.double().sigmoid(), tol=1e-6)
    assert g.dtype == beta.dtype == torch.float32
