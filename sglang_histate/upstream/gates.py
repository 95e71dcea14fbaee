"""The gates that every change of a patch or of the pin must pass. Used by the tests and ``histate patches
check``.

Each gate returns its findings as printable sentences; an empty list means passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_histate.upstream import diff, hashes, pin, series, tree
from sglang_histate.upstream.errors import UpstreamError
from sglang_histate.upstream.locations import installed_sglang, package_parent, patches_dir


@dataclass(frozen=True)
class Subject:
    """What is checked: a folder of patches against a tree that holds ``sglang/``."""

    folder: Path
    root: Path
    groups: tuple[str, ...]

    @classmethod
    def default(cls, root: Path | None = None, folder: Path | None = None) -> Subject:
        """The shipped patches against `root`, or against the installed sglang of the pinned version.

        Raises:
            UpstreamError: sglang is missing or of another version, or `root` holds no ``sglang/``.
        """
        chosen = patches_dir() if folder is None else folder
        if root is None:
            pin.check(pin.read_pin(chosen))
            root = installed_sglang().parent
        elif not (root / "sglang").is_dir():
            raise UpstreamError(f"{root} holds no sglang/ folder")
        return cls(chosen, root, tuple(g for g in series.GROUPS if (chosen / g).is_dir()))

    def patches(self, group: str) -> tuple[series.Patch, ...]:
        """Return the patches of `group`."""
        return series.read_group(group, self.folder)


@dataclass(frozen=True)
class Gate:
    """One check with the sentence that says what it proves."""

    title: str
    run: Callable[[Subject], list[str]]


def folders_agree(subject: Subject) -> list[str]:
    """Series and folder agree, and every patch has a complete header."""
    findings = []
    for group in subject.groups:
        findings += _refusal(series.check_folder, group, subject.folder)
        findings += _refusal(subject.patches, group)
    return findings


def all_apply(subject: Subject) -> list[str]:
    """Every group applies to the pristine tree alone and together with the others, and gives valid Python."""
    groups = [subject.patches(group) for group in subject.groups]
    for choice in [[patches] for patches in groups] + ([groups] if len(groups) > 1 else []):
        for path, (_, patched) in tree.apply_groups(choice, subject.root).items():
            if path.endswith(".py"):
                try:
                    compile(patched, path, "exec", dont_inherit=True)
                except SyntaxError as error:
                    return [f"{path} is not valid Python after patching: line {error.lineno}: {error.msg}"]
    return []


def reverse_restores(subject: Subject) -> list[str]:
    """Reversing every patch in reverse order gives the pristine files back, byte for byte."""
    findings = []
    for group in subject.groups:
        patches = subject.patches(group)
        texts = tree.apply_series(patches, subject.root)
        current = {path: patched for path, (_, patched) in texts.items()}
        for patch in reversed(patches):
            for file_diff in patch.files:
                text = current[file_diff.path]
                current[file_diff.path] = diff.apply(
                    file_diff.reversed(), text, f"the reverse of {patch.label}"
                )
        findings += [
            f"reversing patches/{group} does not restore {path}"
            for path, text in current.items()
            if text != tree.read_source(subject.root, path)
        ]
    return findings


def none_applies_twice(subject: Subject) -> list[str]:
    """A patch refuses a tree that already has it."""
    findings = []
    for group in subject.groups:
        current: dict[str, str] = {}
        for patch in subject.patches(group):
            refused = False
            for file_diff in patch.files:
                path = file_diff.path
                before = current[path] if path in current else tree.read_source(subject.root, path)
                current[path] = diff.apply(file_diff, before, patch.label)
                refused = refused or bool(_refusal(diff.apply, file_diff, current[path], patch.label))
            if not refused:
                findings.append(f"{patch.label} applies twice: give it more context")
    return findings


def hashes_match(subject: Subject) -> list[str]:
    """Every upstream function that is patched or relied on still has the recorded source."""
    recorded = hashes.read_recorded(subject.folder)
    current = hashes.digests(sorted(recorded), subject.root)
    findings = []
    for name, row in recorded.items():
        if current[name] != row.digest:
            change = "no longer has" if current[name] is None else "changed"
            findings.append(f"upstream {change} {name}: re-read {', '.join(row.read_by)}")
    return findings


def hashes_complete(subject: Subject) -> list[str]:
    """hashes.json covers exactly what the patches change and hooks.toml lists."""
    recorded = hashes.read_recorded(subject.folder)
    users = _users(subject)
    findings = []
    for name in sorted(set(users) | set(recorded)):
        if name not in recorded:
            findings.append(
                f"{name} is used by {', '.join(users[name])} but not recorded: run histate patches record"
            )
        elif recorded[name].read_by != users.get(name, ()):
            findings.append(f"hashes.json names other users of {name}: run histate patches record")
    return findings


def hooks_agree(subject: Subject) -> list[str]:
    """Every file of ours that hooks.toml names exists."""
    return [
        f"patches/hooks.toml says {path} relies on {name}, but there is no such file"
        for name, paths in sorted(hashes.read_hooks(subject.folder).items())
        for path in paths
        if not (package_parent() / path).is_file()
    ]


GATES = (
    Gate("series and folder agree, headers are complete", folders_agree),
    Gate("upstream functions are as recorded", hashes_match),
    Gate("all patches apply with zero fuzz", all_apply),
    Gate("reverse restores the pristine files", reverse_restores),
    Gate("no patch applies twice", none_applies_twice),
    Gate("hashes.json covers every patch and hook", hashes_complete),
    Gate("hooks.toml names existing files", hooks_agree),
)


def run_all(subject: Subject) -> list[tuple[Gate, list[str]]]:
    """Run every gate; a gate that cannot run reports why as its finding."""
    results = []
    for gate in GATES:
        findings: list[str]
        try:
            findings = gate.run(subject)
        except UpstreamError as error:
            findings = [str(error)]
        results.append((gate, findings))
    return results


def record(subject: Subject) -> tuple[Path, int]:
    """Write the current hash of everything that is patched or relied on.

    Returns:
        the file and how many functions it records.

    Raises:
        UpstreamError: a patch does not apply, or a hooked function does not exist.
    """
    users = _users(subject)
    current = hashes.digests(sorted(users), subject.root)
    functions = {}
    for name, read_by in users.items():
        digest = current[name]
        if digest is None:
            raise UpstreamError(f"upstream has no {name}, which {', '.join(read_by)} relies on")
        functions[name] = hashes.Recorded(digest, read_by)
    return hashes.write_recorded(functions, pin.read_pin(subject.folder).version, subject.folder), len(
        functions
    )


def _users(subject: Subject) -> dict[str, tuple[str, ...]]:
    """Return ``module:scope`` -> the patches and files of ours that depend on it, sorted.

    Raises:
        UpstreamError: a patch does not apply.
    """
    users: dict[str, set[str]] = {
        name: set(paths) for name, paths in hashes.read_hooks(subject.folder).items()
    }
    for group in subject.groups:
        for name, labels in hashes.patched_scopes(subject.patches(group), subject.root).items():
            users.setdefault(name, set()).update(labels)
    return {name: tuple(sorted(found)) for name, found in users.items()}


def _refusal(action: Callable[..., object], *arguments: object) -> list[str]:
    """Return why `action` refuses, or an empty list."""
    try:
        action(*arguments)
    except UpstreamError as error:
        return [str(error)]
    return []
