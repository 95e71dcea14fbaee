"""Attention of new tokens over a cached prefix: against plain masked attention, and bit-exact however cut."""

from __future__ import annotations

import pytest
import torch

from sglang_histate.cpu.attention import extend_attention_cpu

SLOTS, KV_HEADS, DIM = 700, 2, 32


class Sequence:
    """`length` tokens whose keys and values lie in scattered slots of a shared cache; request index 1."""

    def __init__(self, length: int, heads: int):
        torch.manual_seed(length)
        self.k, self.v = torch.randn(2, SLOTS, KV_HEADS, DIM)
        self.q = torch.randn(length, heads, DIM)
        self.req_to_token = torch.zeros(3, length, dtype=torch.int32)
        self.req_to_token[1] = torch.randperm(SLOTS)[:length].to(torch.int32)

    def extend(self, prefix: int, end: int) -> torch.Tensor:
        out = torch.empty_like(self.q[prefix:end])
        return extend_attention_cpu(
            self.q[prefix:end],
            out,
            self.k,
            self.v,
            self.req_to_token,
            torch.tensor([1]),
            torch.tensor([end]),
            torch.tensor([prefix]),
            torch.tensor([end - prefix]),
            scaling=0.2,
        )

    def naive(self) -> torch.Tensor:
        group = self.q.shape[1] // KV_HEADS
        k, v = (c[self.req_to_token[1].long()].double().repeat_interleave(group, 1) for c in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * 0.2
        above = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(above, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(
    "prefix,end", [(0, 1), (0, 64), (0, 65), (64, 130), (128, 300), (299, 300), (37, 200)]
)
def test_matches_masked_attention(heads: int, prefix: int, end: int):
    seq = Sequence(300, heads)
    torch.testing.assert_close(
        seq.extend(prefix, end).double(), seq.naive()[prefix:end], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_cutting_a_prompt_changes_no_bit(threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seq = Sequence(600, 4)
        whole = seq.extend(0, 600)
        for step in (64, 100, 256):
            parts = [seq.extend(lo, min(lo + step, 600)) for lo in range(0, 600, step)]
            assert torch.equal(torch.cat(parts), whole)
    finally:
        torch.set_num_threads(before)


def test_batch_equals_single_calls():
    seq = Sequence(300, 4)
    req_to_token = seq.req_to_token.clone()
    req_to_token[2, :150] = req_to_token[1, 150:]
    q = torch.cat((seq.q[64:200], seq.q[:150]))
    out = extend_attention_cpu(
        q,
        torch.empty_like(q),
        seq.k,
        seq.v,
        req_to_token,
        torch.tensor([1, 2]),
        torch.tensor([200, 150]),
        torch.tensor([64, 0]),
        torch.tensor([136, 150]),
        scaling=0.2,
    )
    assert torch.equal(out[:136], seq.extend(64, 200))
    seq.req_to_token[1, :150] = req_to_token[2, :150]
    assert torch.equal(out[136:], seq.extend(0, 150))
