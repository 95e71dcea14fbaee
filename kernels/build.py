"""``python -m kernels.build``: nvcc on `csrc/bind.cu`, ahead of time for all supported GPUs or for the one at hand.

A library is built aside and renamed in, with a JSON file beside it that says from which sources, for which GPUs and with
which compiler it was built, and what ptxas said of each kernel. Whoever finds both built from today's sources need not
build again. The compiler may be an installed CUDA toolkit or the one that pip installs with torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parent
CSRC = HERE / "csrc"
SHIPPED = HERE / "lib" / "histate_kernels.so"
ARCHS = ("80", "90", "100")  # A100, H100 and H200, B200; PTX of the last one serves what comes after it
MOST_REGISTERS = 64  # two blocks of 512 threads on a multiprocessor
TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be built here. The message is one sentence and, if a compiler said more, what it said."""


@dataclass(frozen=True)
class KernelUse:
    """What ptxas reports of one kernel for one architecture."""

    kernel: str
    arch: str
    registers: int
    spilled_bytes: int


@dataclass(frozen=True)
class Built:
    """A library and what its JSON file says."""

    path: Path
    source: str  # hash of all that the library was made from
    archs: tuple[str, ...]
    compiler: str
    tvm_ffi: str  # version, or nothing where the library has C entry points alone
    kernels: tuple[KernelUse, ...]

    def covers(self, capability: tuple[int, int]) -> bool:
        """Return whether the library runs on a GPU of that compute capability."""
        arch = capability[0] * 10 + capability[1]
        numbers = [int(name) for name in self.archs]
        return any(n // 10 == arch // 10 and n <= arch for n in numbers) or arch >= max(numbers)


def source_hash(extra: Sequence[str] = ()) -> str:
    """Return a hash of `csrc/` and of `extra`."""
    found = hashlib.sha256("\0".join(extra).encode())
    for path in sorted(CSRC.iterdir()):
        found.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def ffi_version() -> str:
    """Return tvm-ffi's version, or nothing if it is not installed."""
    if importlib.util.find_spec("tvm_ffi") is None:
        return ""
    import tvm_ffi

    return str(tvm_ffi.__version__)


def find_nvcc() -> Path:
    """Return a CUDA compiler: that of CUDA_HOME, of the PATH, of /usr/local/cuda, or the one pip installed.

    Raises:
        BuildError: there is none, or no C++ compiler for it to use.
    """
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [home / "bin" / "nvcc" for home in homes]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(Path(place).glob("*/bin/nvcc"), reverse=True)
    for nvcc in candidates:
        if os.access(nvcc, os.X_OK):
            if not any(shutil.which(name) for name in ("g++", "c++")):
                raise BuildError(f"{nvcc} needs a C++ compiler: install g++")
            return nvcc
    raise BuildError("no nvcc was found: set CUDA_HOME, or install nvidia-cuda-nvcc into this environment")


def _ffi_flags() -> list[str]:
    if not ffi_version():
        raise BuildError("tvm-ffi is not installed: install apache-tvm-ffi")
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    library = Path(find_libtvm_ffi())
    includes = [f"-I{find_include_path()}", f"-I{find_dlpack_include_path()}"]
    return [str(CSRC / "ffi.cpp"), *includes, f"-L{library.parent}", "-ltvm_ffi"]


def build(
    path: Path, archs: Sequence[str] = ARCHS, *, ffi: bool = True, with_sources: Sequence[Path] = ()
) -> Built:
    """Build the kernels into `path` unless they are there already, and return what was built.

    Several processes may ask for the same path at once. `ffi`: with tvm-ffi's entry points beside those in C.
    `with_sources` are compiled into the same library.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    nvcc = find_nvcc()
    version = ffi_version() if ffi else ""
    source = source_hash([source.read_text(encoding="utf-8") for source in with_sources])
    with _alone(path):
        found = read_built(path)
        if found and (found.source, found.archs, found.tvm_ffi) == (source, tuple(archs), version):
            return found
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        aside = path.with_suffix(f".{os.getpid()}.so")
        said = _run(
            [
                *(str(nvcc), "-std=c++17", "-O3", "-shared", "-Xptxas", "-v", *targets),
                *("-Xcompiler", "-fPIC,-fvisibility=hidden", *(_ffi_flags() if ffi else [])),
                *(str(CSRC / "bind.cu"), *map(str, with_sources), "-o", str(aside)),
            ]
        )
        compiler = _run([str(nvcc), "--version"]).strip().splitlines()[-1]
        built = Built(path, source, tuple(archs), compiler, version, tuple(parse_ptxas(said)))
        # The library first: a JSON file of older sources beside it means that it is built again.
        aside.replace(path)
        facts = {name: value for name, value in asdict(built).items() if name != "path"}
        beside = aside.with_suffix(".json")
        beside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        beside.replace(path.with_suffix(".json"))
        return built


def read_built(path: Path) -> Built | None:
    """Return what is known of the library at `path`, None if there is none."""
    try:
        facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        uses = tuple(KernelUse(**use) for use in facts.pop("kernels"))
        facts["archs"] = tuple(facts["archs"])
        return Built(path=path, kernels=uses, **facts) if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def build_host(
    path: Path, *, ffi: bool = False, trace: bool = False, with_sources: Sequence[Path] = ()
) -> Path:
    """Build the same code for the CPU, and return where: beside `path`, named by its sources. See `csrc/host.cpp`.

    Raises:
        BuildError: there is no C++ compiler, or it failed.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler was found: install g++")
    flags = [*(_ffi_flags() if ffi else []), *(["-DHISTATE_TRACE"] if trace else [])]
    flags += [part for source in with_sources for part in ("-x", "c++", str(source))]
    texts = [source.read_text(encoding="utf-8") for source in with_sources]
    path = path.with_stem(f"{path.stem}-{source_hash([*flags, *texts, ffi_version()])}")
    with _alone(path):
        if not path.exists():
            aside = path.with_suffix(f".{os.getpid()}.so")
            # No contraction to fused operations: the numbers have to be those of the GPU.
            base = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"]
            _run(
                [
                    compiler,
                    *base,
                    "-Wall",
                    "-Werror",
                    "-Wno-unknown-pragmas",
                    str(CSRC / "host.cpp"),
                    *flags,
                    "-o",
                    str(aside),
                ]
            )
            aside.replace(path)
    return path


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from None
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def parse_ptxas(said: str) -> Iterator[KernelUse]:
    """Yield what `-Xptxas -v` printed of each kernel.

    Raises:
        BuildError: it printed something else than is understood here, so nothing is known of spills.
    """
    blocks = re.split(r"Compiling entry function ", said)[1:]
    if not blocks:
        raise BuildError("ptxas reported no kernel")
    for block in blocks:
        head = re.match(r"'(\S+)' for 'sm_(\w+)'", block)
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", block)
        registers = re.search(r"Used (\d+) registers", block)
        if not (head and spilled and registers):
            raise BuildError(f"ptxas reported a kernel in words that are not understood: {block[:300]}")
        yield KernelUse(
            kernel=_short(head[1]),
            arch=head[2],
            registers=int(registers[1]),
            spilled_bytes=int(spilled[1]) + int(spilled[2]),
        )


def _short(symbol: str) -> str:
    """Return the name in a mangled symbol, with the number of its encoding if it is a template."""
    found = re.search(r"\d((?:un)?pack\w*?_kernel)", symbol)
    encoding = re.search(r"EncodingE(\d)E", symbol)
    name = found[1] if found else symbol
    return f"{name}<{('native', 'bf16', 'int8')[int(encoding[1])]}>" if encoding else name


def complaints(built: Built) -> list[str]:
    """Return what is wrong with a build: every kernel that spills or takes too many registers."""
    return [
        f"{use.kernel} for sm_{use.arch}: {use.registers} registers (at most {MOST_REGISTERS}), "
        f"{use.spilled_bytes} bytes spilled"
        for use in built.kernels
        if use.spilled_bytes or use.registers > MOST_REGISTERS
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", action="append", metavar="N", help=f"80, 90, ...; default: {' '.join(ARCHS)}"
    )
    parser.add_argument(
        "--out", type=Path, default=SHIPPED, help="the library; default: where a server looks"
    )
    parser.add_argument(
        "--no-tvm-ffi", action="store_true", help="C entry points only, as the bench uses them"
    )
    given = parser.parse_args(arguments)
    start = perf_counter()
    try:
        built = build(given.out, tuple(given.arch or ARCHS), ffi=not given.no_tvm_ffi)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for use in built.kernels:
        print(
            f"sm_{use.arch:<5}{use.kernel:<24}{use.registers:>3} registers {use.spilled_bytes:>3} bytes spilled"
        )
    wrong = complaints(built)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    where = os.path.relpath(built.path)
    print(f"{where}: {built.path.stat().st_size >> 10} KiB, {perf_counter() - start:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
