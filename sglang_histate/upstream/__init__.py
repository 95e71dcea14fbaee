"""The pin, the patches and the overlay: how HiState reaches into SGLang without touching the installed
package.

Nothing here imports sglang. Lifecycle: `pin.check` (right release?) -> `overlay.build_overlay` (patched tree
in the user's cache) -> `overlay.overlay_env` (environment of the server process) ->
`selfcheck.check_active_overlay` (inside every process that serves). `gates` holds what the tests and
``histate patches check`` verify.
"""

from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.overlay import Overlay, build_overlay, groups_for, overlay_env
from sglang_histate.upstream.selfcheck import check_active_overlay

__all__ = ["Overlay", "UpstreamError", "build_overlay", "check_active_overlay", "groups_for", "overlay_env"]
