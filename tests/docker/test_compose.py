"""compose.yaml: what it builds, mounts and scrapes is there, and the servers are started and stopped as they need to be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_histate.config import FLAG_DEFAULTS, config_from_flags, split_flags

from .test_dockerfile import image_of

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = ("gpu", "demo")


def with_defaults(text: str) -> str:
    """Return a value with its ${NAME:-default} filled in."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def mounts(service: str) -> dict[str, str]:
    found = {}
    for line in SERVICES[service].get("volumes", ()):
        source, target, *_ = with_defaults(line).split(":")
        found[target] = source
    return found


def test_every_service_runs_in_both_settings_or_is_a_server() -> None:
    assert set(SERVICES) == {*SERVERS, "prometheus", "grafana"}
    for name, service in SERVICES.items():
        assert service["profiles"] == ([name] if name in SERVERS else ["gpu", "demo"])


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_is_there_or_a_declared_volume(name: str) -> None:
    for source in mounts(name).values():
        if source.startswith("./"):
            assert (ROOT / source).exists(), f"{name} mounts {source}"
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_open_to_this_machine_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_built_here_and_writes_into_a_volume(name: str) -> None:
    service = SERVICES[name]
    image = image_of(service["build"]["dockerfile"])
    assert service["build"]["context"] == "."
    assert set(image.volumes) <= set(mounts(name))
    (port,) = service["ports"]
    assert port.rsplit(":", 1)[1] in image.ports
    assert "user" not in service  # the image's own, which is not root


@pytest.mark.parametrize("name", SERVERS)
def test_the_command_lines_are_ones_that_the_launcher_takes(name: str) -> None:
    command = [with_defaults(word) for word in SERVICES[name]["command"]]
    assert "--enable-metrics" in command
    ours, rest = split_flags(command)
    assert set(ours) <= set(FLAG_DEFAULTS) and not any("$" in word for word in rest)
    ours.pop("demo", None)
    config_from_flags({"histate_ssd_dir": "/var/lib/histate/ssd", **ours})


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_may_end_in_its_own_time_and_comes_back_after_a_failure(name: str) -> None:
    service = SERVICES[name]
    # 5 s until SGLang looks for the signal, 15 s that it gives its processes.
    assert int(service["stop_grace_period"].removesuffix("s")) >= 5 + 15 + 5
    assert service["restart"] == "on-failure"


def test_only_the_gpu_server_asks_for_gpus() -> None:
    (device,) = SERVICES["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert "deploy" not in SERVICES["demo"]


def test_prometheus_scrapes_the_server_by_a_name_that_both_have() -> None:
    config = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    names = [set(SERVICES[name]["networks"]["default"]["aliases"]) for name in SERVERS]
    assert targets and targets <= {f"{alias}:30000" for alias in set.intersection(*names)}


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    provisioning = ROOT / "docker" / "grafana" / "provisioning"
    sources = [
        source
        for file in (provisioning / "datasources").glob("*.y*ml")
        for source in yaml.safe_load(file.read_text(encoding="utf-8"))["datasources"]
    ]
    assert [source["url"] for source in sources] == ["http://prometheus:9090"]
    paths = [
        provider["options"]["path"]
        for file in (provisioning / "dashboards").glob("*.y*ml")
        for provider in yaml.safe_load(file.read_text(encoding="utf-8"))["providers"]
    ]
    assert paths and set(paths) <= set(mounts("grafana"))
