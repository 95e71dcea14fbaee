"""Start SGLang's server with HiState on: parse, refuse early, run. The overlay must be on PYTHONPATH already."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from sglang_histate.adapter import collector

collector.relax()  # Each process that is started from here begins with these imports too.
# ruff: noqa: E402

import sglang
from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.mem_cache.registry import get_radix_cache_factory
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils import kill_process_tree

from sglang_histate.adapter.checks import check_arguments, check_model, check_resolved, one_pool_sentence
from sglang_histate.adapter.flags import config_of
from sglang_histate.adapter.interrupt import INTERRUPTED
from sglang_histate.adapter.plugin import BACKEND
from sglang_histate.adapter.refusal import EXIT_CODE, Refusal, open_mailbox, read_message
from sglang_histate.config import ConfigError
from sglang_histate.upstream import UpstreamError, check_active_overlay
from sglang_histate.upstream.overlay import GROUPS_VARIABLE


def main(argv: list[str]) -> int:
    """Serve until stopped. Returns the exit code."""
    load_plugins()
    server_args = prepare_server_args(argv)
    groups = [group for group in os.environ.get(GROUPS_VARIABLE, "").split(",") if group]
    try:
        check_active_overlay(groups, str(sglang.__file__))
        if "histate" in groups:
            _check(server_args)
    except (ConfigError, Refusal, UpstreamError) as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return EXIT_CODE
    return _run(server_args)


def _check(server_args: ServerArgs) -> None:
    config = config_of(server_args)
    if get_radix_cache_factory(BACKEND) is None:
        raise Refusal(
            f"the plugin {BACKEND} was not loaded: name it in SGLANG_PLUGINS={os.environ.get('SGLANG_PLUGINS', '')}, or "
            "unset that variable"
        )
    check_arguments(server_args)
    try:
        model_config = model_config_of(server_args)
    except (
        Exception
    ) as error:  # whatever the loader of a foreign file may raise: it says that this is no model
        first_line = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise Refusal(
            f"--model-path {server_args.model_path} cannot be read as a model: {first_line.rstrip('.')}"
        ) from None
    check_model(model_config, server_args.model_path)
    try:
        server_args.resolve_once()
    except (ValueError, AssertionError, NotImplementedError) as error:
        # SGLang's own checks speak in its own flags; most are sentences already.
        sentence = str(error) or f"SGLang refuses this combination of flags: {_source_line(error)}"
        if server_args.enable_unified_memory:
            sentence = one_pool_sentence(sentence)
        raise Refusal(sentence) from None
    check_resolved(resolving_view(server_args), config)


def _source_line(error: BaseException) -> str:
    """Return the source line that raised `error`, for checks that say nothing else."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"


def _run(server_args: ServerArgs) -> int:
    from sglang.launch_server import run_server

    mailbox = open_mailbox()
    code = 0
    try:
        run_server(server_args)
    except KeyboardInterrupt:  # Ctrl-C while the model is loaded: nothing to save, nothing to explain
        code = INTERRUPTED
    except Exception:
        sentence = read_message(mailbox)
        if not sentence:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        code = EXIT_CODE
    finally:
        mailbox.unlink(missing_ok=True)
        kill_process_tree(os.getpid(), include_parent=False)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
