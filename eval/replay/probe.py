"""What a server is, found out before it is measured, and whether it can be measured at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass

import openai

from eval.internal_hits.client import AskFailed
from eval.replay.client import Client, NoCacheReport, connection
from eval.replay.recorded_tokens import SERVER_FLAG
from eval.replay.requests import PAGE, SessionRequests, Shape

_PROBE_TOKENS = 8 * PAGE + 1
# SGLang publishes a prompt a moment after its answer, and states after that.
_ATTEMPTS, _PAUSE_S = 5, 0.5


class Unusable(RuntimeError):
    """A server cannot be measured; the message is one sentence that says why and what to do."""


@dataclass(frozen=True)
class Target:
    """`context_tokens` is the longest prompt with its answer, None if the server does not tell."""

    base_url: str
    model: str
    sglang: bool
    context_tokens: int | None


async def find(base_url: str, model: str | None = None) -> Target:
    """Ask a server for its models; take `model`, or the first one.

    Raises:
        Unusable: it does not answer, or has no such model.
    """
    async with connection(base_url, timeout_s=30.0) as client:
        try:
            models = (await client.models.list()).data
        except openai.OpenAIError as error:
            raise Unusable(
                f"{base_url} does not list its models ({error}): give a URL that ends in /v1"
            ) from None
    names = [one.id for one in models]
    if model is None and not names:
        raise Unusable(f"{base_url} names no model: give --model")
    if model is not None and names and model not in names:
        raise Unusable(f"--model {model}: {base_url} serves {', '.join(names)}")
    chosen = next((one for one in models if model in (None, one.id)), None)
    more = {} if chosen is None else chosen.model_extra or {}
    context = more.get("max_model_len")
    return Target(
        base_url,
        chosen.id if chosen is not None else str(model),
        chosen is not None and chosen.owned_by == "sglang",
        context if isinstance(context, int) else None,
    )


def check_lengths(sessions: Iterable[SessionRequests], context_tokens: int | None, what: str) -> int:
    """Return the tokens of the longest prompt with its answer.

    Raises:
        Unusable: they are more than `context_tokens`, which is the `what` of a server.
    """
    longest = max(
        (len(request.prompt) + len(request.output), request.key)
        for session in sessions
        for request in session.all_requests()
    )
    if context_tokens is not None and longest[0] > context_tokens:
        session, agent, turn = longest[1]
        name = f"{session}/{agent}" if agent else session
        raise Unusable(
            f"the longest prompt with its answer has {longest[0]} tokens (turn {turn} of {name}), the server's {what} "
            f"{context_tokens}: lower --context or --tokens-per-block, or give the server more"
        )
    return longest[0]


async def check_reports_cache(client: Client, shape: Shape, seed: str, expects_hits: bool = True) -> None:
    """Send one prompt twice.

    Raises:
        Unusable: the server says nothing about cached tokens, or, where hits are expected, that there were none.
        AskFailed: a request failed.
    """
    prompt = random_tokens(shape, f"probe/{seed}", _PROBE_TOKENS)
    answer = random_tokens(shape, f"answer/{seed}", 4)
    silent = False
    for attempt in range(_ATTEMPTS):
        try:
            found = await client.ask(prompt, answer)
        except NoCacheReport:
            if silent:  # some leave the field out where nothing is cached, so one silence is no proof
                raise Unusable(
                    "the server does not report cached tokens (usage.prompt_tokens_details.cached_tokens), so that no "
                    "hit can be counted: start SGLang with --enable-cache-report, vLLM with "
                    "--enable-prompt-tokens-details"
                ) from None
            silent = True
            continue
        if attempt and (found.cached.total or not expects_hits):
            return
        await asyncio.sleep(_PAUSE_S if attempt else 0)
    raise Unusable(
        f"the server reports no cached tokens for a prompt that it has just had {_ATTEMPTS} times: switch its prefix "
        "cache on, or name it with --no-cache if that is what is to be measured"
    )


def random_tokens(shape: Shape, seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [shape.first_id + draw.randrange(shape.vocabulary) for _ in range(count)]


async def check_recorded_answers(client: Client, shape: Shape) -> None:
    """Check that the server says what it is told to, if it is.

    Raises:
        Unusable: it does not.
    """
    if not client.force:
        return
    try:
        await client.ask(random_tokens(shape, "question", PAGE), random_tokens(shape, "told", 8))
    except NoCacheReport:
        pass  # another check's business
    except AskFailed as error:
        raise Unusable(
            f"the server cannot be made to say the recorded answers ({error}): start it with "
            f"{SERVER_FLAG}, or replay with --outputs free"
        ) from None
