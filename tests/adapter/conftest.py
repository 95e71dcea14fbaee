"""Adapter tests run inside the pytest process on SGLang from the overlay, with a real radix cache over tiny pools.

The overlay must be the `sglang` of this process. Nothing else in the suite imports sglang in-process; if that changes,
the import below stops with one sentence instead of testing the wrong package. The environment and the path are as
before once sglang is loaded, so that tests which start processes see nothing of this.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest

from sglang_histate.upstream import build_overlay, groups_for
from sglang_histate.upstream.gpu import gpu_present

GPU = gpu_present()


def load_overlay() -> None:
    overlay = build_overlay(groups_for(True, GPU)).path
    loaded = sys.modules.get("sglang")
    if loaded is not None:
        if os.path.realpath(os.path.dirname(str(loaded.__file__))) != os.path.realpath(f"{overlay}/sglang"):
            raise RuntimeError(
                f"sglang was imported from {loaded.__file__} before the adapter tests, which need it from the "
                f"overlay {overlay}: run them in a process of their own"
            )
        return
    wanted = {} if GPU else {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so"}
    sys.path.insert(0, str(overlay))
    try:
        with mock.patch.dict(os.environ, wanted), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import sglang.srt.managers.schedule_batch
            import sglang.srt.mem_cache.registry  # noqa: F401
            from sglang.srt.utils import is_cpu

            assert GPU or is_cpu()  # remembers the answer
    finally:
        sys.path.remove(str(overlay))


load_overlay()


@pytest.fixture(scope="session", autouse=True)
def published() -> Iterator[None]:
    """SGLang's settings as a scheduler process has them; the model is never loaded."""
    from .engine import publish

    settings = publish()
    yield
    settings.restore()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny: threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
