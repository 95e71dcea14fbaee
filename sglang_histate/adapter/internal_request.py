"""A request that the scheduler makes for itself: computed like any other, answered to nobody, kept by nobody.

It goes in by the door that all requests use, on every rank in the same step. Its name begins like that of a health check,
so that SGLang leaves it out of its own step times and drops whatever might still be reported about it.
"""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams


def request_name(number: int) -> str:
    """Return the request id of the internal request with this number."""
    return f"{HEALTH_CHECK_RID_PREFIX}_HISTATE_VERIFY_{number}_"


def submit(scheduler: Any, name: str, tokens: array, namespace: str) -> None:
    """Put a request for one token after `tokens` into the queue. `namespace` is one that nothing else uses.

    The cache hears of it as of any arrival; `mark` it there.
    """
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    scheduler.handle_generate_request(
        TokenizedGenerateReqInput(
            rid=name,
            input_text="",
            input_ids=tokens,
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            extra_key=namespace,
        )
    )


def mark(req: Any) -> None:
    """Let the request go unheard: it is not put into the tree, and its output counts as sent."""
    req.skip_radix_cache_insert = True
    req.finished_output = True


def cancel(scheduler: Any, name: str) -> None:
    """Take the request out of the queue, or end it after the chunk that is being computed."""
    scheduler.abort_request(AbortReq(rid=name))
