"""What is shipped for containers and Kubernetes: manifests keep to the schema, their config is one, names agree."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvoffloadd import checks, cli, config

ROOT = Path(__file__).parents[1]
MANIFESTS = sorted((ROOT / "config" / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.33"
OF_OTHERS = {"monitoring.coreos.com/v1"}
"""Versions of resources that Kubernetes itself does not have."""

INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN",
    "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def only(kind: str) -> dict[str, Any]:
    (found,) = [one for path in MANIFESTS for one in documents(path) if one["kind"] == kind]
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.name))
def test_manifests_keep_to_the_schema(path: Path) -> None:
    for document in documents(path):
        if document["apiVersion"] not in OF_OTHERS:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_schema_is_strict() -> None:
    wrong = copy.deepcopy(only("DaemonSet"))
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostPid"):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_the_config_of_the_manifest_is_one(tmp_path: Path) -> None:
    (text,) = only("ConfigMap")["data"].values()
    written = tmp_path / "kvoffloadd.toml"
    written.write_text(text)
    chosen = config.load(written)
    pod = only("DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    for place in (Path(chosen.memory.pool_file), chosen.server.socket, *(root.path for root in chosen.disk.roots)):
        assert any(mount in place.parents for mount in mounts), f"{place} is on no volume"
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert limit > chosen.memory.capacity_bytes * 1.02 + (1 << 30)
    stop_s = chosen.server.drain_s + chosen.copy.worker_drain_s + chosen.disk.flush_s
    assert pod["terminationGracePeriodSeconds"] > stop_s + 30
    assert {volume["name"] for volume in pod["volumes"]} >= {mount["name"] for mount in container["volumeMounts"]}


def test_a_cluster_s_prometheus_finds_the_metrics(tmp_path: Path) -> None:
    """Annotations, the operator's monitor and the network policy name the port where the daemon listens."""
    template = only("DaemonSet")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (port,) = container["ports"]
    written = tmp_path / "kvoffloadd.toml"
    written.write_text(only("ConfigMap")["data"]["kvoffloadd.toml"])
    listen = config.load(written).metrics.listen
    assert checks.reaches_other_hosts(listen)
    assert checks.split_address(listen) == ("0.0.0.0", port["containerPort"])
    annotations = template["metadata"]["annotations"]
    assert annotations == {
        "prometheus.io/scrape": "true", "prometheus.io/port": str(port["containerPort"]),
        "prometheus.io/path": "/metrics",
    }  # fmt: skip
    monitor, policy = only("PodMonitor")["spec"], only("NetworkPolicy")["spec"]
    labels = template["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"] == policy["podSelector"]["matchLabels"] == labels
    (scraped,) = monitor["podMetricsEndpoints"]
    assert (scraped["port"], scraped["path"]) == (port["name"], annotations["prometheus.io/path"])
    (rule,) = policy["ingress"]
    assert policy["policyTypes"] == ["Ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": port["name"]}]
    assert [set(peer) for peer in rule["from"]] == [{"namespaceSelector"}], "an empty rule would let everybody in"
    assert rule["from"][0]["namespaceSelector"]["matchLabels"]


def test_commands_of_the_manifest_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = only("DaemonSet")["spec"]["template"]["spec"]["containers"]
    commands = [
        container["args"],
        *(container[f"{name}Probe"]["exec"]["command"][1:] for name in ("readiness", "liveness")),
    ]
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, "--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out


def container_lines() -> list[str]:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_containerfile() -> None:
    lines = container_lines()
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    (uid,) = [line.partition("UID=")[2] for line in lines if line.startswith("ARG UID=")]
    assert users == ["${UID}:${UID}"] and int(uid) > 0, "the daemon is not root"
    sent = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    for line in lines:
        if line.startswith("COPY") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), line
                assert source in sent, f"{source} is not sent to the build"


def test_the_containers_command_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = [re.findall(r'"([^"]+)"', line) for line in container_lines() if line.startswith("CMD")]
    copied = [line.split()[-1] for line in container_lines() if line.startswith("COPY config/")]
    assert words[-1] in copied
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert ended.value.code == 0
    assert "usage: kvoffloadd serve" in capsys.readouterr().out


def test_one_wheel_is_for_all_versions_of_python() -> None:
    """Its helper keeps to the stable interface, as its name shows."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tool = settings["tool"]
    assert all(module["py-limited-api"] for module in tool["setuptools"]["ext-modules"])
    oldest = re.fullmatch(r">=(\d+)\.(\d+)", settings["project"]["requires-python"])
    assert oldest is not None
    assert tool["distutils"]["bdist_wheel"]["py-limited-api"] == f"cp{oldest[1]}{oldest[2]}"
    (module,) = tool["setuptools"]["ext-modules"]
    (header,) = module["depends"]
    assert "define Py_LIMITED_API 0x030B" in (ROOT / header).read_text(encoding="utf-8")
    for source in module["sources"]:
        text = (ROOT / source).read_text(encoding="utf-8")
        assert re.findall(r"#include (.*)", text)[0] == f'"{Path(header).name}"', "before all other headers"
