"""Names that must be importable but have no CPU form here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def absent(name: str) -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError and says which op was missing."""

    def raise_absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU form in this build: speculative decoding, mixture-of-experts, "
            "quantised models and `--hicache-io-backend kernel` need a GPU"
        )

    raise_absent.__name__ = name
    return raise_absent
