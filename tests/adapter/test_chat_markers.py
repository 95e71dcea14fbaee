"""Markers learned from chat templates of several forms, and what the parts of prompts are then."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_histate.adapter.chat_markers import TemplateError, learn
from sglang_histate.adapter.chat_template import (
    TemplateStructure,
    agreed,
    prompt_structure,
    template_structure,
)
from sglang_histate.adapter.token_spans import prompt_spans
from sglang_histate.demo import ensure_demo_model
from sglang_histate.policy.structure import Part, span_at

# Tools before the user's own system text, arguments as XML, results inside a user's turn: as in Qwen3.5.
TOOLS_FIRST = """
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nIf you choose to call a function reply in this format:\\n<tool_call>\\n</tool_call>' }}
{%- if messages[0].role == 'system' %}{{- '\\n\\n' + messages[0].content | trim }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' + message.content | trim }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
# Roles between two special tokens, a role of its own for results, no thinking, no system message.
HEADERS = """
{%- for message in messages %}
{%- if message.role == 'system' %}{{- raise_exception('no system messages') }}{%- endif %}
{{- '<|reserved_0|>' + ('ipython' if message.role == 'tool' else message.role) + '<|reserved_1|>\\n\\n' }}
{{- message.content }}{%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}
{{- '<|reserved_2|>' }}
{%- endfor %}
"""
PLAIN = "{%- for message in messages %}{{- '### ' + message.role + ':\\n' + message.content + '\\n' }}{%- endfor %}"

CALL = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": {"path": "a/b.txt"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read.",
        "parameters": {"type": "object", "properties": {}},
    },
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are careful. Today is Monday."},
    {"role": "user", "content": "\n first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "", "reasoning_content": "I think of it", "tool_calls": [CALL]},
    {"role": "tool", "content": "result one", "tool_call_id": "c"},
    {"role": "tool", "content": "result two", "tool_call_id": "c"},
    {"role": "assistant", "content": "last answer", "reasoning_content": "now I know"},
    {"role": "user", "content": "third question"},
]  # fmt: skip


@pytest.fixture(scope="module")
def bytewise() -> Any:
    return AutoTokenizer.from_pretrained(str(ensure_demo_model()))


@pytest.fixture(scope="module")
def merging() -> Any:
    """A tokenizer with merges, of line ends and brackets too, that splits as Qwen's does."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    words = (
        r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    texts = [
        TOOLS_FIRST,
        HEADERS,
        str(MESSAGES),
        str(TOOL),
        'user\n\n\n assistant\n\n system\n </tools>\n "}}\n >\n',
    ]
    made.train_from_iterator(
        texts * 20,
        trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    names = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>")
    more = tuple(f"<|reserved_{index}|>" for index in range(3))
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in names + more])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def places(
    tokenizer: Any, template: str | None, messages: list[dict[str, Any]], words: list[str], tools: Any = None
):
    """Return the label of the span that each of the words begins in."""
    structure = learn(tokenizer, template)
    given = {} if template is None else {"chat_template": template}
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **given)
    spans = prompt_spans(structure, tokenizer.encode(text, add_special_tokens=False))
    found = {}
    for word in words:
        before = len(tokenizer.encode(text[: text.index(word)], add_special_tokens=False))
        found[word] = span_at(spans, before).label
    return found


EXPECTED = {
    "Today": "system",
    "read_file": "tools",
    "first question": "user turn 1",
    "first answer": "assistant turn 1",
    "second question": "user turn 2",
    "a/b.txt": "assistant turn 2",
    "result one": "tool result 1",
    "result two": "tool result 2",
    "last answer": "assistant turn 3",
    "third question": "user turn 3",
}


@pytest.mark.parametrize("kind", ["bytewise", "merging"])
def test_tools_before_the_system_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    thoughts = {
        "I think of it": "thinking of assistant turn 2",
        "now I know": "thinking of assistant turn 3",
    }
    wanted = EXPECTED | thoughts
    assert places(tokenizer, TOOLS_FIRST, MESSAGES, list(wanted), [TOOL]) == wanted


def test_the_demo_model_s_own_template(bytewise: Any) -> None:
    assert (
        places(bytewise, None, MESSAGES, list(EXPECTED), [TOOL]) == EXPECTED
    )  # thoughts before a user's turn are dropped
    shown = places(bytewise, None, MESSAGES[:-1], ["I think of it", "now I know", "last answer"])
    assert shown == {
        "I think of it": "thinking of assistant turn 2",
        "now I know": "thinking of assistant turn 3",
        "last answer": "assistant turn 3",
    }


@pytest.mark.parametrize("kind", ["bytewise", "merging"])
def test_roles_between_two_special_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    wanted = {word: label for word, label in EXPECTED.items() if word not in ("Today", "read_file")}
    assert places(tokenizer, HEADERS, MESSAGES[1:], list(wanted)) == wanted
    assert Part.THINKING not in {marker.opens for marker in learn(tokenizer, HEADERS).markers}


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (PLAIN, "no special tokens"),
        ("{{- 'always the same' }}", "does not render"),
        ("{{- raise_exception('nothing works') }}", "does not render"),
        ("{%- for m in messages %}{{- '<|im_start|>' + m.content }}{%- endfor %}", "no special tokens"),
    ],
)
def test_templates_that_tell_nothing_are_refused(bytewise: Any, template: str, why: str) -> None:
    with pytest.raises(TemplateError, match=why):
        learn(bytewise, template)


def test_a_template_whose_markers_lead_astray_is_refused(bytewise: Any) -> None:
    # The last question stands in the system part too.
    template = (
        "{{- '<|im_start|>system\\n' + messages[-1].content + messages[0].content + '<|im_end|>' }}"
        "{%- for m in messages[1:] %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{%- endfor %}"
    )
    with pytest.raises(TemplateError, match="find system where user turn is"):
        learn(bytewise, template)


def test_a_tokenizer_without_a_template(merging: Any) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        learn(merging)


def test_the_template_of_the_flag_is_the_one_that_counts(bytewise: Any, tmp_path: Path) -> None:
    file = tmp_path / "headers.jinja"
    file.write_text(HEADERS, encoding="utf-8")
    assert prompt_structure(bytewise, str(file)).markers == learn(bytewise, HEADERS.strip("\n")).markers
    assert prompt_structure(bytewise, None).markers == learn(bytewise).markers
    with pytest.raises(TemplateError, match="chatml is no Jinja file"):
        prompt_structure(bytewise, "chatml")
    with pytest.raises(TemplateError, match="--skip-tokenizer-init"):
        prompt_structure(None, None)


def test_without_a_structure_positions_have_no_place(bytewise: Any, caplog: pytest.LogCaptureFixture) -> None:
    def found(template: str | None) -> TemplateStructure:
        worker = SimpleNamespace(tokenizer=bytewise)
        return template_structure(
            SimpleNamespace(tp_worker=worker, server_args=SimpleNamespace(chat_template=template))
        )

    assert found(None).note == "on" and found(None).structure is not None
    with caplog.at_level(logging.INFO):
        assert found("chatml") == TemplateStructure(None, "off: --chat-template chatml is no Jinja file")
    assert "without their place" in caplog.text


def test_ranks_with_different_templates_use_none(bytewise: Any, caplog: pytest.LogCaptureFixture) -> None:
    mine = TemplateStructure(learn(bytewise), "on")
    asked: list[Any] = []

    def all_have(items: Any) -> list[Any]:
        asked.extend(items)
        return list(items)

    assert agreed(mine, all_have) is mine and asked == [mine.structure.markers]
    nothing = TemplateStructure(None, "off: x")
    assert agreed(nothing, all_have) is nothing
    found = agreed(mine, lambda items: [])
    assert found.structure is None and "different chat templates" in found.note
    assert "give every node the same tokenizer" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        # The system's words behind the user's: what is between them cannot be found.
        "{%- for m in messages | reverse %}{{- '<|im_start|>' + m.role + m.content }}{%- endfor %}",
        None,  # a tokenizer that lacks what is asked of it
    ],
)
def test_no_template_and_no_tokenizer_keeps_a_server_from_starting(
    bytewise, tmp_path, caplog, change
) -> None:
    tokenizer = bytewise if change else SimpleNamespace(chat_template="x")
    path = None
    if change:
        path = str(tmp_path / "template.jinja")
        Path(path).write_text(change)
    ctx = SimpleNamespace(
        tp_worker=SimpleNamespace(tokenizer=tokenizer), server_args=SimpleNamespace(chat_template=path)
    )
    found = template_structure(ctx)
    assert found.structure is None and found.note.startswith("off: its chat template cannot be read (")
    assert "without their place" in caplog.text
