"""How long things take and how large they are: Qwen3.5-9B on one H100 with PCIe 5 and one NVMe drive.

Bytes follow from the model's shape: 8 full-attention layers with 4 KV heads of 256 (bf16), 24 gated-delta-rule
layers with 32 value heads of 128 x 128 (float32) and a convolution window of 3 x 8,192 (bf16). Times are the
smallest model that the published measurements allow; each constant names its source.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_TOKENS = 64
"""Tokens of a page: the grain of matching, of KV and of checkpoint positions, in every system."""


@dataclass(frozen=True)
class Costs:
    """Times in seconds, rates per second.

    Raises:
        ValueError: a size or rate that is not positive.
    """

    kv_token_bytes: int = 8 * 2 * 4 * 256 * 2
    state_bytes: int = 24 * 32 * 128 * 128 * 4 + 24 * 8192 * 3 * 2
    ssd_state_share: float = 1.0
    """Bytes of a checkpoint on the SSD and on its way there, over `state_bytes`: 0.511 as bf16, 0.275 as int8."""
    linear_flop: float = 13.96e9
    """Per token: 2 x 6.92e9 weights in matrix products, and 0.13e9 for the recurrence (estimated)."""
    pair_flop: float = 4.0 * 4096 * 8
    """Per pair of a token and one before it: scores and values of 16 heads of 256 in 8 layers."""
    peak_flop_s: float = 989e12
    """H100 SXM, dense bf16, data sheet."""
    efficiency: float = 0.55
    """GPUStack performance lab, Qwen3.5-9B on H100: 32,000 tokens in 0.98 to 1.02 s (median TTFT)."""
    least_prefill_s: float = 0.030
    """A step that computes a prompt takes this long at least: median TTFT 34 ms at 340 tokens, same source."""
    step_s: float = 6.5e-3
    """A step that only decodes: 15.9 GB of weights over 3.35 TB/s is 4.7 ms, measured 7.3 ms with one request."""
    step_request_s: float = 0.03e-3
    """For each request that decodes: its state is read and written, 103 MB at HBM speed (derived)."""
    step_token_s: float = 12e-9
    """For each token of context of those: 32 KiB at 80 % of HBM speed (derived)."""
    pcie_bytes_s: float = 55e9
    """Each way: 64 GB/s nominal, 50 to 55 in practice (assumed, no measurement found)."""
    ssd_read_bytes_s: float = 5e9
    """The paper's figure."""
    ssd_write_bytes_s: float = 5e9
    """As fast as reads (assumed): data-centre drives of this class write 4 to 7 GB/s while they are not full."""
    ssd_latency_s: float = 0.1e-3
    """Of one read: flash and the file system's way, typical for NVMe."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} {value} must be above 0")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of KV."""
        return self.kv_token_bytes * PAGE_TOKENS

    @property
    def ssd_state_bytes(self) -> int:
        """Bytes of a checkpoint on the SSD and on its way there."""
        return max(round(self.state_bytes * self.ssd_state_share), 1)

    @property
    def state_tokens(self) -> float:
        """N_s: a checkpoint in tokens of KV, where it costs room: on the SSD."""
        return self.ssd_state_bytes / self.kv_token_bytes

    def prefill_flop(self, tokens: int, before: int) -> float:
        """Floating-point operations to compute `tokens` that follow `before` others."""
        return tokens * self.linear_flop + self.pair_flop * (tokens * before + tokens * tokens / 2)

    def prefill_s(self, tokens: int, before: int = 0) -> float:
        """Seconds to compute `tokens` after `before` others on an idle GPU, 0 for none."""
        return self.step_time_s(self.prefill_flop(tokens, before), 0, 0) if tokens else 0.0

    def step_time_s(self, prefill_flop: float, decoding: int, context_tokens: int) -> float:
        """Seconds of one step that computes prompts and one token for each of `decoding` requests.

        A step reads the weights once, so decoding beside a prompt costs only what each request adds.
        """
        if prefill_flop:
            base = max(self.least_prefill_s, prefill_flop / (self.efficiency * self.peak_flop_s))
        else:
            base = self.step_s
        return base + self.step_request_s * decoding + self.step_token_s * context_tokens


def access_ratio(context_tokens: int, interval_tokens: int) -> float:
    """Bytes of checkpoints that one hit reads over those stored for the context: the paper's I / L."""
    return interval_tokens / context_tokens
