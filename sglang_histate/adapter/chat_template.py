"""Finds the chat template that this server uses and learns its markers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_histate.adapter.chat_markers import TemplateError, learn
from sglang_histate.policy.structure import Marker, Structure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TemplateStructure:
    """What the chat template tells of prompts. `structure` is None where it tells nothing; `note` says so for the status."""

    structure: Structure | None
    note: str


def template_structure(ctx: Any) -> TemplateStructure:
    """Return the structure of this server's prompts; why there is none is logged. `ctx` is what SGLang builds the cache from.

    Each rank reads its own copy of the tokenizer; see `agreed`.
    """
    try:
        structure = prompt_structure(ctx.tp_worker.tokenizer, ctx.server_args.chat_template)
        return TemplateStructure(structure, "on")
    except TemplateError as error:
        logger.info("HiState: positions in prompts are given without their place, because %s", error)
        return TemplateStructure(None, f"off: {error}")
    except Exception as error:  # tokenizers and templates are programs of others; serving goes on without
        logger.warning(
            "HiState: positions in prompts are given without their place, because the chat template cannot be read",
            exc_info=True,
        )
        return TemplateStructure(None, f"off: its chat template cannot be read ({type(error).__name__})")


def agreed(
    found: TemplateStructure, common: Callable[[Sequence[tuple[Marker, ...] | None]], list[Any]]
) -> TemplateStructure:
    """Return `found`, or nothing where the ranks have read different templates: captures are planned by it.

    `common` returns what all ranks have of a list; each of them calls this in the same step.
    """
    markers = None if found.structure is None else found.structure.markers
    if common([markers]):
        return found
    logger.warning(
        "HiState: positions in prompts are given without their place, because the ranks have different chat templates: give "
        "every node the same tokenizer and --chat-template"
    )
    return TemplateStructure(None, "off: the ranks have different chat templates")


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
