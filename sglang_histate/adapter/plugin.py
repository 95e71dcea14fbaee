"""SGLang's plugin entry point: registers the radix cache backend ``histate`` in every process of our server,
leaves Ctrl-C to the first of them, and ends what makes their imports faster.

Without the launcher's environment it does nothing, so a plain sglang in the same virtual environment stays plain.
A failure here is logged and skipped by sglang; the server then stops because the backend is not registered.
"""

from __future__ import annotations

import os

BACKEND = "histate"


def register() -> None:
    """Called by ``sglang.srt.plugins.load_plugins``."""
    from sglang_histate.adapter import collector
    from sglang_histate.upstream.overlay import GROUPS_VARIABLE

    collector.restore()
    if BACKEND not in os.environ.get(GROUPS_VARIABLE, "").split(","):
        return
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    from sglang_histate.adapter.interrupt import leave_it_to_the_parent

    leave_it_to_the_parent()
    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, _factory)


def _factory(ctx: object) -> object:
    # Imported late: the cache classes pull in the whole engine, which the tokenizer process does not need.
    from sglang_histate.adapter.build import build_cache

    return build_cache(ctx)  # type: ignore[arg-type]
