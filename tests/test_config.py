"""HiState's flags: both spellings, one sentence per mistake, the same defaults everywhere."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from sglang_histate.config import (
    FLAG_DEFAULTS,
    CheckpointDtype,
    ConfigError,
    HiStateConfig,
    History,
    config_from_flags,
    describe,
    flag_name,
    split_flags,
)
from sglang_histate.flag_help import FLAG_HELP
from sglang_histate.policy.interval import DEFAULT_INTERVALS, NO_INTERVAL
from sglang_histate.sizes import parse_size

DIR = {"histate_ssd_dir": "/ssd"}


def test_every_flag_has_a_default_and_a_help_text() -> None:
    assert set(FLAG_HELP) == set(FLAG_DEFAULTS)
    assert all(text.endswith(".") and "\n" not in text for text in FLAG_HELP.values())


def test_defaults_are_the_same_as_typed_and_as_validated() -> None:
    assert config_from_flags(DIR) == HiStateConfig(ssd_dir="/ssd")
    config = HiStateConfig(ssd_dir="/ssd")
    assert parse_size(FLAG_DEFAULTS["histate_ssd_size"]) == config.ssd_size_bytes
    assert parse_size(FLAG_DEFAULTS["histate_inflight_size"]) == config.inflight_bytes
    assert FLAG_DEFAULTS["histate_static_split"] is config.static_split is False
    assert FLAG_DEFAULTS["histate_host_size"] == "auto" and config.host_size_bytes is None
    assert FLAG_DEFAULTS["histate_checkpoint_dtype"] == config.checkpoint_dtype == "native"
    assert FLAG_DEFAULTS["histate_history"] == config.history == "ssd"
    assert FLAG_DEFAULTS["histate_read_threads"] == config.read_threads
    assert FLAG_DEFAULTS["histate_explain_requests"] == config.explain_requests
    assert parse_size(FLAG_DEFAULTS["histate_ssd_write_rate"]) == config.write_rate
    assert FLAG_DEFAULTS["histate_ssd_daily_writes"] == "unlimited" and config.daily_writes is None
    assert FLAG_DEFAULTS["histate_write_queue_age"] == config.write_queue_age_s
    assert FLAG_DEFAULTS["histate_min_gain"] == config.min_gain_tokens
    assert FLAG_DEFAULTS["histate_verify_rate"] == config.verify_rate == 0
    assert FLAG_DEFAULTS["histate_shutdown_time"] == config.shutdown_s
    assert FLAG_DEFAULTS["no_histate_keep_on_restart"] is (not config.keep_on_restart) is False
    assert FLAG_DEFAULTS["histate_allow_any_filesystem"] is config.allow_any_filesystem is False
    assert FLAG_DEFAULTS["histate_interval"] == config.interval_text
    assert config.interval.supported == DEFAULT_INTERVALS


def test_none_means_not_given() -> None:
    assert config_from_flags({**DIR, **dict.fromkeys(set(FLAG_DEFAULTS) - set(DIR))}) == config_from_flags(
        DIR
    )


def test_the_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HiStateConfig(ssd_dir="/ssd").ssd_dir = "/other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ({"histate_ssd_size": "2MiB"}, "ssd_size_bytes", 2 << 20),
        ({"histate_host_size": "3GiB"}, "host_size_bytes", 3 << 30),
        ({"histate_host_size": "auto"}, "host_size_bytes", None),
        ({"histate_static_split": True}, "static_split", True),
        ({"histate_inflight_size": "1.5GiB"}, "inflight_bytes", 3 << 29),
        ({"histate_checkpoint_dtype": "int8"}, "checkpoint_dtype", CheckpointDtype.INT8),
        ({"histate_read_threads": "8"}, "read_threads", 8),
        ({"histate_explain_requests": "0"}, "explain_requests", 0),
        ({"histate_ssd_write_rate": "50MiB"}, "write_rate", 50 << 20),
        ({"histate_ssd_write_rate": "0"}, "write_rate", 0),
        ({"histate_ssd_write_rate": "unlimited"}, "write_rate", None),
        ({"histate_ssd_daily_writes": "4TiB"}, "daily_writes", 4 << 40),
        ({"histate_write_queue_age": "0.5"}, "write_queue_age_s", 0.5),
        ({"histate_min_gain": "1"}, "min_gain_tokens", 1),
        ({"histate_history": "cheapest"}, "history", History.CHEAPEST),
        ({"histate_step_tail": "2048"}, "step_tail_tokens", 2048),
        ({"histate_verify_rate": "0.01"}, "verify_rate", 0.01),
        ({"histate_shutdown_time": "0"}, "shutdown_s", 0),
        ({"no_histate_keep_on_restart": True}, "keep_on_restart", False),
        ({"histate_allow_any_filesystem": True}, "allow_any_filesystem", True),
        ({"histate_ssd_dir": "/a,/b"}, "ssd_dirs", ("/a", "/b")),
        ({"histate_interval": "fixed:512"}, "interval_text", "fixed:512"),
    ],
)
def test_values(flags, field, value) -> None:
    assert getattr(config_from_flags({**DIR, **flags}), field) == value


@pytest.mark.parametrize(
    ("flags", "supported", "default"),
    [
        ({}, DEFAULT_INTERVALS, True),
        ({"histate_interval": "none"}, (NO_INTERVAL,), False),
        ({"histate_interval": "fixed:512"}, (512,), False),
        ({"histate_intervals": "256,512,none"}, (256, 512, NO_INTERVAL), False),
        ({"histate_interval": "adaptive", "histate_intervals": "1024"}, (1024,), False),
    ],
)
def test_intervals(flags, supported, default) -> None:
    config = config_from_flags({**DIR, **flags})
    assert config.interval.supported == supported and config.intervals_are_default is default


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"histate_ssd_dir": None}, "--histate-ssd-dir"),
        ({"histate_ssd_dir": ""}, "--histate-ssd-dir"),
        ({"histate_ssd_dir": "/a,,/b"}, "--histate-ssd-dir"),
        ({"histate_ssd_dir": "/a,/b,/a"}, "--histate-ssd-dir"),
        ({"histate_shutdown_time": "13"}, "--histate-shutdown-time"),
        ({"histate_shutdown_time": "-1"}, "--histate-shutdown-time"),
        ({"histate_ssd_size": "512MB"}, "--histate-ssd-size"),
        ({"histate_ssd_size": "1KiB"}, "--histate-ssd-size"),
        ({"histate_ssd_size": "-1"}, "--histate-ssd-size"),
        ({"histate_inflight_size": "0"}, "--histate-inflight-size"),
        ({"histate_host_size": "much"}, "--histate-host-size"),
        ({"histate_host_size": "-1GiB"}, "--histate-host-size"),
        ({"histate_host_size": "1GiB"}, "--histate-host-size"),  # all of it is in flight by default
        ({"histate_checkpoint_dtype": "fp8"}, "--histate-checkpoint-dtype"),
        ({"histate_checkpoint_dtype": "BF16"}, "--histate-checkpoint-dtype"),
        ({"histate_read_threads": "0"}, "--histate-read-threads"),
        ({"histate_read_threads": "65"}, "--histate-read-threads"),
        ({"histate_read_threads": "two"}, "--histate-read-threads"),
        ({"histate_explain_requests": "-1"}, "--histate-explain-requests"),
        ({"histate_explain_requests": "4097"}, "--histate-explain-requests"),
        ({"histate_ssd_write_rate": "200MB"}, "--histate-ssd-write-rate"),
        ({"histate_ssd_write_rate": "-1"}, "--histate-ssd-write-rate"),
        ({"histate_ssd_write_rate": "none"}, "--histate-ssd-write-rate"),
        ({"histate_ssd_daily_writes": "0"}, "--histate-ssd-daily-writes"),
        ({"histate_ssd_daily_writes": "1PB"}, "--histate-ssd-daily-writes"),
        ({"histate_write_queue_age": "0"}, "--histate-write-queue-age"),
        ({"histate_write_queue_age": "nan"}, "--histate-write-queue-age"),
        ({"histate_write_queue_age": "inf"}, "--histate-write-queue-age"),
        ({"histate_write_queue_age": "soon"}, "--histate-write-queue-age"),
        ({"histate_min_gain": "0"}, "--histate-min-gain"),
        ({"histate_min_gain": "1.5"}, "--histate-min-gain"),
        ({"histate_history": "host"}, "--histate-history"),
        ({"histate_step_tail": "-64"}, "--histate-step-tail"),
        ({"histate_step_tail": "100"}, "--histate-step-tail"),
        ({"histate_step_tail": "half"}, "--histate-step-tail"),
        ({"histate_verify_rate": "1.5"}, "--histate-verify-rate"),
        ({"histate_verify_rate": "-0.1"}, "--histate-verify-rate"),
        ({"histate_verify_rate": "nan"}, "--histate-verify-rate"),
        ({"histate_verify_rate": "often"}, "--histate-verify-rate"),
        ({"histate_interval": "fixed:100"}, "--histate-interval"),
        ({"histate_interval": "fixed"}, "--histate-interval"),
        ({"histate_interval": "often"}, "--histate-interval"),
        ({"histate_intervals": "100"}, "--histate-intervals"),
        ({"histate_intervals": ""}, "--histate-intervals"),
        ({"histate_intervals": "256,,512"}, "--histate-intervals"),
        ({"histate_intervals": "512,256"}, "--histate-intervals"),
        ({"histate_speed": "9"}, "--histate-speed"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_flag(flags, flag) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_flags({**DIR, **flags})
    text = str(caught.value)
    assert text.startswith(flag) and "\n" not in text


def test_both_spellings_and_the_order_of_the_rest() -> None:
    argv = [
        "--port",
        "1",
        "--histate-ssd-dir",
        "/a",
        "--tp=2",
        "--histate-ssd-size=2GiB",
        "--demo",
        "--histate-interval",
        "none",
        "x",
    ]
    given, rest = split_flags(argv)
    assert given == {
        "histate_ssd_dir": "/a",
        "histate_ssd_size": "2GiB",
        "demo": True,
        "histate_interval": "none",
    }
    assert rest == ["--port", "1", "--tp=2", "x"]


def test_the_last_one_counts() -> None:
    assert split_flags(["--histate-min-gain", "1", "--histate-min-gain=2"])[0] == {"histate_min_gain": "2"}


def test_an_empty_value_and_one_with_an_equals_sign() -> None:
    assert split_flags(["--histate-ssd-dir=", "--histate-interval=a=b"])[0] == {
        "histate_ssd_dir": "",
        "histate_interval": "a=b",
    }


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--histate-sd-dir", "/a"], "--histate-sd-dir is not a HiState flag: the flags are --demo"),
        (["--histate-x=1"], "--histate-x is not a HiState flag"),
        (["--histate-ssd-dir"], "--histate-ssd-dir needs a value"),
        (["--histate-ssd-dir", "--port"], "--histate-ssd-dir needs a value"),
        (["--demo=yes"], "--demo takes no value, got 'yes'"),
        (["--disable-histate=1"], "--disable-histate takes no value"),
    ],
)
def test_what_cannot_be_split(argv, complaint) -> None:
    with pytest.raises(ConfigError) as caught:
        split_flags(argv)
    assert str(caught.value).startswith(complaint)


def test_flag_names() -> None:
    assert [flag_name(n) for n in ("demo", "histate_ssd_dir")] == ["--demo", "--histate-ssd-dir"]


def test_describe_is_plain_json() -> None:
    import json

    found = json.loads(json.dumps(describe(config_from_flags({**DIR, "histate_interval": "fixed:512"}))))
    assert found["interval"] == "fixed:512" and found["intervals"] == [512]
    assert found["ssd_dir"] == "/ssd" and found["ssd_size_bytes"] == 1 << 30
    assert not {"interval_text", "intervals_are_default"} & set(found)


def test_reading_the_flags_loads_nothing_heavy() -> None:
    code = "import sys, sglang_histate.config; print({'torch', 'sglang', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["--histate-keep-on-restart"], {}),
        (["--no-histate-keep-on-restart", "--histate-keep-on-restart"], {}),
        (["--histate-keep-on-restart", "--no-histate-keep-on-restart"], {"no_histate_keep_on_restart": True}),
    ],
)
def test_the_last_word_counts_where_a_flag_takes_another_one_back(argv, given) -> None:
    assert split_flags([*argv, "--port", "1"]) == (given, ["--port", "1"])
