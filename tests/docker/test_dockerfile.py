"""The Dockerfiles are ones that docker would build, and say of a container what operators rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_histate.config import config_from_flags, split_flags

from .dockerfile import Builder, DockerfileError, Image, ignored, parse

ROOT = Path(__file__).resolve().parents[2]
FILES = ("docker/Dockerfile", "docker/Dockerfile.cpu")


def image_of(name: str) -> Image:
    builder = Builder(ROOT, {}, run=False, env={"PATH": "/usr/bin"})
    return builder.build(parse((ROOT / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", FILES)
def test_it_parses_and_all_that_it_copies_is_in_the_context(name: str) -> None:
    assert image_of(name).ran


@pytest.mark.parametrize("name", FILES)
def test_a_container_is_not_root_and_says_so_in_a_number(name: str) -> None:
    user, _, group = image_of(name).user.partition(":")
    assert user.isdecimal() and int(user) > 0 and group == user


@pytest.mark.parametrize("name", FILES)
def test_the_ssd_is_a_volume_and_the_server_writes_into_it(name: str) -> None:
    image = image_of(name)
    (volume,) = image.volumes
    ours, rest = split_flags(
        list(image.entrypoint[image.entrypoint.index("sglang_histate.launch_server") + 1 :])
    )
    assert Path(config_from_flags(ours).ssd_dir).parent == Path(volume)
    assert rest == ["--host", "0.0.0.0", "--port", *image.ports]
    owner = f"chown -hR ${{UID}}:${{UID}} /home/histate {volume}"
    assert any(owner in step and "chmod 0700" in step for step in image.ran)


@pytest.mark.parametrize("name", FILES)
def test_process_1_is_the_init_and_the_server_its_child(name: str) -> None:
    image = image_of(name)
    assert image.entrypoint[:5] == (
        "python",
        "/opt/histate/init.py",
        "python",
        "-m",
        "sglang_histate.launch_server",
    )
    assert image.stop_signal == "SIGTERM" and image.health == ("python", "/opt/histate/health.py")
    assert {"interval", "timeout", "start-period"} <= set(image.health_flags)


@pytest.mark.parametrize("name", FILES)
def test_the_overlay_is_built_with_the_image(name: str) -> None:
    kind = "--cpu" if name.endswith(".cpu") else "--gpu"
    assert any(f"histate patches build {kind}" in step for step in image_of(name).ran)


def test_the_gpu_image_compiles_the_kernels() -> None:
    image = image_of("docker/Dockerfile")
    assert image.base.startswith("nvidia/cuda:13.") and "-devel-" in image.base
    assert any("kernels" in step for step in image.ran)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RUN a", "no FROM"),
        ("FROM a\nFROM b", "one stage"),
        ("FROM a\nRUN b \\\n", "goes on"),
        ("FROM a\nADD b c", "ADD"),
        ("FROM a\nRUN", "RUN of nothing"),
        ("FROM a\nCOPY --from=b c d", "not supported"),
        ("FROM a\nCMD [b]", "JSON"),
        ("FROM a\nHEALTHCHECK NONE", "without CMD"),
    ],
)
def test_what_docker_would_not_build_is_named_with_its_line(text: str, words: str) -> None:
    with pytest.raises(DockerfileError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM a\nCOPY eval ./", "not in the build context"),
        ("FROM a\nCOPY nowhere ./", "not in the build context"),
        ("FROM a\nCOPY LICENSE README.md x", "slash"),
        ("FROM a\nWORKDIR /$NOWHERE", "nothing sets NOWHERE"),
        ("FROM a\nENTRYPOINT python -m x", "shell form"),
        ("FROM a\nENV A", "without ="),
    ],
)
def test_what_would_fail_in_a_build_fails_here(text: str, words: str) -> None:
    with pytest.raises(DockerfileError, match=words):
        Builder(ROOT, {}, run=False, env={}).build(parse(text))


def test_lines_that_go_on_comments_and_flags() -> None:
    first, second, third = parse(
        "# syntax\nFROM a\n\nRUN b \\\n  # between\n  && c\nHEALTHCHECK --interval=3s CMD [\"d\", \"e f\"]\n"
    )  # fmt: skip
    assert first.text == "a" and second.text.split() == ["b", "&&", "c"] and second.line == 4
    assert third.flags == {"interval": "3s"} and third.words == ("d", "e f")


def test_dockerignore_counts_the_last_match() -> None:
    patterns = ["*", "!a", "!b/c", "**/x", "**/*.pyc"]
    assert ignored(patterns, "other") and not ignored(patterns, "a") and not ignored(patterns, "a/deep/file")
    assert not ignored(patterns, "b/c") and ignored(patterns, "b/d")
    assert ignored(patterns, "a/x") and ignored(patterns, "a/x/y") and ignored(patterns, "a/deep/m.pyc")


def test_paths_are_replaced_whole() -> None:
    builder = Builder(ROOT, {"/opt/h": Path("/tmp/1"), "/etc/passwd": Path("/tmp/2")}, run=False, env={})
    assert (
        builder.here("/opt/h/x:/opt/h /opt/hh y/opt/h >> /etc/passwd")
        == "/tmp/1/x:/tmp/1 /opt/hh y/opt/h >> /tmp/2"
    )
