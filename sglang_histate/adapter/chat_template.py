"""Starts the explanations of a rank: finds the chat template that this server uses and learns its markers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang_histate.adapter.chat_markers import TemplateError, learn
from sglang_histate.adapter.explanations import Explanations
from sglang_histate.policy.structure import Structure

logger = logging.getLogger(__name__)


def start_explanations(ctx: Any, cache: Any, requests: int) -> Explanations:
    """Return the explanations of `requests` requests. `ctx` is what SGLang builds the cache from."""
    structure, note = None, "on"
    try:
        structure = prompt_structure(ctx.tp_worker.tokenizer, ctx.server_args.chat_template)
    except TemplateError as error:
        note = f"off: {error}"
        logger.info("HiState: positions in prompts are given without their place, because %s", error)
    except (
        Exception
    ) as error:  # tokenizers and templates are programs of others, and nothing is decided by this
        note = f"off: its chat template cannot be read ({type(error).__name__})"
        logger.warning(
            "HiState: positions in prompts are given without their place, because the chat template cannot be read",
            exc_info=True,
        )
    return Explanations(
        cache.tree_core,
        page_size=cache.page_size,
        requests=requests,
        structure=structure,
        structure_note=note,
    )


def prompt_structure(tokenizer: Any, chat_template: str | None) -> Structure:
    """Return the structure of prompts by the template of the flag ``--chat-template``, or the tokenizer's own.

    Raises:
        TemplateError: the parts of prompts cannot be told.
    """
    if tokenizer is None:
        raise TemplateError("the server has no tokenizer (--skip-tokenizer-init)")
    if chat_template is None:
        return learn(tokenizer)
    if not chat_template.endswith(".jinja"):
        raise TemplateError(f"--chat-template {chat_template} is no Jinja file")
    # As SGLang reads it.
    text = Path(chat_template).read_text(encoding="utf-8").strip("\n")
    return learn(tokenizer, text.replace("\\n", "\n"))
