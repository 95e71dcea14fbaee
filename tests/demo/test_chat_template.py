"""The chat template writes ChatML as Qwen3 does."""

from __future__ import annotations

import json

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hi"}


def render(tokenizer, messages, **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_plain_turns(tokenizer):
    assert render(tokenizer, [SYSTEM, USER], add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(tokenizer, [USER]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_thinking_can_be_switched_off(tokenizer):
    on = render(tokenizer, [USER], add_generation_prompt=True, enable_thinking=True)
    off = render(tokenizer, [USER], add_generation_prompt=True, enable_thinking=False)
    assert off == on + "<think>\n\n</think>\n\n"


def test_tools_are_listed_in_the_system_block(tokenizer):
    for messages in ([USER], [SYSTEM, USER]):
        text = render(tokenizer, messages, tools=[TOOL])
        block, rest = text.split("<|im_end|>\n", 1)
        assert block.startswith("<|im_start|>system\n")
        assert ("Be brief.\n\n# Tools" in block) == (SYSTEM in messages)
        listed = block.split("<tools>\n")[1].split("\n</tools>")[0]
        assert json.loads(listed) == TOOL
        assert rest == "<|im_start|>user\nhi<|im_end|>\n"


def test_tool_calls_and_results(tokenizer):
    messages = [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "blue"},
        {"role": "tool", "content": "clear"},
    ]
    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nwhy\n</think>\n\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nblue\n</tool_response>\n"
        "<tool_response>\nclear\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_may_be_a_json_string(tokenizer):
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert '"arguments": {"at": "sky"}}' in render(tokenizer, [USER, message])


def test_thinking_before_the_last_user_message_is_dropped(tokenizer):
    as_field = {"role": "assistant", "content": "yes", "reasoning_content": "why"}
    in_text = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes"}
    for assistant in (as_field, in_text):
        last = render(tokenizer, [USER, assistant])
        assert last.endswith("assistant\n<think>\nwhy\n</think>\n\nyes<|im_end|>\n")
        earlier = render(tokenizer, [USER, assistant, USER])
        assert "assistant\nyes<|im_end|>\n" in earlier
        assert "why" not in earlier
