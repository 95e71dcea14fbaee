"""Make an SGLang server answer with the recorded tokens, so that later prompts match its answers as in life.

SGLang runs a request's own logit processor where it samples (``--enable-custom-logit-processor``, stock and HiState
alike). This one leaves one token possible: the one recorded for the position that the request has reached. The
position is read from what the scheduler has committed, not from the answer so far, which lags a step behind when
scheduling and computing overlap; so it is right with and without overlap, after a retraction, and in the middle of a
prompt that is computed in chunks, where nothing is forced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

SERVER_FLAG = "--enable-custom-logit-processor"


class RecordedTokens:
    """The processor, run by the server. `custom_params["recorded"]` are the tokens of a request's answer."""

    # As if typed into a script: dill then packs the code itself, not a reference to this file, which the server
    # cannot import.
    __module__ = "__main__"

    def __call__(self, logits: Any, custom_param_list: Any) -> Any:
        for row, params in enumerate(custom_param_list):
            request, recorded = params["__req__"], params["recorded"]
            place = request.kv.kv_committed_len - len(request.origin_input_ids)
            if 0 <= place < len(recorded):
                logits[row, :] = float("-inf")
                logits[row, recorded[place]] = 0.0
        return logits


RecordedTokens.__call__.__module__ = "__main__"


@cache
def processor() -> str:
    """Return the processor as SGLang takes it."""
    import dill  # installed by sglang, which reads it back

    return json.dumps({"callable": dill.dumps(RecordedTokens, recurse=True).hex()})


def fields(recorded: Sequence[int]) -> dict[str, Any]:
    """Return what a request needs besides its prompt, to be answered by `recorded`."""
    return {"custom_logit_processor": processor(), "custom_params": {"recorded": list(recorded)}}
