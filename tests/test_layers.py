"""The layer rules of the package, read from its sources: who may import whom, and how long a file may be.

    config, sizes  <-  policy  <-  store, pool, copy  <-  adapter  <-  cli, launch_server
    upstream, cpu and demo stand beside these: upstream and cpu import nothing of ours, demo serves the
    adapter and the launcher.

Imports inside functions count, and so do importlib.import_module and __import__ with a literal name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "sglang_histate"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
MAX_LINES = 400

# What each part may import from us, itself always included; "" is the package's own __init__.
ALLOWED: dict[str, set[str]] = {
    "": set(),
    "sizes": set(),
    "policy": set(),
    "flag_help": set(),
    "config": {"policy", "sizes", "flag_help"},
    "store": {"policy", "config", "sizes"},
    "pool": {"policy", "config", "sizes"},
    "copy": {"policy", "config", "sizes"},
    "cpu": set(),
    "upstream": set(),
    "demo": {"config", "sizes"},
    "adapter": {"policy", "store", "pool", "copy", "config", "sizes", "upstream", "cpu", "demo"},
    "cli": {
        "policy",
        "store",
        "pool",
        "copy",
        "config",
        "sizes",
        "upstream",
        "cpu",
        "demo",
        "adapter",
        "launch_server",
    },
    "launch_server": {
        *("policy", "store", "pool", "copy", "config", "sizes", "upstream", "cpu", "demo", "adapter", "cli"),
    },
}
# Decisions are pure: clock, randomness, files and threads come in as arguments or not at all.
NOT_IN_POLICY = {
    *(
        "torch",
        "numpy",
        "sglang",
        "os",
        "io",
        "sys",
        "time",
        "datetime",
        "random",
        "secrets",
        "uuid",
        "threading",
    ),
    *(
        "multiprocessing",
        "concurrent",
        "asyncio",
        "subprocess",
        "socket",
        "pathlib",
        "shutil",
        "tempfile",
        "logging",
    ),
    *("queue", "mmap", "fcntl", "select", "signal"),
}


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything that `module` imports; relative names are made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def part_of(name: str) -> str:
    """Return the part that `name` (sglang_histate.store.slabs) belongs to."""
    pieces = name.split(".")
    if len(pieces) == 1:
        return ""
    return pieces[1] if pieces[1] in ALLOWED else ""


def violations(root: Path) -> list[str]:
    """Return every broken rule under `root`, the folder of the package."""
    found: list[str] = []
    # kernels/ is part of `copy` by a link, which rglob does not follow.
    for path in sorted({*root.rglob("*.py"), *(root / "copy" / "_kernels").rglob("*.py")}):
        relative = path.relative_to(root)
        where = f"{PACKAGE}/{relative.as_posix()}"
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > MAX_LINES:
            found.append(f"{where} has {len(text.splitlines())} lines, at most {MAX_LINES} are allowed")
        module = ".".join([PACKAGE, *relative.with_suffix("").parts]).removesuffix(".__init__")
        part = relative.with_suffix("").parts[0]
        part = "" if part == "__init__" else part
        if part not in ALLOWED:
            found.append(f"{where}: {part!r} has no place in the layers, add it to tests/test_layers.py")
            continue
        for line, name in imports(ast.parse(text), module, path.name == "__init__.py"):
            top = name.split(".")[0]
            if top == "sglang" and part != "adapter":
                found.append(f"{where}:{line} imports {name}: only {PACKAGE}/adapter may import sglang")
            if part == "policy" and top in NOT_IN_POLICY:
                found.append(f"{where}:{line} imports {name}: policy is pure")
            if top == PACKAGE:
                target = part_of(name)
                if target not in ({part, ""} | ALLOWED[part]):
                    found.append(f"{where}:{line}: {part or 'the package'} may not import {PACKAGE}.{target}")
        if part == "policy":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("open", "print", "input"):
                    found.append(f"{where}:{node.lineno} calls {node.func.id}: policy is pure")  # type: ignore[attr-defined]
    return found


def test_the_package_keeps_its_layers() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("store/a.py", "import sglang", "only sglang_histate/adapter may import sglang"),
        ("store/a.py", "def f():\n    from sglang.srt import server_args", "may import sglang"),
        ("cli/a.py", "import importlib\nimportlib.import_module('sglang.srt')", "may import sglang"),
        ("cli/a.py", "__import__('sglang')", "may import sglang"),
        ("launch_server.py", "import sglang.launch_server", "may import sglang"),
        ("cpu/stand_in/sgl_kernel/__init__.py", "import sglang", "may import sglang"),
        ("policy/a.py", "import torch", "policy is pure"),
        ("policy/a.py", "def f():\n    from time import monotonic", "policy is pure"),
        ("policy/a.py", "import threading", "policy is pure"),
        ("policy/a.py", "def f(p):\n    return open(p)", "policy is pure"),
        (
            "policy/a.py",
            "from sglang_histate.store import slabs",
            "policy may not import sglang_histate.store",
        ),
        ("policy/a.py", "from ..pool import arena", "policy may not import sglang_histate.pool"),
        ("policy/a.py", "from .. import store", "policy may not import sglang_histate.store"),
        (
            "store/a.py",
            "import sglang_histate.adapter.metrics",
            "store may not import sglang_histate.adapter",
        ),
        ("store/a.py", "from sglang_histate.pool import arena", "store may not import sglang_histate.pool"),
        (
            "adapter/a.py",
            "from sglang_histate import launch_server",
            "may not import sglang_histate.launch_server",
        ),
        (
            "upstream/a.py",
            "from sglang_histate.cli import main",
            "upstream may not import sglang_histate.cli",
        ),
        ("sizes.py", "from sglang_histate import config", "sizes may not import sglang_histate.config"),
        ("copy/_kernels/a.py", "import sglang", "may import sglang"),
        (
            "copy/_kernels/bench/a.py",
            "from sglang_histate.store import slabs",
            "copy may not import sglang_histate.store",
        ),
        ("helpers/a.py", "", "has no place in the layers"),
        ("store/a.py", "x = 1\n" * (MAX_LINES + 1), "at most 400"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(source)
    found = violations(tmp_path)
    assert len(found) == 1 and complaint in found[0], found


def test_the_kernels_are_looked_at_though_they_are_a_link(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("import sglang")
    (tmp_path / "package" / "copy").mkdir(parents=True)
    (tmp_path / "package" / "copy" / "_kernels").symlink_to(tmp_path / "kernels")
    assert len(violations(tmp_path / "package")) == 1
    assert (ROOT / "copy" / "_kernels").resolve() == ROOT.parent / "kernels"


def test_allowed_imports_pass(tmp_path: Path) -> None:
    for file, source in {
        "__init__.py": "__version__ = '1'",
        "adapter/a.py": "import sglang\nfrom sglang_histate.policy import score\nfrom ..store import slabs",
        "store/a.py": "import sglang_histate\nimport os\nfrom . import b\nfrom sglang_histate.sizes import x",
        "store/__init__.py": "from .a import x",
        "policy/a.py": "from .score import Score\nimport heapq\nfrom sglang_histate.policy import x",
        "launch_server.py": "from sglang_histate.adapter import start\nimport sglang_histate.upstream",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []
