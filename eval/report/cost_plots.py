"""The two plots that follow from sizes and speeds alone: how little of the states a hit reads, and what reading costs."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.report import style
from eval.simulate.costs import Costs, access_ratio

CONTEXT = 32 * 1024
INTERVALS = tuple(256 << power for power in range(8))
CONTEXTS = tuple(1024 << power for power in range(8))
# No colours of systems: green and purple that are told apart with any colour vision.
_KV, _STATE, _COMPUTE = "#1b7837", "#762a83", "#000000"
_SHOWN = (1024, 4096)


def access(costs: Costs) -> Figure:
    """Left: bytes that one hit reads over bytes stored, against the interval, 32K of context. Right: bytes stored."""
    made, axes = style.figure(10, 4.2, columns=2)
    left, right = axes[0]
    left.plot(
        INTERVALS, [100 * access_ratio(CONTEXT, one) for one in INTERVALS], "o-", color=_STATE, label="states"
    )
    right.plot(INTERVALS, [states_gb(costs, one) for one in INTERVALS], "o-", color=_STATE, label="states")
    kv = costs.kv_token_bytes * CONTEXT / 1e9
    left.axhline(100, color=_KV, label="KV")
    right.axhline(kv, color=_KV, label="KV")
    right.annotate(
        f"{kv:.2f} GB", (INTERVALS[-2], kv), (0, 4), textcoords="offset points", fontsize=8, color=_KV
    )
    for interval in _SHOWN:
        ratio, size = 100 * access_ratio(CONTEXT, interval), states_gb(costs, interval)
        left.annotate(f"{ratio:.1f} %", (interval, ratio), (7, -9), textcoords="offset points", fontsize=8)
        right.annotate(f"{size:.2f} GB", (interval, size), (7, 3), textcoords="offset points", fontsize=8)
    style.finish(left, "Share of its bytes that one hit reads", "interval, tokens", "access ratio, %")
    style.finish(right, f"Bytes of {style.tokens(CONTEXT)} tokens of context", "interval, tokens", "GB")
    for each in (left, right):
        _token_axis(each, INTERVALS)
        style.plain_log(each, "y")
    return made


def reading(costs: Costs) -> Figure:
    """Time to have a prefix again, against its length: read from SSD, read over PCIe, or computed."""
    made, axes = style.figure(8, 5)
    each = axes[0, 0]
    each.plot(CONTEXTS, [costs.prefill_s(n) for n in CONTEXTS], color=_COMPUTE, label="compute all of it")
    for link, dash in (("SSD", "-"), ("PCIe", "--")):
        times = [read_s(costs, link, costs.kv_token_bytes * n) for n in CONTEXTS]
        each.plot(CONTEXTS, times, color=_KV, linestyle=dash, label=f"KV over {link}")
        state = [read_s(costs, link, costs.state_bytes)] * len(CONTEXTS)
        each.plot(CONTEXTS, state, color=_STATE, linestyle=dash, label=f"one state over {link}")
    _token_axis(each, CONTEXTS)
    style.plain_log(each, "y")
    speeds = f"SSD {costs.ssd_read_bytes_s / 1e9:g} GB/s, PCIe {costs.pcie_bytes_s / 1e9:g} GB/s"
    style.finish(each, f"Read or compute ({speeds})", "context, tokens", "s")
    return made


def states_gb(costs: Costs, interval: int) -> float:
    """Gigabytes of the states of `CONTEXT` tokens, one every `interval`."""
    return costs.state_bytes * CONTEXT / interval / 1e9


def read_s(costs: Costs, link: str, size_bytes: int) -> float:
    """Seconds for `size_bytes` over an idle link, "SSD" or "PCIe"."""
    if link == "SSD":
        return costs.ssd_latency_s + size_bytes / costs.ssd_read_bytes_s
    return size_bytes / costs.pcie_bytes_s


def _token_axis(axes: Axes, ticks: tuple[int, ...]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [style.tokens(tick) for tick in ticks])
    axes.minorticks_off()
