"""HiState's flags: names, units, defaults, the reason for each default, and their checks.

One frozen record, built from the command line. Nothing here imports sglang or torch, so the launcher can refuse a
bad value in milliseconds, before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Any, TypeVar

from sglang_histate.flag_help import FLAG_HELP
from sglang_histate.policy.interval import (
    DEFAULT_INTERVALS,
    STEP_TOKENS,
    IntervalPolicy,
    parse_interval,
    parse_intervals,
)
from sglang_histate.policy.score import DEFAULT_TAU, Eviction
from sglang_histate.sizes import format_size, parse_size


class ConfigError(ValueError):
    """A flag has a value that HiState cannot serve with. The message is one sentence that names the flag."""


class History(StrEnum):
    """Where checkpoints inside prompts go."""

    SSD = "ssd"
    CHEAPEST = "cheapest"  # to the SSD or the host, by price


class CheckpointDtype(StrEnum):
    """How the SSD holds a checkpoint's temporal states. Device and host always hold them as the model does."""

    NATIVE = "native"  # bit for bit
    BF16 = "bf16"
    INT8 = "int8"


# SGLang kills schedulers 15 s after it has told them to end; pools and sockets need some of that.
MOST_SHUTDOWN_S = 12.0


@dataclass(frozen=True)
class HiStateConfig:
    """Validated settings. Sizes are bytes per rank unless said otherwise; positions and gains are tokens."""

    ssd_dir: str
    # 1 GiB is 20 fp32 checkpoints of Qwen3.5-9B: enough to see the tier work, small enough to be safe unasked.
    ssd_size_bytes: int = 1 << 30
    # Not on file systems that are no local disk: a tier that nobody can trust is worse than none.
    allow_any_filesystem: bool = False
    # A restart is when a cache is missed most.
    keep_on_restart: bool = True
    # Seconds, a third of what SGLang gives its schedulers to end.
    shutdown_s: float = 5.0
    interval: IntervalPolicy = field(default_factory=lambda: IntervalPolicy(DEFAULT_INTERVALS))
    interval_text: str = "adaptive"
    # The set was not chosen by the user, so values that do not fit the page grid may be left out silently.
    intervals_are_default: bool = True
    # Bytes of the whole server, over all ranks; None is 'auto': twice the device pools, which is what SGLang's users get
    # unasked, so that switching HiState on changes what the host memory holds and not how much it is.
    host_size_bytes: int | None = None
    # One pool by default: which of the two kinds needs the bytes changes with the load, and no share fits all of it.
    static_split: bool = False
    # 1 GiB holds 20 in-flight fp32 checkpoints of Qwen3.5-9B: one 8K chunk at interval 1024 needs 8, reads need the rest.
    inflight_bytes: int = 1 << 30
    # What is on the SSD survives a restart and costs KV no room; which is better by how much, docs/results/beyond.md says.
    history: History = History.SSD
    # Tokens. Without a longer --chunked-prefill-size it would only make steps shorter, and that length is not ours to change.
    step_tail_tokens: int = 0
    # A restore that is not bit for bit gives other answers than a computed prefix would, so it is never the default.
    checkpoint_dtype: CheckpointDtype = CheckpointDtype.NATIVE
    # Four readers fill one NVMe drive with slab-sized requests; more only queue behind each other.
    read_threads: int = 4
    # Bytes per second, None: no limit. Four fp32 checkpoints of Qwen3.5-9B per second, a tenth of what an NVMe drive writes:
    # reads hardly feel it. It is a ceiling for busy hours: a whole day at it is 18 TB, more than most drives take for years.
    write_rate: int | None = 200 << 20
    # Bytes per UTC day, None: no limit. Which number is right is written in the drive's data sheet, not here.
    daily_writes: int | None = None
    # A record in memory that is two seconds from the disk keeps a buffer from captures and reads that could use it now.
    write_queue_age_s: float = 2.0
    # One page. The break-even on an H100 is 200 to 400 tokens, but a hit that was promised is worth more than 5 ms.
    min_gain_tokens: int = 64
    # Computing a prefix again takes what restoring it saved. Sums find what the disk does; this finds what nobody thought of.
    verify_rate: float = 0.0
    eviction: Eviction = Eviction.SCORE
    # Requests; the reason for the value is with the constant.
    tau: float = DEFAULT_TAU
    # Who runs a cache wants to see what it does; the figures are kept anyhow.
    metrics: bool = True
    # Enough to find a request that somebody complains about a minute later on a busy server.
    explain_requests: int = 256
    # None: no log. It is for finding out why something went, not for every day.
    policy_log: str | None = None

    @property
    def ssd_dirs(self) -> tuple[str, ...]:
        """The roots of the SSD tier; all share its size and its load."""
        return tuple(self.ssd_dir.split(","))


FLAG_DEFAULTS: dict[str, Any] = {
    "disable_histate": False,
    "demo": False,
    "histate_ssd_dir": None,
    "histate_ssd_size": "1GiB",
    "histate_allow_any_filesystem": False,
    "no_histate_keep_on_restart": False,
    "histate_shutdown_time": 5.0,
    "histate_interval": "adaptive",
    "histate_intervals": None,
    "histate_host_size": "auto",
    "histate_static_split": False,
    "histate_inflight_size": "1GiB",
    "histate_history": "ssd",
    "histate_step_tail": 0,
    "histate_checkpoint_dtype": "native",
    "histate_read_threads": 4,
    "histate_ssd_write_rate": "200MiB",
    "histate_ssd_daily_writes": "unlimited",
    "histate_write_queue_age": 2.0,
    "histate_min_gain": 64,
    "histate_verify_rate": 0.0,
    "histate_eviction": "score",
    "histate_tau": DEFAULT_TAU,
    "no_histate_metrics": False,
    "histate_explain_requests": 256,
    "histate_policy_log": None,
}
"""Command-line defaults by field name; the same values as `HiStateConfig`, in the form in which they are typed."""

# A deployment that overrides another one's arguments, where the last word counts, needs a default by name.
TAKES_BACK = {"--histate-keep-on-restart": "no_histate_keep_on_restart"}
TAKES_BACK_HELP = "Takes {} back; the last one counts. This is the default."

_Choice = TypeVar("_Choice", bound=Enum)
_BOOLEAN_FLAGS = frozenset(name for name, value in FLAG_DEFAULTS.items() if value is False)


def flag_name(field_name: str) -> str:
    """Return the command-line spelling of a field, such as ``--histate-ssd-dir``."""
    return "--" + field_name.replace("_", "-")


def split_flags(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Separate HiState's flags from the rest of a command line.

    Both ``--flag value`` and ``--flag=value`` are understood. An unknown ``--histate-...`` flag is an error here,
    because SGLang's own parser accepts abbreviations and would report it in terms of its own flags.

    Returns:
        The flags by field name (only those given) and the remaining arguments in order.

    Raises:
        ConfigError: for an unknown HiState flag or a flag without its value.
    """
    given: dict[str, Any] = {}
    rest: list[str] = []
    known = {flag_name(name): name for name in FLAG_DEFAULTS}
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument in TAKES_BACK:
            given.pop(TAKES_BACK[argument], None)
            continue
        if name not in known:
            if name.startswith("--histate-"):
                raise ConfigError(f"{name} is not a HiState flag: the flags are {', '.join(sorted(known))}")
            rest.append(argument)
            continue
        if known[name] in _BOOLEAN_FLAGS:
            if equals:
                raise ConfigError(f"{name} takes no value, got {value!r}: write {name} alone")
            given[known[name]] = True
            continue
        if not equals:
            following = next(arguments, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{name} needs a value: {FLAG_HELP[known[name]]}")
            value = following
        given[known[name]] = value
    return given, rest


def _checked_size(flags: Mapping[str, Any], name: str, minimum: int) -> int:
    try:
        size = parse_size(flags[name])
    except ValueError as error:
        raise ConfigError(f"{flag_name(name)}: {error}") from None
    if size < minimum:
        raise ConfigError(
            f"{flag_name(name)}: {flags[name]} is too small, the least that works is {format_size(minimum)}"
        )
    return size


def _host_size(flags: Mapping[str, Any], inflight_bytes: int) -> int | None:
    """Return the total for the host, None for 'auto'. A rank's in-flight memory alone must fit."""
    if flags["histate_host_size"] == "auto":
        return None
    try:
        size = parse_size(flags["histate_host_size"])
    except ValueError as error:
        raise ConfigError(f"--histate-host-size: {error}, or auto") from None
    if size <= inflight_bytes:
        raise ConfigError(
            f"--histate-host-size: {flags['histate_host_size']} leaves no room for KV beside checkpoints in flight "
            f"({format_size(inflight_bytes)} per rank): give more, or lower --histate-inflight-size"
        )
    return size


def _checked_count(flags: Mapping[str, Any], name: str, minimum: int, maximum: int) -> int:
    try:
        count = int(flags[name])
    except (TypeError, ValueError):
        raise ConfigError(f"{flag_name(name)}: {flags[name]!r} is not a whole number") from None
    if not minimum <= count <= maximum:
        raise ConfigError(f"{flag_name(name)}: {count} is outside {minimum} to {maximum}")
    return count


def _step_tail(flags: Mapping[str, Any]) -> int:
    tail = _checked_count(flags, "histate_step_tail", 0, 1 << 20)
    if tail % STEP_TOKENS:
        raise ConfigError(
            f"--histate-step-tail: {tail} is not a multiple of {STEP_TOKENS}: use {tail // STEP_TOKENS * STEP_TOKENS}"
        )
    return tail


def _limit(flags: Mapping[str, Any], name: str, minimum: int) -> int | None:
    """Return a size, None for 'unlimited'."""
    if flags[name] == "unlimited":
        return None
    try:
        return _checked_size(flags, name, minimum)
    except ConfigError as error:
        raise ConfigError(f"{error}, or unlimited") from None


def _checked_number(flags: Mapping[str, Any], name: str, minimum: float, maximum: float, unit: str) -> float:
    try:
        number = float(flags[name])
    except (TypeError, ValueError):
        raise ConfigError(f"{flag_name(name)}: {flags[name]!r} is not a number") from None
    if not minimum <= number <= maximum:
        raise ConfigError(f"{flag_name(name)}: {number:g} is outside {minimum:g} to {maximum:g} {unit}")
    return number


def _checked_choice(flags: Mapping[str, Any], name: str, choices: type[_Choice]) -> _Choice:
    try:
        return choices(str(flags[name]))
    except ValueError:
        allowed = ", ".join(choice.value for choice in choices)
        raise ConfigError(f"{flag_name(name)}: {flags[name]!r} is not one of {allowed}") from None


def config_from_flags(given: Mapping[str, Any]) -> HiStateConfig:
    """Build the settings from flags by field name; missing ones take their defaults.

    Raises:
        ConfigError: one sentence that names the flag, the value and what is allowed.
    """
    unknown = sorted(set(given) - set(FLAG_DEFAULTS))
    if unknown:
        raise ConfigError(f"{flag_name(unknown[0])} is not a HiState flag")
    flags = {**FLAG_DEFAULTS, **{name: value for name, value in given.items() if value is not None}}
    ssd_dir = flags["histate_ssd_dir"]
    if not ssd_dir:
        raise ConfigError(
            "--histate-ssd-dir is missing: name a directory on a local SSD, or serve without HiState by --disable-histate"
        )
    roots = str(ssd_dir).split(",")
    if "" in roots or len(set(roots)) < len(roots):
        raise ConfigError(
            f"--histate-ssd-dir: {ssd_dir} names no directory or one twice: separate different ones by a comma"
        )
    try:
        supported = (
            DEFAULT_INTERVALS
            if flags["histate_intervals"] is None
            else parse_intervals(flags["histate_intervals"])
        )
    except ValueError as error:
        raise ConfigError(f"--histate-intervals: {error}") from None
    try:
        interval = parse_interval(flags["histate_interval"], supported)
    except ValueError as error:
        raise ConfigError(f"--histate-interval: {error}") from None
    ssd_size_bytes = _checked_size(flags, "histate_ssd_size", 1 << 20)
    inflight_bytes = _checked_size(flags, "histate_inflight_size", 1 << 20)
    return HiStateConfig(
        ssd_dir=str(ssd_dir),
        ssd_size_bytes=ssd_size_bytes,
        allow_any_filesystem=bool(flags["histate_allow_any_filesystem"]),
        keep_on_restart=not flags["no_histate_keep_on_restart"],
        shutdown_s=_checked_number(flags, "histate_shutdown_time", 0, MOST_SHUTDOWN_S, "seconds"),
        interval=interval,
        interval_text=str(flags["histate_interval"]),
        intervals_are_default=flags["histate_intervals"] is None and len(interval.supported) > 1,
        host_size_bytes=_host_size(flags, min(ssd_size_bytes, inflight_bytes)),
        static_split=bool(flags["histate_static_split"]),
        inflight_bytes=inflight_bytes,
        history=_checked_choice(flags, "histate_history", History),
        step_tail_tokens=_step_tail(flags),
        checkpoint_dtype=_checked_choice(flags, "histate_checkpoint_dtype", CheckpointDtype),
        read_threads=_checked_count(flags, "histate_read_threads", 1, 64),
        write_rate=_limit(flags, "histate_ssd_write_rate", 0),
        daily_writes=_limit(flags, "histate_ssd_daily_writes", 1 << 20),
        write_queue_age_s=_checked_number(flags, "histate_write_queue_age", 0.001, 3600, "seconds"),
        min_gain_tokens=_checked_count(flags, "histate_min_gain", 1, 1 << 20),
        verify_rate=_checked_number(flags, "histate_verify_rate", 0, 1, "(a share)"),
        eviction=_checked_choice(flags, "histate_eviction", Eviction),
        tau=_checked_number(flags, "histate_tau", 0, 1e9, "requests"),
        metrics=not flags["no_histate_metrics"],
        explain_requests=_checked_count(flags, "histate_explain_requests", 0, 4096),
        policy_log=None if flags["histate_policy_log"] is None else str(flags["histate_policy_log"]),
    )


def describe(config: HiStateConfig) -> dict[str, Any]:
    """Return the settings as plain JSON values, for the status endpoint and the start-up line."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    values["interval"] = config.interval_text
    values["eviction"] = config.eviction.value
    values["checkpoint_dtype"] = config.checkpoint_dtype.value
    values["history"] = config.history.value
    values["intervals"] = list(config.interval.supported)
    for name in ("interval_text", "intervals_are_default"):
        values.pop(name)
    return values
