"""HiState's flags in SGLang's own parser and record: group, defaults, the way back to one config."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_histate.adapter.flags import config_of
from sglang_histate.config import FLAG_DEFAULTS, config_from_flags, flag_name
from sglang_histate.flag_help import FLAG_HELP


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def test_defaults_of_the_parser_and_of_the_record(parser) -> None:
    fields = dict(zip(ServerArgs.__struct_fields__[::-1], ServerArgs.__struct_defaults__[::-1], strict=False))
    for name, default in FLAG_DEFAULTS.items():
        assert parser.get_default(name) == default and type(parser.get_default(name)) is type(default), name
        assert fields[name] == default, name


def test_help_texts(parser) -> None:
    found = {
        action.dest: action
        for action in parser._actions
        if action.dest in FLAG_DEFAULTS and action.option_strings != ["--histate-keep-on-restart"]
    }
    assert {name: action.help for name, action in found.items()} == FLAG_HELP
    assert {name: action.option_strings for name, action in found.items()} == {
        name: [flag_name(name)] for name in FLAG_DEFAULTS
    }


def test_a_group_of_their_own(parser) -> None:
    (group,) = [group for group in parser._action_groups if group.title == "HiState"]
    assert {action.dest for action in group._group_actions} == set(FLAG_DEFAULTS)
    others = [a.dest for g in parser._action_groups if g is not group for a in g._group_actions]
    assert not set(others) & set(FLAG_DEFAULTS)


def test_every_flag_reaches_the_config(parser) -> None:
    values = {
        "histate_ssd_dir": "/ssd",
        "histate_ssd_size": "2GiB",
        "histate_interval": "adaptive",
        "histate_intervals": "512,none",
        "histate_host_size": "3GiB",
        "histate_inflight_size": "64MiB",
        "histate_history": "cheapest",
        "histate_step_tail": "1024",
        "histate_checkpoint_dtype": "bf16",
        "histate_read_threads": "3",
        "histate_ssd_write_rate": "unlimited",
        "histate_ssd_daily_writes": "4TiB",
        "histate_write_queue_age": "0.5",
        "histate_min_gain": "128",
        "histate_verify_rate": "0.25",
        "histate_eviction": "lru-refresh",
        "histate_tau": "12.5",
        "histate_explain_requests": "17",
        "histate_policy_log": "some.jsonl",
        "histate_shutdown_time": "2.5",
    }
    argv = [part for name, value in values.items() for part in (flag_name(name), value)]
    switches = (
        "histate_static_split",
        "histate_allow_any_filesystem",
        "no_histate_keep_on_restart",
        "no_histate_metrics",
    )
    parsed = parser.parse_args(["--model-path", "m", *map(flag_name, switches), *argv])
    values |= dict.fromkeys(switches, True)
    assert config_of(parsed) == config_from_flags(values)
    assert set(values) | {"demo", "disable_histate"} == set(FLAG_DEFAULTS)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((), True),
        (("--histate-keep-on-restart",), True),
        (("--no-histate-keep-on-restart",), False),
        (("--no-histate-keep-on-restart", "--histate-keep-on-restart"), True),
        (("--histate-keep-on-restart", "--no-histate-keep-on-restart"), False),
    ],
)
def test_the_last_word_on_restarts_counts(parser, given: tuple[str, ...], kept: bool) -> None:
    parsed = parser.parse_args(["--model-path", "m", "--histate-ssd-dir", "/ssd", *given])
    assert config_of(parsed).keep_on_restart is kept


def test_the_flag_page_has_what_the_server_s_own_parser_has(parser) -> None:
    """docs/flags.md is made from the tables behind the parser; this is the parser itself, in the running overlay."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "flags.md").read_text(encoding="utf-8")
    (group,) = [group for group in parser._action_groups if group.title == "HiState"]
    for action in group._group_actions:
        (option,) = action.option_strings
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{option}` |")]
        assert " ".join(str(action.help).split()) in row.replace("\\|", "|")
