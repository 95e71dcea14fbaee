"""The start-up self check that every serving process makes: never serve with HiState half on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_histate.upstream import manifest, pin
from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.overlay import GROUPS_VARIABLE, OVERLAY_VARIABLE

_RESTART = "start the server with python -m sglang_histate.launch_server"


def check_active_overlay(
    expected_groups: Sequence[str],
    sglang_file: str | Path,
    environ: Mapping[str, str] | None = None,
) -> manifest.Manifest | None:
    """Check that this process runs the SGLang it should.

    Args:
        expected_groups: the patch groups that must be active; empty means the installed package as it is.
        sglang_file: ``sglang.__file__`` of this process; passed in because nothing here imports sglang.
        environ: default is this process's environment.

    Returns:
        the active overlay's manifest, None for no groups.

    Raises:
        UpstreamError: one sentence that says what is wrong and what to do.
    """
    env = os.environ if environ is None else environ
    pin.check()
    active = Path(sglang_file).parent
    named = env.get(OVERLAY_VARIABLE)
    if not expected_groups:
        if named is not None or (active.parent / manifest.MANIFEST).is_file():
            raise UpstreamError(
                f"sglang comes from the overlay {active.parent} but none was asked for: {_RESTART}"
            )
        return None
    if not named:
        raise UpstreamError(
            f"this process runs without the overlay ({OVERLAY_VARIABLE} is not set): {_RESTART}"
        )
    # Not resolved: inside the overlay __init__.py is a link into the installed package, its folder is not.
    if os.path.realpath(active) != os.path.realpath(Path(named) / "sglang"):
        raise UpstreamError(
            f"sglang was imported from {active} and not from the overlay {named}: "
            "another sglang comes earlier on sys.path, such as one in the current directory"
        )
    problem = manifest.verify(Path(named))
    if problem is not None:
        raise UpstreamError(f"the overlay {named} is not usable, {problem}: remove it and {_RESTART}")
    found = manifest.read(Path(named))
    expected = sorted(expected_groups)
    if sorted(found.groups) != expected or sorted(env.get(GROUPS_VARIABLE, "").split(",")) != expected:
        raise UpstreamError(
            f"the overlay has the patch groups {', '.join(found.groups)} "
            f"but this server needs {', '.join(expected_groups)}: {_RESTART}"
        )
    if found.version != pin.read_pin().version:
        raise UpstreamError(
            f"the overlay {named} was built for sglang {found.version}: remove it and {_RESTART}"
        )
    return found
