"""Chat messages to prompt tokens, as a server does it: the model's chat template, then its tokenizer."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

DEMO = "demo"
"""Name of the demo model's tokenizer: one token a byte, so that lengths are 3 to 5 times those of real models."""


class NoTokenizer(ValueError):
    """A model has no tokenizer or chat template that can be loaded; the message says what to give."""


class BadChat(ValueError):
    """The template refuses these messages; the message is the template's reason."""


class ChatTokens:
    """A model's template and tokenizer."""

    def __init__(self, model: str) -> None:
        """Load them. `model` is a folder, a name that transformers knows, or `DEMO`.

        Raises:
            NoTokenizer: see there.
        """
        self._tokenizer = _demo() if model == DEMO else _loaded(model)
        if not getattr(self._tokenizer, "chat_template", None):
            raise NoTokenizer(f"{model} has no chat template: name a model that was made for chat")

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """Return the prompt that a server makes of the messages, up to where the answer begins.

        Raises:
            BadChat: see there.
        """
        from jinja2 import TemplateError

        try:
            written = self._tokenizer.apply_chat_template(
                [_plain(message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise BadChat(f"{type(error).__name__}: {error}") from None
        return self.encode(written)

    def encode(self, written: str) -> list[int]:
        """Return the tokens of a text without any added at its ends."""
        found: list[int] = self._tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
        return found


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form that templates read: content as one text, arguments of calls as objects."""
    found = dict(message)
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = "".join(_part(part) for part in content)
    elif content is None:
        found["content"] = ""
    if isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    return found


def _part(part: Any) -> str:
    if isinstance(part, dict):
        if isinstance(part.get("text"), str):
            return str(part["text"])
        return f"[{part.get('type', 'part')}]"  # an image's tokens depend on the model: a mark in its place
    return str(part)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:  # the model wrote no JSON: templates take the text as it is
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _loaded(model: str) -> Any:
    try:
        if (Path(model) / "tokenizer.json").exists():
            # All there is to know is in that file; finding the model's own class would import torch for nothing.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(model)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise NoTokenizer(
            f"{model}: no tokenizer could be loaded ({reason}): give the folder of a model, or {DEMO}"
        ) from None


@cache
def _demo() -> Any:
    from sglang_histate.demo.tokenizer import write_tokenizer

    # Only the tokenizer: the model beside it would have to be built first.
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return _loaded(folder)
