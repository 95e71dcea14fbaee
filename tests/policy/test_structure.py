"""The parts of a prompt follow from token ids: made-up conversations, and whatever else the ids may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.structure import (
    Marker,
    Part,
    Span,
    Structure,
    head_end,
    message_starts,
    span_at,
)

START, END, SYSTEM, USER, ASSISTANT, THINK, ENDTHINK, RESULT, TOOLS, ENDTOOLS = range(100, 110)
NEWLINE = 10
IN_ANSWER = frozenset({Part.ASSISTANT})
MARKERS = (
    Marker((START, SYSTEM), Part.SYSTEM),
    Marker((START, USER), Part.USER),
    Marker((START, USER, NEWLINE, RESULT), Part.TOOL_RESULT),
    Marker((RESULT,), Part.TOOL_RESULT, frozenset({Part.USER, Part.TOOL_RESULT})),
    Marker((START, ASSISTANT), Part.ASSISTANT),
    Marker((THINK,), Part.THINKING, IN_ANSWER),
    Marker((ENDTHINK,), Part.ASSISTANT, frozenset({Part.THINKING}), resumes=True),
    Marker((TOOLS, NEWLINE), Part.TOOLS, frozenset({Part.SYSTEM})),
    Marker((ENDTOOLS,), Part.SYSTEM, frozenset({Part.TOOLS}), resumes=True),
)
STRUCTURE = Structure(MARKERS)

content = st.lists(st.integers(11, 60), max_size=6)
turns = st.one_of(
    st.tuples(st.just("user"), content),
    st.tuples(st.just("results"), st.lists(content, min_size=1, max_size=3)),
    st.tuples(st.just("assistant"), content),
    st.tuples(st.just("thinking"), st.tuples(content, content)),
)
# Ids of markers and others, so that markers are often there, cut short or in the wrong place.
any_tokens = st.lists(st.sampled_from([START, END, SYSTEM, USER, ASSISTANT, THINK, ENDTHINK, RESULT,
                                       TOOLS, ENDTOOLS, NEWLINE, 20, 21]), max_size=60)  # fmt: skip


class Conversation:
    """Writes turns as a template does and notes what stands where."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.expected: list[tuple[Part, int, int]] = []  # kind, number, start

    def write(self, part: Part, number: int, *ids: int) -> None:
        self.expected.append((part, number, len(self.tokens)))
        self.tokens += ids

    def spans(self) -> list[Span]:
        ends = [start for _, _, start in self.expected[1:]] + [len(self.tokens)]
        return [Span(*one, end) for one, end in zip(self.expected, ends, strict=True)]


@given(tools=st.none() | content, system=content, script=st.lists(turns, max_size=8))
def test_spans_of_a_conversation(tools, system, script) -> None:
    said = Conversation()
    said.write(Part.SYSTEM, 0, START, SYSTEM, NEWLINE, *system)
    if tools is not None:
        said.write(Part.TOOLS, 0, TOOLS, NEWLINE, *tools)
        said.write(Part.SYSTEM, 0, ENDTOOLS, NEWLINE)
    said.tokens += [END, NEWLINE]
    users = answers = results = 0
    for kind, what in script:
        if kind == "user":
            users += 1
            said.write(Part.USER, users, START, USER, NEWLINE, *what)
        elif kind == "results":
            for index, one in enumerate(what):
                results += 1
                opening = (RESULT,) if index else (START, USER, NEWLINE, RESULT)
                said.write(Part.TOOL_RESULT, results, *opening, *one)
        else:
            answers += 1
            thought, answer = what if kind == "thinking" else (None, what)
            said.write(Part.ASSISTANT, answers, START, ASSISTANT, NEWLINE)
            if thought is not None:
                said.write(Part.THINKING, answers, THINK, *thought)
                said.write(Part.ASSISTANT, answers, ENDTHINK)
            said.tokens += answer
        said.tokens += [END, NEWLINE]
    assert STRUCTURE.spans(said.tokens) == said.spans()


@given(any_tokens)
def test_spans_cover_every_token_once(tokens) -> None:
    spans = STRUCTURE.spans(tokens)
    covered = [position for span in spans for position in range(span.start, span.end)]
    assert covered == list(range(len(tokens)))
    assert all(span.end > span.start for span in spans)
    for position in range(len(tokens)):
        span = span_at(spans, position)
        assert span.start <= position < span.end


@given(any_tokens, st.integers(0, 60))
def test_what_comes_later_changes_nothing_before(tokens, cut) -> None:
    longest = max(len(marker.ids) for marker in MARKERS)
    whole, short = STRUCTURE.spans(tokens), STRUCTURE.spans(tokens[:cut])
    # Only a marker that the cut went through may read otherwise.
    for position in range(min(cut, len(tokens)) - longest + 1):
        one, other = span_at(whole, position), span_at(short, position)
        assert (one.part, one.number, one.start) == (other.part, other.number, other.start)


@given(any_tokens, st.data())
def test_any_starts_that_include_the_markers_will_do(tokens, data) -> None:
    first = {marker.ids[0] for marker in MARKERS}
    needed = {at for at, token in enumerate(tokens) if token in first}
    more = data.draw(st.sets(st.integers(0, len(tokens) - 1))) if tokens else set()
    assert STRUCTURE.spans(tokens, sorted(needed | more)) == STRUCTURE.spans(tokens)


@given(st.lists(st.integers(0, 60), max_size=30))
def test_a_prompt_without_markers_is_one_span(tokens) -> None:
    expected = [Span(Part.HEAD, 0, 0, len(tokens))] if tokens else []
    assert STRUCTURE.spans(tokens) == expected
    assert Structure(()).spans(tokens) == expected


def test_a_quoted_marker_has_its_meaning_only_where_it_can_stand() -> None:
    tokens = [START, USER, NEWLINE, THINK, 20, ENDTHINK, END]
    assert STRUCTURE.spans(tokens) == [Span(Part.USER, 1, 0, 7)]


def test_labels() -> None:
    assert Span(Part.SYSTEM, 0, 0, 1).label == "system"
    assert Span(Part.USER, 2, 0, 1).label == "user turn 2"
    assert Span(Part.THINKING, 3, 0, 1).label == "thinking of assistant turn 3"
    assert Span(Part.TOOL_RESULT, 4, 0, 1).label == "tool result 4"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="user turn"):
        Marker((), Part.USER)
    with pytest.raises(ValueError, match="token 0"):
        span_at([], 0)
    with pytest.raises(ValueError, match="token -1"):
        span_at([Span(Part.HEAD, 0, 0, 3)], -1)


@given(system=content, tools=st.none() | content, script=st.lists(turns, max_size=8), asks=st.booleans())
def test_messages_begin_where_a_client_sent_one(system, tools, script, asks) -> None:
    """Also with thinking inside, tools inside the system message, and several results in one turn."""
    ids, starts = [START, SYSTEM, NEWLINE, *system], [0]
    if tools is not None:
        ids += [TOOLS, NEWLINE, *tools, ENDTOOLS, 20]
    for kind, what in script:
        if kind == "results":
            for number, text in enumerate(what):
                starts.append(len(ids))
                ids += [START, USER, NEWLINE, RESULT, *text] if number == 0 else [RESULT, *text]
            continue
        starts.append(len(ids))
        if kind == "thinking":
            ids += [START, ASSISTANT, THINK, *what[0], ENDTHINK, *what[1], END]
        else:
            ids += [START, USER if kind == "user" else ASSISTANT, NEWLINE, *what, END]
    if asks:
        ids += [START, ASSISTANT, NEWLINE, THINK]
    elif script and script[-1][0] in ("assistant", "thinking"):
        starts.pop()  # what an answer goes on from is taken for the answer
    assert message_starts(STRUCTURE.spans(ids)) == starts


def test_a_prompt_without_markers_has_no_messages() -> None:
    assert message_starts([]) == message_starts(STRUCTURE.spans([20] * 50)) == []


def test_a_prompt_of_nothing_but_markers_is_read_in_one_pass() -> None:
    """Each span is looked at once: a client can send tens of thousands."""
    ids = [START, SYSTEM] * 30_000
    assert len(message_starts(STRUCTURE.spans(ids))) == 30_000


@given(tools=st.none() | content, system=content)
def test_system_and_tools_end_where_the_first_message_begins(tools, system) -> None:
    said = Conversation()
    said.write(Part.SYSTEM, 0, START, SYSTEM, NEWLINE, *system)
    if tools is not None:
        said.write(Part.TOOLS, 0, TOOLS, NEWLINE, *tools)
        said.write(Part.SYSTEM, 0, ENDTOOLS)
    assert head_end(STRUCTURE.spans(said.tokens)) is None, "there is no message"
    end = len(said.tokens)
    said.write(Part.USER, 1, START, USER, NEWLINE, 20)
    assert head_end(STRUCTURE.spans(said.tokens)) == end


def test_a_prompt_that_begins_with_a_message_has_no_head() -> None:
    assert head_end(STRUCTURE.spans([START, USER, 20])) == 0
    assert head_end(STRUCTURE.spans([])) is None
