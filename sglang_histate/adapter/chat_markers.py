"""Learns from a tokenizer's chat template which token ids begin the parts of a prompt.

The template renders a few small conversations whose contents are known words. What it writes between them, cut at the
added tokens in there (`<|im_start|>`, `<think>`, ...), gives the markers. They are then looked for in those very
conversations: a template in which they do not find every word where it belongs is not used at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_histate.policy.structure import Marker, Part, Structure, span_at

# Words that no template writes by itself and that contain nothing that could be merged with what is around them.
_SYSTEM, _USER, _ANSWER, _THOUGHT, _LATER = "Qzsystem", "Qzuser", "Qzanswer", "Qzthought", "Qzlater"
_ARGUMENT, _RESULT, _SECOND = "Qzargument", "Qzresult", "Qzsecond"
_TOOL_NAMES = ("qzone", "other")


class TemplateError(ValueError):
    """The parts of prompts cannot be told from token ids; the message is half a sentence that says why."""


def learn(tokenizer: Any, template: str | None = None) -> Structure:
    """Return the structure of the prompts that `tokenizer` makes with its own chat template, or with `template`.

    Raises:
        TemplateError: there is no template, or its markers do not tell the parts apart.
    """
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise TemplateError("the tokenizer has no chat template")

    def render(messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        given = {} if template is None else {"chat_template": template}
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **given))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def is_space(token: int) -> bool:
        return bool(tokenizer.decode([token]).isspace())

    return _Lesson(render, encode, is_space, frozenset(tokenizer.get_added_vocab().values())).structure()


class _Lesson:
    """One template. `render` raises whatever a template may raise about messages that it does not support."""

    def __init__(
        self,
        render: Callable[[list[dict[str, Any]], list[Any] | None], str],
        encode: Callable[[str], list[int]],
        is_space: Callable[[int], bool],
        added: frozenset[int],
    ) -> None:
        self._render = render
        self._encode = encode
        self._is_space = is_space
        self._added = added
        self._usual: set[tuple[int, ...]] = set()  # what stands before a role's content, cut at added tokens
        self._markers: list[Marker] = []
        self._facts: list[tuple[str, str, Part]] = []  # rendered text, a word in it, where the word stands

    def structure(self) -> Structure:
        openers = self._turns()
        self._thinking(openers)
        self._results(openers)
        if Part.SYSTEM in openers:
            self._tools()
        structure = Structure(self._markers)
        for text, word, part in self._facts:
            before = len(self._encode(text[: text.index(word)]))
            found = span_at(structure.spans(self._encode(text)), before).part
            if found is not part:
                raise TemplateError(f"its markers find {found.value} where {part.value} is")
        return structure

    def _turns(self) -> dict[Part, tuple[int, ...]]:
        """Learn what begins a turn of each role: as few added tokens as tell the roles apart, and what follows them."""
        system: dict[str, Any] = {"role": "system", "content": _SYSTEM}
        talk = [_message("user", _USER), _message("assistant", _ANSWER), _message("user", _LATER)]
        text = self._try([system, *talk])
        with_system = text is not None and _SYSTEM in text
        if not with_system:
            text = self._try(talk)
        if text is None or _USER not in text or _ANSWER not in text:
            raise TemplateError("the chat template does not render a user's and an assistant's message")
        before = {Part.USER: _between(text, _SYSTEM if with_system else "", _USER)}
        before[Part.ASSISTANT] = _between(text, _USER, _ANSWER)
        if with_system:
            before[Part.SYSTEM] = _between(text, "", _SYSTEM)
        glue = {part: self._encode(words) for part, words in before.items()}
        later = self._encode(_between(text, _ANSWER, _LATER))
        for ids in (*glue.values(), later):
            self._usual.update(self._suffixes(ids))
        openers = self._openers(glue)
        for part, opener in openers.items():
            self._markers.append(Marker(opener, part))
        self._facts += [(text, _USER, Part.USER), (text, _ANSWER, Part.ASSISTANT), (text, _LATER, Part.USER)]
        if with_system:
            self._facts.append((text, _SYSTEM, Part.SYSTEM))
        return openers

    def _openers(self, glue: dict[Part, list[int]]) -> dict[Part, tuple[int, ...]]:
        """Return what of the ids before each role's content begins the turn: an added token and the words behind it.

        The same added token for all roles if that tells them apart, else one for each.
        """
        at = {part: [i for i, token in enumerate(ids) if token in self._added] for part, ids in glue.items()}
        for back in range(1, len(at[Part.USER]) + 1):
            anchor = glue[Part.USER][at[Part.USER][-back]]
            shared = {part: [i for i in found if glue[part][i] == anchor][-1:] for part, found in at.items()}
            for place in (shared, {part: found[-back:][:1] for part, found in at.items()}):
                if not all(place.values()):
                    continue
                openers = {part: self._opener(ids, place[part][0]) for part, ids in glue.items()}
                if len(set(openers.values())) == len(openers):
                    return openers
        raise TemplateError("the chat template has no special tokens that tell the roles apart")

    def _opener(self, ids: list[int], start: int) -> tuple[int, ...]:
        """Return the added token at `start` with the words up to the next one."""
        end = next((i for i in range(start + 1, len(ids)) if ids[i] in self._added), len(ids))
        while end > start + 1 and self._is_space(ids[end - 1]):
            end -= 1
        return tuple(ids[start:end])

    def _thinking(self, openers: dict[Part, tuple[int, ...]]) -> None:
        answer = _message("assistant", _ANSWER) | {"reasoning_content": _THOUGHT}
        text = self._try([_message("user", _USER), answer])
        if text is None or _THOUGHT not in text or text.find(_ANSWER) < text.index(_THOUGHT):
            return
        begins = self._more(openers, _between(text, _USER, _THOUGHT))
        ends = [token for token in self._encode(_between(text, _THOUGHT, _ANSWER)) if token in self._added]
        if not begins or not ends:
            return  # told by plain text, if at all: it counts as part of the answer
        self._markers.append(Marker(begins[0], Part.THINKING, frozenset({Part.ASSISTANT})))
        self._markers.append(Marker((ends[0],), Part.ASSISTANT, frozenset({Part.THINKING}), resumes=True))
        self._facts += [(text, _THOUGHT, Part.THINKING), (text, _ANSWER, Part.ASSISTANT)]

    def _results(self, openers: dict[Part, tuple[int, ...]]) -> None:
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": _TOOL_NAMES[0], "arguments": {"value": _ARGUMENT}},
        }
        asked = [_message("user", _USER), _message("assistant", "") | {"tool_calls": [call]}]
        results = [
            _message("tool", word) | {"tool_call_id": "call_0", "name": _TOOL_NAMES[0]}
            for word in (_RESULT, _SECOND)
        ]
        text = self._try(asked + results)
        if text is None or not all(word in text for word in (_ARGUMENT, _RESULT, _SECOND)):
            return
        found = self._more(openers, _between(text, _ARGUMENT, _RESULT))
        if not found:
            return  # as a user's message: nothing tells the two apart
        turn = next(
            (ids for ids in found if any(ids[: len(one)] == one != ids for one in openers.values())), None
        )
        if turn is not None:
            self._markers.append(Marker(turn, Part.TOOL_RESULT))
        if found[0] != turn:
            within = frozenset() if turn is None else frozenset({Part.USER, Part.TOOL_RESULT})
            self._markers.append(Marker(found[0], Part.TOOL_RESULT, within))
        self._facts += [(text, _RESULT, Part.TOOL_RESULT)]
        if found[0] != turn:
            self._facts += [(text, _SECOND, Part.TOOL_RESULT)]

    def _tools(self) -> None:
        """Learn the words before and behind the definitions of tools: plain text, so longer and only in the system part."""
        messages = [_message("system", _SYSTEM), _message("user", _USER)]
        one, other = (self._try(messages, [tool]) for tool in _tools())
        if one is None or other is None or _TOOL_NAMES[0] not in one or _TOOL_NAMES[1] not in other:
            return
        head = _common(one, other)
        head = head[: head.rfind("\n") + 1]
        tail = _common(one[::-1], other[::-1])[::-1]
        tail = tail[tail.find("\n") + 1 :]
        # The line end may be one token with the word before it, or with what follows.
        begins = self._unique(one, head, from_end=True) or self._unique(one, head.rstrip(), from_end=True)
        ends = self._unique(one, tail, from_end=False) or self._unique(one, tail.lstrip(), from_end=False)
        if begins is None or ends is None:
            return
        self._markers.append(Marker(begins, Part.TOOLS, frozenset({Part.SYSTEM})))
        self._markers.append(Marker(ends, Part.SYSTEM, frozenset({Part.TOOLS}), resumes=True))
        self._facts += [(one, _TOOL_NAMES[0], Part.TOOLS), (other, _TOOL_NAMES[1], Part.TOOLS)]
        self._facts += [(one, _SYSTEM, Part.SYSTEM), (one, _USER, Part.USER)]

    def _unique(self, text: str, glue: str, *, from_end: bool) -> tuple[int, ...] | None:
        """Return as few ids from the end (or the beginning) of `glue` as stand in `text` only once."""
        ids, within = tuple(self._encode(glue)), self._encode(text)
        for count in (4, 8, 16, 32):
            part = ids[-count:] if from_end else ids[:count]
            if len(part) == count and _times(part, within) == 1:
                return part
        return None

    def _suffixes(self, ids: list[int]) -> list[tuple[int, ...]]:
        """Return the ends of `ids` that begin with an added token, shortest first.

        White space at the end is left out: a tokenizer may merge it with what follows.
        """
        end = len(ids)
        while end and self._is_space(ids[end - 1]):
            end -= 1
        return [tuple(ids[at:end]) for at in reversed(range(end)) if ids[at] in self._added]

    def _more(self, openers: dict[Part, tuple[int, ...]], glue: str) -> list[tuple[int, ...]]:
        """Return the suffixes of `glue` that say more than that a turn of some role begins, and nothing before that."""
        found = []
        for ids in self._suffixes(self._encode(glue)):
            inner = ids[1:]
            if any(_times(one, inner) for one in openers.values()):
                break
            if ids not in self._usual:
                found.append(ids)
        return found

    def _try(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str | None:
        try:
            return self._render(messages, tools)
        except Exception:  # a template is a program: it may raise anything about what it does not support
            return None


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _tools() -> list[dict[str, Any]]:
    """Return two tools whose definitions differ at the beginning and at the end."""
    text = {"type": "string"}
    schemas: tuple[dict[str, Any], ...] = (
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"value": text}, "required": ["value"]},
    )
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f"{name} tool", "parameters": schema},
        }
        for name, schema in zip(_TOOL_NAMES, schemas, strict=True)
    ]


def _between(text: str, before: str, after: str) -> str:
    start = text.index(before) + len(before)
    return text[start : text.index(after, start)]


def _common(one: str, other: str) -> str:
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[:count] if count is not None else min(one, other, key=len)


def _times(part: Sequence[int], within: Sequence[int]) -> int:
    size = len(part)
    return sum(tuple(within[at : at + size]) == tuple(part) for at in range(len(within) - size + 1))
