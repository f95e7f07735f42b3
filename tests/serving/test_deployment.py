"""The files around the server (Docker, compose, Prometheus, Grafana, CI) name what exists."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from http_server import ROOT, Server, wait_for
from prometheus_client.parser import text_string_to_metric_families

from mini_infer.cli.serve import parse
from mini_infer.serving.settings import table

DASHBOARD = json.loads((ROOT / "ops/grafana/dashboards/mini-infer.json").read_text())
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def source_of(service: str, inside: str) -> Path:
    """The file or folder here that a service's volumes put at this place."""
    for volume in COMPOSE["services"][service]["volumes"]:
        here, there, mode = volume.split(":")
        assert mode == "ro"
        if inside == there or inside.startswith(f"{there}/"):
            return ROOT / here / inside[len(there) :].lstrip("/")
    raise AssertionError(f"{service} has nothing at {inside}")


# --- Grafana and Prometheus ---------------------------------------------------------------------------------------


def test_every_metric_of_the_dashboard_is_one_of_the_servers(shared_server: Server) -> None:
    shared_server.complete(max_tokens=2)
    wait_for(lambda: shared_server.metrics().get("http_responses_total", 0) > 0)
    families = list(text_string_to_metric_families(shared_server.http.get("/metrics").text))
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    asked = [*expressions(), *(variable["query"] for variable in DASHBOARD["templating"]["list"])]
    for expression in asked:
        names = re.findall(r"\b(?:mini_infer:|process_)\w+", expression)
        assert names, expression
        for name in names:
            assert name in labels, name
            grouped = set(re.findall(r"by \((\w+)\)", expression)) | set(re.findall(r"(\w+)=~", expression))
            assert grouped <= labels[name], expression


def test_the_dashboard_shows_what_it_is_there_for() -> None:
    shown = " ".join(expressions())
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "request_success_total",
    ):
        assert f"mini_infer:{name}" in shown
    assert all(expression.count("(") == expression.count(")") for expression in expressions())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)


def test_grafana_finds_prometheus_and_prometheus_the_server() -> None:
    (source,) = load(source_of("grafana", "/etc/grafana/provisioning") / "datasources/prometheus.yaml")["datasources"]
    used = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]}
    assert used == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load(source_of("grafana", "/etc/grafana/provisioning") / "dashboards/mini-infer.yaml")["providers"]
    assert list(source_of("grafana", provider["options"]["path"]).glob("*.json"))
    environment = COMPOSE["services"]["grafana"]["environment"]
    assert source_of("grafana", environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).is_file()
    (job,) = load(source_of("prometheus", "/etc/prometheus/prometheus.yml"))["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    service, port = target.split(":")
    assert any(ports.endswith(f":{port}") for ports in COMPOSE["services"][service]["ports"])


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


# --- Docker -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_an_image_copies_is_let_through_and_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [path for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for path in line.split()[:-1]]
    assert {"pyproject.toml", "mini_infer"} <= set(copied) <= set(let_through)
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_starts_a_server_that_can_be_reached_and_is_not_root(name: str) -> None:
    text = (ROOT / name).read_text()
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
    command, *flags = json.loads(entrypoint)
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f"{command} = " in pyproject
    assert parse(flags, {"MINI_INFER_PORT": "8000"}).host == "0.0.0.0"
    assert "/healthz" in text[text.index("HEALTHCHECK") :]
    assert text.index("USER mini-infer") > text.index("pip install")
    for extra in re.findall(r"'\.\[([\w,]+)\]'", text)[0].split(","):
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE)
    variables = {variable for row in table() for variable in row.variables}
    assert set(re.findall(r"MINI_INFER_\w+", text)) <= variables


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_health_check_sees_a_server_and_its_absence(
    name: str, shared_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (check,) = re.findall(r"CMD (\[.+\])$", (ROOT / name).read_text(), re.MULTILINE)
    _, _, code = json.loads(check)
    monkeypatch.setenv("MINI_INFER_PORT", str(shared_server.port))
    exec(code, {})
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MINI_INFER_PORT", str(free.getsockname()[1]))
    with pytest.raises(OSError, match="refused"):
        exec(code, {})


def test_compose_starts_a_server_with_settings_that_exist() -> None:
    server = COMPOSE["services"]["server"]
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    assert parse(server["command"], {}).models[0].engine.model.path == "tiny-target"
    assert server["restart"] == "unless-stopped"
    (_, check) = server["healthcheck"]["test"]
    assert "$$MINI_INFER_PORT/healthz" in check
    assert server["ports"][0].endswith(":" + server["environment"]["MINI_INFER_PORT"])
    for ports in (port for service in COMPOSE["services"].values() for port in service["ports"]):
        assert ports.startswith("127.0.0.1:"), "what has no password is for this machine"


def test_kubernetes_starts_a_server_with_settings_that_exist(tmp_path: Path, shared_server: Server) -> None:
    deployment, service = yaml.safe_load_all((ROOT / "ops/kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    keys = tmp_path / "keys.yaml"
    keys.write_text("a: {key: x}")
    settings = parse([flag.replace("/keys/keys.yaml", str(keys)) for flag in container["args"]], {})
    assert settings.shutdown_timeout < pod["spec"]["terminationGracePeriodSeconds"]
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= settings.models[0].startup_timeout
    (port,) = container["ports"]
    assert port["containerPort"] == settings.port == int(pod["metadata"]["annotations"]["prometheus.io/port"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port["name"]
        assert shared_server.http.get(asked["path"]).status_code == 200
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}


# --- CI -----------------------------------------------------------------------------------------------------------


def test_ci_runs_what_every_change_must_pass() -> None:
    workflow = load(ROOT / ".github/workflows/ci.yml")
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads `on` as true
    job = workflow["jobs"]["check-and-test"]
    (targets,) = re.findall(r"^make (.+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert any(step.get("run", "").startswith(f"make {targets}") for step in job["steps"])
    cached = [step["with"]["cache-dependency-path"] for step in job["steps"] if "cache" in step.get("with", {})]
    assert cached == ["constraints.txt"]
    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.12"]
