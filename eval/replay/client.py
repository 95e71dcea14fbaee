"""One streamed completion of exact token ids, by the OpenAI client, timed where it is received.

Every OpenAI-compatible server that takes token ids as a prompt will do. An SGLang server is asked for more: cached
tokens by tier, the ids of the answer, and, where wanted, the recorded answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from eval.internal_hits.client import AskFailed, Cached, cached_of
from eval.replay import recorded_tokens

TIMEOUT_S = 900.0


class NoCacheReport(AskFailed):
    """An answer says nothing about cached tokens."""


@dataclass(frozen=True)
class Answer:
    """What came back. Times are the event loop's: before sending, at the first token, at the last.

    `output_ids` is empty where the server does not tell; `by_tier` is False where `cached` is a total only, counted
    as device.
    """

    sent_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    output_ids: tuple[int, ...]
    cached: Cached
    by_tier: bool


class Client:
    """Asks one server. `base_url` ends in ``/v1``; the key is ``OPENAI_API_KEY``, if the server wants one.

    `sglang`: send SGLang's own fields. `force`: make it answer with the recorded tokens (SGLang only).
    """

    def __init__(
        self, base_url: str, model: str, *, sglang: bool, force: bool, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.model = model
        self.sglang = sglang
        self.force = force
        self._client = connection(base_url, timeout_s)
        # The client imports its parts when they are first used; the first request should not pay for that.
        self._completions = self._client.completions

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, prompt: Sequence[int], recorded: Sequence[int]) -> Answer:
        """Complete `prompt` by as many tokens as `recorded` has, or by these.

        Raises:
            NoCacheReport: see there.
            AskFailed: the server refused, the connection broke, or the answer is not what was asked for.
        """
        # In the body, past the client's own check of every token, which takes 10 ms for 1,000 of them and stops
        # all other requests meanwhile.
        extra: dict[str, Any] = {"prompt": list(prompt), "ignore_eos": True}
        if self.sglang:
            extra |= {"return_cached_tokens_details": True, "return_token_ids": True}
        if self.force:
            extra |= recorded_tokens.fields(recorded)
        sent_s = asyncio.get_running_loop().time()
        try:
            stream = await self._completions.create(
                model=self.model,
                prompt="",
                max_tokens=len(recorded),
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
            )
            return await self._read(stream, sent_s, prompt, recorded)
        except openai.APITimeoutError:
            raise AskFailed("no answer in time") from None
        except openai.OpenAIError as error:
            cause = f": {error.__cause__}" if error.__cause__ else ""
            raise AskFailed(f"{type(error).__name__}: {error}{cause}") from None
        except (httpx.HTTPError, ValueError) as error:  # the stream broke off, or is no JSON
            raise AskFailed(f"{type(error).__name__}: {error}") from None

    async def _read(
        self, stream: Any, sent_s: float, prompt: Sequence[int], recorded: Sequence[int]
    ) -> Answer:
        loop = asyncio.get_running_loop()
        first_s = last_s = None
        ids: list[int] = []
        details = usage = None
        async for chunk in stream:
            more = chunk.model_extra or {}
            if more.get("sglext"):
                details = more["sglext"].get("cached_tokens_details")
            usage = chunk.usage or usage
            for choice in chunk.choices:
                new = (choice.model_extra or {}).get("token_ids") or []
                if new or choice.text:
                    last_s = loop.time()
                    first_s = last_s if first_s is None else first_s
                    ids += new
        if usage is None or first_s is None or last_s is None:
            raise AskFailed("the stream ended without a token or without its usage")
        if usage.prompt_tokens != len(prompt):
            raise AskFailed(f"the server counted {usage.prompt_tokens} tokens in a prompt of {len(prompt)}")
        if self.force and ids != list(recorded):
            raise AskFailed("the answer is not the recorded one")
        if self.sglang and usage.completion_tokens != len(recorded):
            raise AskFailed(f"{usage.completion_tokens} tokens came back instead of {len(recorded)}")
        return Answer(
            sent_s,
            first_s,
            last_s,
            usage.prompt_tokens,
            usage.completion_tokens,
            tuple(ids),
            _cached(usage, details),
            by_tier=details is not None,
        )


def connection(base_url: str, timeout_s: float) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        max_retries=0,  # a request that is sent again would be timed wrongly
        timeout=timeout_s,
    )


def _cached(usage: Any, details: dict[str, Any] | None) -> Cached:
    reported = usage.prompt_tokens_details
    total = None if reported is None else reported.cached_tokens
    if details is not None:
        parts = [int(details.get(name) or 0) for name in ("device", "host", "storage")]
        return cached_of(
            {"cached_tokens": sum(parts) if total is None else total, "cached_tokens_details": details}
        )
    if total is None:
        raise NoCacheReport("the answer does not say how many tokens of the prompt were cached")
    return Cached(total=total, device=total)
