"""Every command line has a help with examples, and the examples are ones that its parser takes."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.arguments import with_examples
from eval.progress import each
from sglang_histate.cli import parser_of_all

ROOT = Path(__file__).resolve().parents[2]
# What parses a command line below eval/, by the module that python -m names.
COMMANDS = {
    "eval.eviction": "eval.eviction.options",
    "eval.internal_hits": "eval.internal_hits.options",
    "eval.measure": "eval.measure.options",
    "eval.simulate": "eval.simulate.options",
}


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def examples(text: str) -> list[str]:
    """Return the command lines behind "examples:" or "example:" in a help text."""
    _, _, rest = text.partition("\nexample")
    lines = [line.strip() for line in rest.splitlines()[1:] if line.startswith("  ")]
    return [
        re.split(r"\s{3,}", line)[0]
        for line in lines
        if line.startswith(("histate ", "python -m ", "HISTATE_"))
    ]


@pytest.mark.parametrize("parser", parsers(parser_of_all()), ids=lambda parser: parser.prog)
def test_every_command_of_histate_has_examples_that_it_takes(parser: argparse.ArgumentParser) -> None:
    found = examples(parser.format_help())
    assert found, f"{parser.prog} has no example"
    for line in found:
        words = [word for word in shlex.split(line) if not word.startswith("HISTATE_CACHE_DIR=")]
        assert words[0] == "histate"
        parser_of_all().parse_args(words[1:])


def test_every_command_below_eval_has_examples() -> None:
    sources = {
        path: path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "eval").rglob("*.py"))
        if "argparse.ArgumentParser(\n" in path.read_text(encoding="utf-8")
        or 'ArgumentParser(prog="' in path.read_text(encoding="utf-8")
    }
    assert len(sources) > 12
    without = [
        path.name
        for path, text in sources.items()
        if "with_examples(" not in text and "examples:" not in text
    ]
    assert without == []


@pytest.mark.parametrize(("command", "module"), COMMANDS.items())
def test_examples_below_eval_parse(command: str, module: str, capsys) -> None:
    import importlib

    parse = importlib.import_module(module).parse
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    found = examples(capsys.readouterr().out)
    assert found
    for line in found:
        words = shlex.split(line)
        assert words[:3] == ["python", "-m", command]
        parse(words[3:])


def test_examples_come_last_and_long_texts_are_filled() -> None:
    plain = argparse.ArgumentParser(prog="x", description="a  b " * 60, epilog="Exit code: 0.")
    with_examples(plain, "python -m x 1", "python -m x 2")
    text = plain.format_help()
    assert text.endswith("Exit code: 0.\n\nexamples:\n  python -m x 1\n  python -m x 2\n")
    assert max(map(len, text.splitlines())) <= 100
    kept = argparse.ArgumentParser(prog="x", epilog="a\n  b", formatter_class=argparse.RawTextHelpFormatter)
    with_examples(kept, "y")
    assert kept.format_help().endswith("a\n  b\n\nexamples:\n  y\n")


def test_a_loop_with_a_bar_yields_everything_in_order() -> None:
    assert list(each(range(5), "what", "unit")) == [0, 1, 2, 3, 4]
    assert list(each(iter("ab"), "what", "unit", total=2)) == ["a", "b"]
