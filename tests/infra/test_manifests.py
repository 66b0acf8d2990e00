"""The manifests: valid as Kubernetes reads them, in agreement with the code, and as closed as they say."""

from __future__ import annotations

import re
import warnings
from ipaddress import IPv4Network as ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml

from headrace.api.app import create_app
from headrace.broker import settings
from headrace.broker.memory import MemoryBroker
from headrace.broker.settings import Settings
from headrace.cluster import application
from headrace.workers import scrape
from tests.infra.commands import parse
from tests.infra.manifests import OVERLAYS, Doc, build, containers, named, of_kind, pods, schema_of
from tests.infra.tools import INFRA, ROOT, VERSION

CORE_GROUPS = ("v1", "apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1")
CUSTOM = {"RayService", "PodMonitor", "PrometheusRule", "ScrapeConfig", "SecretStore", "ExternalSecret", "HTTPRoute"}
URL = "redis://:secret@broker.example:6379/0"

both = pytest.mark.parametrize("overlay", OVERLAYS)


@pytest.fixture
def serve_schema() -> Any:
    """Ray's own reading of a Serve configuration; its modules warn of their own past when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.serve.schema

    return ray.serve.schema.ServeDeploySchema


def config_file(docs: list[Doc], folder: Path) -> Path:
    """The overlay's headrace.yaml as pods find it."""
    file = folder / "headrace.yaml"
    file.write_text(named(docs, "ConfigMap", "headrace-config")["data"]["headrace.yaml"], "utf-8")
    return file


def config(docs: list[Doc], folder: Path) -> Settings:
    return settings.load(config_file(docs, folder), {"HEADRACE_REDIS__URL": URL})


# -- valid -----------------------------------------------------------------------------------------------------------


@both
def test_core_kinds_are_valid(overlay: str) -> None:
    docs = build(overlay)
    core = [doc for doc in docs if doc["apiVersion"] in CORE_GROUPS]
    assert len(core) > 15
    assert {doc["kind"] for doc in docs if doc not in core} <= CUSTOM
    for doc in core:
        kubernetes_validate.validate(doc, "1.33", strict=True)


@both
def test_custom_kinds_are_valid(overlay: str) -> None:
    custom = of_kind(build(overlay), *CUSTOM)
    assert "RayService" in {doc["kind"] for doc in custom}
    for doc in custom:
        assert doc["metadata"]["name"]
        if (schema := schema_of(doc)) is not None:
            jsonschema.Draft202012Validator(schema).validate(doc)


def test_the_file_at_the_top_is_the_one_that_is_deployed() -> None:
    [doc] = yaml.safe_load_all((ROOT / "ray-cluster.yaml").read_text("utf-8"))
    base = INFRA / "kubernetes" / "base" / "ray-cluster.yaml"
    assert doc == yaml.safe_load(base.read_text("utf-8"))
    assert doc["kind"] == "RayService"


@both
def test_everything_that_is_named_is_there(overlay: str) -> None:
    docs = build(overlay)
    secrets = {doc["metadata"]["name"]: set(doc.get("data", {})) for doc in of_kind(docs, "Secret")}
    for doc in of_kind(docs, "ExternalSecret"):
        secrets[doc["spec"]["target"]["name"]] = {each["secretKey"] for each in doc["spec"]["data"]}
    used = {(ref["name"], ref["key"]) for ref in _found(docs, "secretKeyRef")}
    assert used
    assert [(name, key) for name, key in used if key not in secrets.get(name, ())] == []
    for kind, field in (("ConfigMap", "configMap"), ("PersistentVolumeClaim", "persistentVolumeClaim")):
        there = {doc["metadata"]["name"] for doc in of_kind(docs, kind)}
        wanted = {ref.get("name") or ref["claimName"] for ref in _found(docs, field)}
        assert wanted - there == set(), kind
    accounts = {doc["metadata"]["name"] for doc in of_kind(docs, "ServiceAccount")}
    assert {pod.spec["serviceAccountName"] for pod in pods(docs) if "serviceAccountName" in pod.spec} <= accounts


def _found(node: Any, field: str) -> list[Doc]:
    if isinstance(node, dict):
        own = [node[field]] if isinstance(node.get(field), dict) else []
        return own + [each for child in node.values() for each in _found(child, field)]
    return [each for child in node for each in _found(child, field)] if isinstance(node, list) else []


@both
def test_services_budgets_and_monitors_find_their_pods(overlay: str) -> None:
    docs = build(overlay)
    by_stateful_set = {"statefulset.kubernetes.io/pod-name"}  # a label that the controller adds
    for doc in of_kind(docs, "Service", "PodDisruptionBudget", "PodMonitor"):
        selector = doc["spec"]["selector"]
        wanted = selector if doc["kind"] == "Service" else selector["matchLabels"]
        wanted = {key: value for key, value in wanted.items() if key not in by_stateful_set}
        found = [pod for pod in pods(docs) if wanted.items() <= pod.labels.items()]
        assert found, doc["metadata"]["name"]
        ports = {port["name"] for pod in found for each in pod.spec["containers"] for port in each["ports"]}
        for port in doc["spec"].get("ports", []):
            assert port["targetPort"] in ports
        for endpoint in doc["spec"].get("podMetricsEndpoints", []):
            assert endpoint["port"] in ports
    scaled = named(docs, "HorizontalPodAutoscaler", "headrace-api")["spec"]["scaleTargetRef"]
    assert named(docs, scaled["kind"], scaled["name"])


# -- in agreement with the code --------------------------------------------------------------------------------------


@both
def test_the_config_map_is_read_by_the_real_settings_code(overlay: str, tmp_path: Path) -> None:
    read = config(build(overlay), tmp_path)
    assert read.redis.url == URL
    assert read.api.host == "0.0.0.0"
    assert read.keys, "without keys a pod refuses to listen to others"


@both
def test_every_environment_variable_is_a_setting(overlay: str, tmp_path: Path) -> None:
    docs = build(overlay)
    file = config_file(docs, tmp_path)
    names = {each["name"] for _, container in containers(docs) for each in container.get("env", [])}
    ours = {name for name in names if name.startswith("HEADRACE_")}
    assert ours == {"HEADRACE_REDIS__URL", "HEADRACE_DATA"}
    for name in ours:
        assert settings.load(file, {name: "/changed"}) != settings.load(file, {})
    from ray._common.usage.usage_constants import USAGE_STATS_ENABLED_ENV_VAR

    assert names - ours <= {USAGE_STATS_ENABLED_ENV_VAR, "PASSWORD", "REPLICA_PASSWORD"}


@both
def test_commands_are_ones_that_the_command_line_knows(overlay: str) -> None:
    commands = [container["args"] for _, container in containers(build(overlay)) if "args" in container]
    assert sorted({command[0] for command in commands}) == ["api", "redis-functions"]
    for command in commands:
        assert parse(command)["config"] == Path(command[2])


@both
async def test_ports_and_probes_are_the_pods_own(overlay: str, tmp_path: Path) -> None:
    docs = build(overlay)
    read = config(docs, tmp_path)
    [api] = named(docs, "Deployment", "headrace-api")["spec"]["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in api["ports"]] == [read.api.port]
    probes = {api[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes == {"/healthz", "/readyz"}
    monitors = of_kind(docs, "PodMonitor")
    scraped = {each["path"] for monitor in monitors for each in monitor["spec"]["podMetricsEndpoints"]}
    transport = httpx.ASGITransport(create_app(read, MemoryBroker(read.queue)))
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        assert {path: (await client.get(path)).status_code for path in probes | scraped} == dict.fromkeys(
            probes | scraped, 200
        ) | {"/readyz": 503}  # it has not asked its broker yet
    mounts = {mount["mountPath"] for mount in api["volumeMounts"]}
    assert str(Path(api["args"][2]).parent) in mounts


def test_ray_answers_the_health_check_that_workers_are_asked() -> None:
    from ray._private import ray_constants

    [asked] = {
        (group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"], 52365)
        for doc in of_kind(build("production"), "RayService")
        for group in doc["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    assert asked[1] == ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    import ray.dashboard.http_server_agent as agent

    assert asked[0] in Path(str(agent.__file__)).read_text("utf-8")  # among those that need no token


@both
def test_every_model_is_one_application_that_serve_can_build(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve_schema: Any
) -> None:
    docs = build(overlay)
    read = config(docs, tmp_path)
    monkeypatch.setenv("HEADRACE_REDIS__URL", URL)
    [service] = of_kind(docs, "RayService")
    serve = serve_schema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert [each.name for each in serve.applications] == [model.name for model in read.models]
    for each in serve.applications:
        assert each.import_path == f"{application.__name__}:{application.build.__name__}"
        assert Path(each.args["config"]).parent == Path("/etc/headrace")
        built = application.build({**each.args, "config": str(tmp_path / "headrace.yaml")})
        deployment = built._bound_deployment
        assert deployment.init_args == (str(tmp_path / "headrace.yaml"), each.name)
        assert URL not in repr(deployment.init_args)


@both
def test_prometheus_is_let_in_where_replicas_listen(overlay: str, tmp_path: Path) -> None:
    docs = build(overlay)
    first = config(docs, tmp_path).worker.metrics_port
    rules = named(docs, "NetworkPolicy", "ray")["spec"]["ingress"]
    ranges = [(each["port"], each["endPort"]) for rule in rules for each in rule.get("ports", []) if "endPort" in each]
    assert first is not None and ranges == [(first, first + scrape.PORTS - 1)]


def test_prometheus_asks_the_pods_where_the_replicas_are() -> None:
    docs = build("production")
    [asked] = [
        urlsplit(each["url"]) for each in named(docs, "ScrapeConfig", "headrace-replicas")["spec"]["httpSDConfigs"]
    ]
    service = named(docs, "Service", "headrace-api")
    assert asked.path == "/metrics/targets"
    assert asked.hostname == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert asked.port == service["spec"]["ports"][0]["port"]


@both
def test_everybody_has_time_to_drain(overlay: str, tmp_path: Path) -> None:
    docs = build(overlay)
    read = config(docs, tmp_path)
    api = named(docs, "Deployment", "headrace-api")["spec"]["template"]["spec"]
    wait_s = api["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert api["terminationGracePeriodSeconds"] > wait_s + read.api.drain_s
    [service] = of_kind(docs, "RayService")
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > read.worker.drain_s
    for pod in pods(docs):
        if pod.name.startswith("ray-"):
            assert pod.spec["terminationGracePeriodSeconds"] > read.worker.drain_s + 5


@both
def test_images_are_this_version(overlay: str) -> None:
    images = {container["image"] for _, container in containers(build(overlay))}
    ours = {image for image in images if "headrace/" in image}
    assert ours and {image.rpartition(":")[2] for image in ours} == {VERSION}
    assert all(re.search(r":[0-9]+\.[0-9]+\.[0-9]+", image) for image in images)


def test_ray_is_the_locked_version() -> None:
    locked = re.search(r"^ray(?:\[.*\])?==(\S+)", (ROOT / "requirements" / "base.txt").read_text("utf-8"), re.M)
    assert locked is not None
    [service] = of_kind(build("production"), "RayService")
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == locked[1]


def test_gpu_classes_are_node_groups_of_terraform() -> None:
    text = (INFRA / "terraform" / "variables.tf").read_text("utf-8")
    groups = set(re.findall(r"^    ([a-z0-9-]+)\s*= \{ instance_types", text, re.M))
    asked = {
        pod.spec["nodeSelector"]["headrace/gpu-class"]
        for pod in pods(build("production"))
        if "nodeSelector" in pod.spec
    }
    assert asked == groups
    assert '"headrace/gpu-class"' in (INFRA / "terraform" / "modules" / "nodes" / "main.tf").read_text("utf-8")


def test_production_asks_for_the_secrets_and_subnets_that_terraform_makes() -> None:
    docs = build("production")
    text = (INFRA / "terraform" / "main.tf").read_text("utf-8")
    [line] = re.findall(r"secrets\s+= \[(.*)\]", text)
    asked = {each["remoteRef"]["key"] for doc in of_kind(docs, "ExternalSecret") for each in doc["spec"]["data"]}
    assert asked == {f"headrace/{name}" for name in re.findall(r'"([^"]+)"', line)}


def test_production_speaks_to_the_broker_that_terraform_makes(tmp_path: Path) -> None:
    read = config(build("production"), tmp_path)
    assert read.redis.cluster and not read.redis.check_version  # MemoryDB is a cluster, of an old number
    assert read.redis.shards >= 16
    [block] = [each for rule in _found(build("production"), "ipBlock") for each in [rule["cidr"]]]
    network = (INFRA / "terraform" / "modules" / "network" / "tests" / "network.tftest.hcl").read_text("utf-8")
    data = re.findall(r'aws_subnet\.data\["[a-z0-9-]+"\]\.cidr_block == "(10\.40\.[0-9.]+/21)"', network)
    assert data and all(ip_network(each).subnet_of(ip_network(block)) for each in data)


def test_the_autoscaler_asks_for_a_metric_that_pods_have() -> None:
    from headrace.broker.metrics import STREAMS_OPEN

    metrics = named(build("production"), "HorizontalPodAutoscaler", "headrace-api")["spec"]["metrics"]
    names = [each["pods"]["metric"]["name"] for each in metrics if each["type"] == "Pods"]
    assert names == [STREAMS_OPEN._name]
    assert [each["resource"]["name"] for each in metrics if each["type"] == "Resource"] == ["cpu"]
