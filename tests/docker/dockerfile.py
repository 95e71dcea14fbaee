"""Reads Dockerfiles as far as this project uses the language, and replays one without an engine, under other roots.

Not supported, and refused: more than one stage, ADD, SHELL, ONBUILD, here-documents, `COPY --from`, globs in COPY.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_KNOWN = {
    *("FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "LABEL"),
    *("STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class DockerfileError(ValueError):
    """What docker would not build either, or what this reader does not know."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; `words` is the exec form, None for the shell form. `flags` are those in front, without dashes."""

    line: int
    name: str
    flags: dict[str, str]
    text: str
    words: tuple[str, ...] | None


def parse(text: str) -> list[Instruction]:
    """Return the instructions in order.

    Raises:
        DockerfileError: with the line.
    """
    found: list[Instruction] = []
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        start = start if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        found.append(_instruction(start, (pending + line).strip()))
        pending = ""
    if pending:
        raise DockerfileError(f"line {start}: goes on after the end")
    if not found or found[0].name not in ("FROM", "ARG"):
        raise DockerfileError("begins with no FROM")
    if sum(one.name == "FROM" for one in found) != 1:
        raise DockerfileError("has not exactly one stage")
    return found


def _instruction(line: int, text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    name, rest = name.upper(), rest.strip()
    if name not in _KNOWN:
        raise DockerfileError(f"line {line}: {name} is not an instruction that is known here")
    flags = {}
    while match := re.match(r"--([a-z-]+)(?:=(\S+))?\s+", rest):
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    if name == "HEALTHCHECK":
        word, _, rest = rest.partition(" ")
        if word != "CMD":
            raise DockerfileError(f"line {line}: HEALTHCHECK without CMD")
        rest = rest.strip()
    if "<<" in rest or "from" in flags or (name == "COPY" and set("*?[") & set(rest)):
        raise DockerfileError(f"line {line}: not supported here: {text}")
    if not rest:
        raise DockerfileError(f"line {line}: {name} of nothing")
    words = None
    if rest.startswith("["):
        try:
            words = tuple(json.loads(rest))
        except ValueError:
            raise DockerfileError(f"line {line}: not a JSON list: {rest}") from None
    return Instruction(line, name, flags, rest, words)


def ignored(patterns: list[str], path: str) -> bool:
    """Return whether .dockerignore keeps `path` from the builder: the last pattern that matches it or a parent counts."""
    verdict = False
    parents = [path, *(str(parent) for parent in Path(path).parents)]
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        deep = wanted.removeprefix("**/")
        if any(
            fnmatch.fnmatchcase(one, wanted) or (deep != wanted and fnmatch.fnmatchcase(Path(one).name, deep))
            for one in parents
            if one != "."
        ):
            verdict = not pattern.startswith("!")
    return verdict


@dataclass
class Image:
    """What a built image says of a container. Paths are those of the Dockerfile."""

    base: str = ""
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    volumes: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"
    health: tuple[str, ...] = ()
    health_flags: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    ran: list[str] = field(default_factory=list)


class Builder:
    """Carries out instructions. `roots` are absolute paths of the image and where they lie on this machine instead.

    With `run=False` nothing is run or copied, but sources are looked for.
    """

    def __init__(
        self, context: Path, roots: Mapping[str, Path], *, run: bool, env: Mapping[str, str]
    ) -> None:
        self.context = context
        self.image = Image()
        self._roots = dict(sorted(roots.items(), key=lambda item: -len(item[0])))
        self._run = run
        self._env = dict(env)
        listed = (context / ".dockerignore").read_text(encoding="utf-8").splitlines()
        self._ignore = [line.strip() for line in listed if line.strip() and not line.startswith("#")]

    def here(self, text: str) -> str:
        """Return a text of the image with its paths replaced by those of this machine."""
        for path, root in self._roots.items():
            text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w-])", str(root), text)
        return text

    def build(self, instructions: list[Instruction], arguments: Mapping[str, str] | None = None) -> Image:
        """Carry all out and return the image."""
        for one in instructions:
            self._carry_out(one, arguments or {})
        return self.image

    def environ(self) -> dict[str, str]:
        """Return the environment of a process of the image on this machine."""
        return self._env | {name: self.here(value) for name, value in self.image.env.items()}

    def _carry_out(self, one: Instruction, arguments: Mapping[str, str]) -> None:
        image = self.image
        # RUN gets variables from its shell; the exec forms know none.
        text = one.text if one.name == "RUN" or one.words is not None else self._expanded(one)
        match one.name:
            case "FROM":
                image.base = text
            case "ARG":
                name, _, default = text.partition("=")
                image.arguments[name] = arguments.get(name, default)
            case "ENV":
                image.env.update(_pairs(one, text))
            case "WORKDIR":
                image.workdir = text
                if self._run:
                    Path(self.here(text)).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(one, text.split())
            case "RUN":
                self._shell(one, text)
            case "USER":
                image.user = text
            case "VOLUME":
                image.volumes.append(text)
            case "EXPOSE":
                image.ports += text.split()
            case "STOPSIGNAL":
                image.stop_signal = text
            case "HEALTHCHECK":
                image.health, image.health_flags = _exec(one), one.flags
            case "ENTRYPOINT":
                image.entrypoint, image.command = _exec(one), ()
            case "CMD":
                image.command = _exec(one)

    def _expanded(self, one: Instruction) -> str:
        known = {"PATH": self._env.get("PATH", ""), **self.image.arguments, **self.image.env}

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name not in known:
                raise DockerfileError(f"line {one.line}: nothing sets {name}")
            return known[name]

        return _VARIABLE.sub(value, one.text)

    def _copy(self, one: Instruction, words: list[str]) -> None:
        *sources, target = words
        if len(sources) > 1 and not target.endswith("/"):
            raise DockerfileError(f"line {one.line}: COPY of several into {target}, which ends in no slash")
        for source in sources:
            path = self.context / source
            if not path.exists() or ignored(self._ignore, source):
                raise DockerfileError(f"line {one.line}: {source} is not in the build context")
            if not self._run:
                continue
            into = Path(self.here(str(Path(self.image.workdir) / target)))
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True, ignore=self._skipped)
            else:
                into = into / path.name if target.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, into)

    def _skipped(self, folder: str, names: list[str]) -> set[str]:
        base = Path(folder).relative_to(self.context)
        return {name for name in names if ignored(self._ignore, str(base / name))}

    def _shell(self, one: Instruction, text: str) -> None:
        self.image.ran.append(text)
        if not self._run:
            return
        done = subprocess.run(
            ["/bin/sh", "-c", self.here(text)],
            cwd=self.here(self.image.workdir),
            env=self.environ() | self.image.arguments,
            capture_output=True,
            text=True,
            timeout=540,
        )
        if done.returncode:
            raise DockerfileError(f"line {one.line}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def _exec(one: Instruction) -> tuple[str, ...]:
    if one.words is None:
        raise DockerfileError(f"line {one.line}: {one.name} in shell form: signals would go to a shell")
    return one.words


def _pairs(one: Instruction, text: str) -> dict[str, str]:
    found = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise DockerfileError(f"line {one.line}: ENV without =")
        found[name] = value
    return found


def interpreter_with(packages: Path, folder: Path) -> Path:
    """Make a `python3` whose virtual environments also see the installed `packages`, and return its folder for PATH.

    All that a build would download is there already, so that pip finds every requirement satisfied.
    """
    folder.mkdir(parents=True)
    script = folder / "python3"
    script.write_text(
        "#!/bin/sh\n"
        f'"{sys._base_executable}" "$@" || exit\n'
        'if [ "$1 $2" = "-m venv" ]; then\n'
        '    for site in "$3"/lib/python*/site-packages; do\n'
        # An old one that comes with Python 3.11 and hides the installed one.
        '        rm -rf "$site"/setuptools* "$site"/pkg_resources "$site"/_distutils_hack\n'
        f'        echo "{packages}" > "$site/installed.pth"\n'
        "    done\n"
        "fi\n"
    )
    script.chmod(0o755)
    return folder
