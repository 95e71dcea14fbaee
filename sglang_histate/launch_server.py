"""``python -m sglang_histate.launch_server``: HiState's flags and all of SGLang's own.

Runs before anything heavy is imported: check HiState's flags, build the overlay, choose defaults for this machine,
then become the server process with the overlay first on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from sglang_histate.config import ConfigError, HiStateConfig, config_from_flags, flag_name, split_flags
from sglang_histate.pool.limits import check_host_size
from sglang_histate.store.probe import check_roots
from sglang_histate.store.reasons import StoreError
from sglang_histate.upstream import UpstreamError, build_overlay, groups_for, overlay_env
from sglang_histate.upstream.gpu import gpu_present

EXIT_CODE = 2

# SGLang picks its device and kernels by what is installed; on a machine without a GPU they have to be named.
_CPU_DEFAULTS: dict[str, str | None] = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--hicache-io-backend": "direct",
    "--hicache-mem-layout": "page_first_direct",
    "--max-mamba-cache-size": "48",
    "--max-total-tokens": "65536",
    "--max-running-requests": "8",
    # An idle scheduler polls without pause otherwise, which costs a small machine one of its cores.
    "--sleep-on-idle": None,
}
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # No file of that name: without it SGLang looks for NCCL even where there is no GPU; the ranks talk over gloo anyway.
    "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
    # Keep freed activations. glibc returns them to the system otherwise, or not, by chance: page faults then make one
    # server up to a tenth slower than its twin.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
# One page per state position, and the strategy that keeps states inside a prompt.
_HYBRID_DEFAULTS = {"--page-size": "64", "--mamba-radix-cache-strategy": "extra_buffer"}
_HISTATE_DEFAULTS: dict[str, str | None] = {
    "--radix-cache-backend": "histate",
    "--enable-hierarchical-cache": None,
    # The host arena plans its copies on the host: there SGLang is to keep the indices.
    "--hicache-io-backend": "direct",
    "--hicache-mem-layout": "page_first_direct",
    # Clients should see in `usage` what the cache did.
    "--enable-cache-report": None,
}
# Full precision everywhere, so that warm and cold answers can be compared to the last digit.
_DEMO_DEFAULTS = {"--dtype": "float32", "--served-model-name": "histate-demo"}
# A model this small gains nothing from a second thread and loses much to it on a busy machine.
_DEMO_ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "OMP_NUM_THREADS": "1"}
_ALIASES = {"--enable-hierarchical-cache": ("--enable-hicache",), "--model-path": ("--model",)}


def prepare(argv: list[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the server's command line and environment.

    Raises:
        ConfigError, StoreError, UpstreamError: one sentence that names the flag and the way out.
    """
    given, rest = split_flags(expand_config_file(argv))
    helping = bool({"-h", "--help"} & set(rest))
    enabled = helping or not given.pop("disable_histate", False)
    demo = given.pop("demo", False)
    if demo:
        # Something to look at, wherever it is tried: in a container, say, whose disk is an overlay.
        given["histate_allow_any_filesystem"] = True
    if enabled and not helping:
        config = config_from_flags(given)
        _check_host(config, rest)
        check_roots(
            [Path(path) for path in config.ssd_dirs],
            config.ssd_size_bytes,
            allow_any_filesystem=config.allow_any_filesystem,
        )
        _check_policy_log(config.policy_log)
    gpu = gpu_present()
    overlay = build_overlay(groups_for(enabled, gpu))
    env = overlay_env(overlay, environ)
    defaults: dict[str, str | None] = {}
    if not gpu:
        defaults.update(_CPU_DEFAULTS)
        env.update({name: env.get(name, value) for name, value in _CPU_ENVIRONMENT.items()})
        ranks = _rank_count(rest)
        if ranks > 1:
            env.setdefault(
                "SGLANG_CPU_OMP_THREADS_BIND", _bind_threads(ranks, sorted(os.sched_getaffinity(0)))
            )
    if demo:
        from sglang_histate.demo import ensure_demo_model

        defaults.update({"--model-path": str(ensure_demo_model()), **_DEMO_DEFAULTS})
        env.update({name: env.get(name, value) for name, value in _DEMO_ENVIRONMENT.items()})
    if enabled or not gpu:
        defaults.update(_HYBRID_DEFAULTS)
    if enabled:
        defaults.update(_HISTATE_DEFAULTS)
        if given.get("histate_host_size", "auto") != "auto":
            # Not used then. Given, it keeps SGLang from deriving one from the memory that is free.
            defaults["--hicache-ratio"] = "1"
        # The end of an output is found to within one page; SGLang's own default is 256 tokens.
        defaults["--mamba-track-interval"] = (
            given_value(rest, "--page-size") or _HYBRID_DEFAULTS["--page-size"]
        )
        if not given.get("no_histate_metrics", False):
            defaults["--enable-metrics"] = None
        if not given.get("histate_static_split", False):
            defaults["--enable-unified-memory"] = None
        for name, value in given.items():
            rest += [flag_name(name)] if value is True else [flag_name(name), str(value)]
    return with_defaults(rest, defaults), env


def _check_host(config: HiStateConfig, argv: list[str]) -> None:
    """Check ``--histate-host-size`` against SGLang's own flags for the same memory, and against what there is.

    Raises:
        ConfigError: one sentence.
    """
    if config.host_size_bytes is None:
        return
    for name in ("--hicache-size", "--hicache-ratio", "--hicache-host-memory-fraction"):
        value = given_value(argv, name)
        if value is not None:
            raise ConfigError(
                f"--histate-host-size and {name} {value} both size the host memory: give one of them"
            )
    nodes = given_value(argv, "--nnodes") or ""
    check_host_size(config.host_size_bytes, int(nodes) if nodes.isdigit() and int(nodes) else 1)


def _check_policy_log(name: str | None) -> None:
    """Check that ``--histate-policy-log`` can become a file.

    Raises:
        ConfigError: one sentence.
    """
    if name is None:
        return
    try:
        Path(name).open("a").close()
    except OSError as error:
        raise ConfigError(
            f"--histate-policy-log: {name} cannot be written ({error.strerror}): name a file in a folder of yours"
        ) from None


def expand_config_file(argv: list[str]) -> list[str]:
    """Return `argv` with ``--config FILE`` replaced by the file's flags, in front so that the command line wins.

    The file is SGLang's: a YAML mapping of flags without the leading dashes. It is read here because defaults that this
    launcher adds must not override it.

    Raises:
        ConfigError: the file cannot be read as such a mapping.
    """
    name = given_value(argv, "--config")
    if name is None:
        return argv
    import yaml

    try:
        values = yaml.safe_load(Path(name).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {name} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {name} is not a mapping of flags to values")
    flags: list[str] = []
    for key, value in values.items():
        flag = "--" + str(key).replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False and value is not None:
            flags += [flag, *(str(item) for item in (value if isinstance(value, list) else [value]))]
    rest = list(argv)
    while (
        at := next((i for i, part in enumerate(rest) if part.partition("=")[0] == "--config"), None)
    ) is not None:
        del rest[at : at + (1 if "=" in rest[at] else 2)]
    return flags + rest


def given_value(argv: list[str], *names: str) -> str | None:
    """Return the value that `argv` gives to one of `names`, None if it gives none. The last one counts."""
    found = None
    for index, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else (argv[index + 1] if index + 1 < len(argv) else None)
    return found


def _rank_count(argv: list[str]) -> int:
    """Return tensor-parallel times data-parallel ranks as far as the command line tells; SGLang checks the values."""
    count = 1
    for names in (
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        ("--dp-size", "--data-parallel-size", "--dp"),
    ):
        value = given_value(argv, *names) or ""
        count *= int(value) if value.isdigit() and int(value) > 0 else 1
    return count


def _bind_threads(ranks: int, cores: list[int]) -> str:
    """Return SGLang's binding string: each rank its own cores, or shared ones where there are fewer cores than ranks.

    SGLang itself gives each rank a NUMA node and stops where there are more ranks than nodes.
    """
    share = max(1, len(cores) // ranks)
    starts = [(rank * share) % len(cores) for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in cores[start : start + share]) for start in starts)


def with_defaults(argv: list[str], defaults: Mapping[str, str | None]) -> list[str]:
    """Return `argv` with each default appended whose flag was not given. A default of None is a flag without value."""
    names = {argument.partition("=")[0] for argument in argv}
    result = list(argv)
    for flag, value in defaults.items():
        if flag in names or names & set(_ALIASES.get(flag, ())):
            continue
        result += [flag] if value is None else [flag, value]
    return result


def main(argv: list[str] | None = None) -> int:
    try:
        command, env = prepare(sys.argv[1:] if argv is None else argv, os.environ)
    except (ConfigError, StoreError, UpstreamError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    sys.stdout.flush()
    # The server replaces this process, so signals and exit codes are its own.
    os.execve(sys.executable, [sys.executable, "-m", "sglang_histate.adapter.serve", *command], env)


if __name__ == "__main__":
    sys.exit(main())
