"""docs/patches.md: every patch with what it is for, why it is a patch, and whether SGLang might want it."""

from __future__ import annotations

from sglang_histate.cli.patches import all_patches
from sglang_histate.upstream.pin import read_pin

_MEANING = {
    "candidate": "SGLang could take it as it is",
    "not-needed": "of use to HiState alone",
}


def page() -> str:
    """Return the page."""
    found = all_patches()
    lines = [
        "# Patches",
        "",
        "Made from the headers of `patches/` by `python -m eval.handbook`; a test fails where it is not up to date.",
        "",
        f"SGLang {read_pin().version} is patched in {len(found)} places. Nothing in the installed package is modified: the "
        "patches are applied to a view of it, a folder of links with real copies of the patched files, which the server "
        "process finds first. `histate patches list` prints them, `histate patches check` proves that they apply to the "
        "pristine release without fuzz, that taking them back restores it byte for byte, and that no function which they or "
        "the adapter rely on has changed. `histate patches export DIR` writes them as a tree.",
        "",
        "What happens when the pin moves: [rebase.md](rebase.md).",
        "",
    ]
    for group, about in (
        ("histate", "Applied wherever HiState is on."),
        (
            "cpu",
            "Applied where there is no GPU, with `--disable-histate` too: what SGLang lacks to run these models there.",
        ),
    ):
        lines += [
            f"## {group}",
            "",
            about,
            "",
            "| patch | what | why not a subclass | upstream | lines |",
            "|---|---|---|---|---|",
        ]
        for patch in found:
            if patch.group != group:
                continue
            tags = [tag for file in patch.files for hunk in file.hunks for tag, _ in hunk.lines]
            cells = (
                f"`{patch.name.removesuffix('.patch')}`",
                _cell(patch.header["Description"]),
                _cell(patch.header["Why-not-a-subclass"]),
                patch.header["Upstream"],
                f"+{tags.count('+')} -{tags.count('-')}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["Upstream:", ""]
    used = sorted({patch.header["Upstream"] for patch in found})
    lines += [f"- `{name}`: {_MEANING.get(name, 'see the link')}." for name in used]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = " ".join(text.replace("|", "\\|").split())
    return text[0].upper() + text[1:]
