"""The overlay: a copy-on-write view of the installed SGLang with our patches applied.

An overlay is a folder in the user's cache that holds ``sglang/`` (links into the installed package; real
copies of patched files and real folders on the way to them), where no GPU is used also a link to the
stand-in ``sgl_kernel``, and ``manifest.json``. The launcher puts it first on PYTHONPATH, so every spawned
process imports from it.

Lifecycle: `build_overlay` returns a verified overlay that already exists, or builds one in a folder beside
it and renames it in. A killed build leaves only a ``.build-*`` folder, which a later build removes. Two
builders may race: the second finds the first one's result. Nothing is ever written into the installed
package.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_histate.upstream import pin, tree
from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.gpu import gpu_present
from sglang_histate.upstream.locations import cache_dir, installed_sglang, sha256, stand_in_dir
from sglang_histate.upstream.manifest import FORMAT, MANIFEST, Manifest, PatchedFile, verify
from sglang_histate.upstream.series import GROUPS, Patch, read_group

OVERLAY_VARIABLE = "HISTATE_OVERLAY"
GROUPS_VARIABLE = "HISTATE_GROUPS"
_STALE_BUILD_S = 3600.0
_SKIPPED = "__pycache__"  # a real folder writes its own, so that no pyc of ours lands in site-packages


@dataclass(frozen=True)
class Overlay:
    """One overlay. `path` is None for no groups at all: the installed package as it is."""

    path: Path | None
    groups: tuple[str, ...]
    patches: tuple[str, ...]  # labels in the order applied
    stand_in: Path | None  # what `sgl_kernel` is replaced by


def groups_for(histate: bool, gpu: bool | None = None) -> tuple[str, ...]:
    """Return the patch groups of a run: "cpu" where no GPU is used, "histate" unless a stock server is
    wanted.

    Args:
        histate: whether HiState is on.
        gpu: whether the run uses a GPU; default is what `gpu_present` finds.
    """
    wanted = {"histate": histate, "cpu": not (gpu_present() if gpu is None else gpu)}
    return tuple(group for group in GROUPS if wanted[group])


@dataclass(frozen=True)
class _Plan:
    """Everything that decides what an overlay contains and where it lies."""

    overlay: Overlay
    key: str
    version: str
    installed: Path
    sets: list[tuple[Patch, ...]]


def build_overlay(
    groups: Sequence[str] = GROUPS,
    *,
    installed: Path | None = None,
    patches: Path | None = None,
    stand_in: Path | None = None,
    cache: Path | None = None,
) -> Overlay:
    """Return the overlay for `groups`, building it if the cache has no sound one.

    Args:
        groups: any of "cpu" and "histate"; the order does not matter.
        installed: the pristine package; default is the installed sglang, whose version is then checked.
        patches, stand_in, cache: folders to use instead of the shipped and the user's ones.

    Raises:
        UpstreamError: wrong release, a patch that does not apply, a changed installed file, a bad cache.
    """
    plan = _plan(groups, installed, patches, stand_in, cache)
    target = plan.overlay.path
    if target is None or _is_sound(target, plan.key):
        return plan.overlay
    files = tree.apply_groups(plan.sets, plan.installed.parent)
    pin.check_pristine(plan.installed, list(files))
    try:
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _check_owner(target.parent)
        _remove_stale(target.parent)
        building = Path(tempfile.mkdtemp(prefix=".build-", dir=target.parent))
        try:
            _fill(building, plan, files)
            _publish(building, target, plan.key)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise UpstreamError(
            f"cannot build the overlay in {target.parent} ({error.strerror}): "
            "set HISTATE_CACHE_DIR to a writable folder"
        ) from error
    return plan.overlay


def find_overlay(groups: Sequence[str] = GROUPS) -> tuple[Overlay, bool]:
    """Return the overlay that `build_overlay` would return, and whether a sound one is already there.

    Raises:
        UpstreamError: wrong release, a malformed patch, or a cache that another user can write.
    """
    plan = _plan(groups, None, None, None, None)
    return plan.overlay, plan.overlay.path is None or _is_sound(plan.overlay.path, plan.key)


def overlay_env(overlay: Overlay, base_env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a copy of `base_env` (default: this process's) in which Python imports sglang from `overlay`.

    The overlay comes first on PYTHONPATH, the caller's entries keep their order, and an overlay inherited
    from an outer process is dropped.
    """
    env = dict(os.environ if base_env is None else base_env)
    outer = env.pop(OVERLAY_VARIABLE, None)
    entries = [entry for entry in env.pop("PYTHONPATH", "").split(os.pathsep) if entry and entry != outer]
    if overlay.path is not None:
        entries.insert(0, str(overlay.path))
        env[OVERLAY_VARIABLE] = str(overlay.path)
    env[GROUPS_VARIABLE] = ",".join(overlay.groups)
    if entries:
        env["PYTHONPATH"] = os.pathsep.join(entries)
    return env


def _plan(
    groups: Sequence[str],
    installed: Path | None,
    patches: Path | None,
    stand_in: Path | None,
    cache: Path | None,
) -> _Plan:
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown:
        raise UpstreamError(f"there is no patch group {unknown[0]!r}: choose from {', '.join(GROUPS)}")
    chosen = tuple(group for group in GROUPS if group in groups)
    pinned = pin.read_pin(patches)
    if installed is None:
        pin.check(pinned)
        installed = installed_sglang()
    replaced = _stand_in(stand_in) if "cpu" in chosen else None
    sets = [read_group(group, patches) for group in chosen]
    key = _key(pinned.version, sets, replaced, installed)
    name = f"{pinned.version}-{'-'.join(chosen)}-{key[:16]}"
    target = (cache_dir() if cache is None else cache).absolute() / "overlays" / name if chosen else None
    labels = tuple(patch.label for patches_of_group in sets for patch in patches_of_group)
    return _Plan(Overlay(target, chosen, labels, replaced), key, pinned.version, installed, sets)


def _is_sound(target: Path, key: str) -> bool:
    try:
        if not target.is_dir():
            return False
        _check_owner(target)
    except OSError as error:
        raise UpstreamError(
            f"cannot read the overlay {target} ({error.strerror}): "
            "set HISTATE_CACHE_DIR to a folder of your own"
        ) from error
    return verify(target, key) is None


def _stand_in(given: Path | None) -> Path:
    found = stand_in_dir() if given is None else given
    if not (found / "__init__.py").is_file():
        raise UpstreamError(f"the CPU stand-in {found} is missing: reinstall sglang-histate")
    return found


def _key(version: str, sets: Sequence[Sequence[Patch]], stand_in: Path | None, installed: Path) -> str:
    """Return the identity of an overlay: everything that its content depends on."""
    parts = [str(FORMAT), version, str(installed)]
    parts += [f"{patch.label} {sha256(patch.text.encode())}" for patches in sets for patch in patches]
    if stand_in is not None:
        parts.append(str(stand_in))
        for path in sorted(stand_in.rglob("*")):
            if path.is_file() and _SKIPPED not in path.parts:
                parts.append(f"{path.relative_to(stand_in).as_posix()} {sha256(path.read_bytes())}")
    return sha256("\n".join(parts).encode())


def _fill(root: Path, plan: _Plan, files: dict[str, tuple[str, str]]) -> None:
    """Write the tree and, last, its manifest into the empty folder `root`."""
    site, overlay = plan.installed.parent, plan.overlay
    real = {"sglang"} | {parent.as_posix() for path in files for parent in Path(path).parents if parent.name}
    links: dict[str, str] = {}
    for folder in sorted(real):
        (root / folder).mkdir(mode=0o755)
        for entry in sorted(os.scandir(site / folder), key=lambda entry: entry.name):
            name = f"{folder}/{entry.name}"
            if entry.name != _SKIPPED and name not in real and name not in files:
                links[name] = str(site / name)
    if overlay.stand_in is not None:
        links["sgl_kernel"] = str(overlay.stand_in.absolute())
    for name, link_to in links.items():
        os.symlink(link_to, root / name)
    patched = {}
    for name, (pristine, text) in files.items():
        (root / name).write_bytes(text.encode())
        shutil.copymode(site / name, root / name)
        patched[name] = PatchedFile(sha256(pristine.encode()), sha256(text.encode()))
    manifest = Manifest(
        plan.key, plan.version, str(plan.installed), overlay.groups, overlay.patches, patched, links
    )
    (root / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    root.chmod(0o755)


def _publish(building: Path, target: Path, key: str) -> None:
    """Rename `building` to `target`; a sound overlay that is already there wins, a broken one is moved
    aside.
    """
    with _locked(target.parent):
        if os.path.lexists(target):
            if verify(target, key) is None:
                return
            # Moved aside into the build folder, which the caller removes together with it.
            aside = tempfile.mkdtemp(prefix=".build-", dir=target.parent)
            os.rename(target, Path(aside) / "broken")
            os.rename(building, target)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(building, target)


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Hold the cache's lock, which a killed process releases by dying; without lock support renames alone
    must do.
    """
    with open(base / ".lock", "w", encoding="utf-8") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_owner(path: Path) -> None:
    """Code is run from here: refuse a folder that another user can write."""
    facts = path.stat()
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & 0o022:
        raise UpstreamError(
            f"{path} can be written by another user: set HISTATE_CACHE_DIR to a folder of your own"
        )


def _remove_stale(base: Path) -> None:
    for path in base.glob(".build-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_BUILD_S:
                shutil.rmtree(path, ignore_errors=True)
