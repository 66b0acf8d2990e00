"""What no manifest may do, and who may connect to whom."""

from __future__ import annotations

import pytest

from tests.infra.manifests import OVERLAYS, Doc, Peer, build, containers, may_connect, named, of_kind, pods

both = pytest.mark.parametrize("overlay", OVERLAYS)

API = Peer({"app.kubernetes.io/name": "headrace-api", "headrace/reaches-broker": "true"})
RAY_WORKER = Peer({"headrace/component": "ray", "headrace/reaches-broker": "true", "ray.io/node-type": "worker"})
RAY_HEAD = Peer({"headrace/component": "ray", "headrace/reaches-broker": "true", "ray.io/node-type": "head"})
RAY_REDIS = Peer({"app.kubernetes.io/name": "headrace-ray-redis"})
VALKEY = Peer({"app.kubernetes.io/name": "headrace-valkey"})
PROXY = Peer({"app.kubernetes.io/name": "headrace-proxy"})
OPERATOR = Peer({"app.kubernetes.io/name": "kuberay-operator"}, {"kubernetes.io/metadata.name": "kuberay-operator"})
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
STRANGER = Peer({"app": "stranger"}, {"kubernetes.io/metadata.name": "default"})
INTERNET = Peer(address="198.51.100.7")
MEMORYDB = Peer(address="10.40.224.10")
RAY_PORTS = (6379, 8265, 10001, 52365, 8000)


@both
def test_no_container_has_more_rights_than_it_needs(overlay: str) -> None:
    for name, container in containers(build(overlay)):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name


@both
def test_no_pod_is_root_or_has_a_token_or_learns_of_services(overlay: str) -> None:
    for pod in pods(build(overlay)):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0, pod.name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        assert pod.spec["enableServiceLinks"] is False, pod.name
        # the head's autoscaler asks the API for nodes, with the account that KubeRay binds for it
        assert pod.name == "ray-head" or pod.spec["automountServiceAccountToken"] is False, pod.name
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            assert field not in pod.spec, pod.name
        assert not [volume for volume in pod.spec.get("volumes", []) if "hostPath" in volume], pod.name


@both
def test_every_container_says_what_it_needs_and_how_it_is(overlay: str) -> None:
    for name, container in containers(build(overlay)):
        resources = container["resources"]
        assert resources["requests"].keys() >= {"cpu", "memory"}, name
        assert "memory" in resources["limits"], name
        assert "cpu" not in resources["limits"], f"{name}: a limit of CPU throttles streams"
        if name.endswith("/functions"):
            continue  # it ends before the others start
        # KubeRay probes the head, and the liveness of workers, by itself
        assert "readinessProbe" in container or name.startswith("ray-head/"), name
        assert "livenessProbe" in container or name.startswith("ray-"), name


@both
def test_every_kind_of_pod_is_guarded_against_disruption(overlay: str) -> None:
    docs = build(overlay)
    budgets = [doc["spec"]["selector"]["matchLabels"] for doc in of_kind(docs, "PodDisruptionBudget")]
    single = {"headrace-ray-redis"}  # one pod: a budget could only forbid every drain
    for pod in pods(docs):
        if pod.name not in single:
            assert [each for each in budgets if each.items() <= pod.labels.items()], pod.name


@both
def test_what_there_are_several_of_is_spread(overlay: str) -> None:
    for pod in pods(build(overlay)):
        if pod.name == "headrace-ray-redis" or (overlay == "kind" and pod.name == "headrace-valkey"):
            continue
        assert "topologySpreadConstraints" in pod.spec or "podAntiAffinity" in pod.spec["affinity"], pod.name


@both
def test_each_part_logs_in_as_its_own_user_and_only_an_init_container_brings_functions(overlay: str) -> None:
    urls = {
        name: each["valueFrom"]["secretKeyRef"]["key"]
        for name, container in containers(build(overlay))
        for each in container.get("env", [])
        if each["name"] == "HEADRACE_REDIS__URL"
    }
    users = {name: key.removesuffix("-url") for name, key in urls.items()}
    assert users.pop("headrace-api/api") == "gateway"
    assert users.pop("ray-head/ray-head") == "scaler"
    brings = {name for name in users if name.endswith("/functions")}
    assert {users.pop(name) for name in brings} == {"loader"}
    assert set(users.values()) == {"worker"}
    assert {name.partition("/")[0] for name in brings} == {pod.name for pod in pods(build(overlay))} & {
        name.partition("/")[0] for name in urls
    }
    inits = [each["name"] for pod in pods(build(overlay)) for each in pod.spec.get("initContainers", [])]
    assert set(inits) == {"functions"}


@both
def test_no_secret_stands_in_a_manifest(overlay: str) -> None:
    for name, container in containers(build(overlay)):
        for each in container.get("env", []):
            assert "valueFrom" in each or not each["name"].endswith(("PASSWORD", "URL", "TOKEN")), name
    if overlay == "production":
        assert of_kind(build(overlay), "Secret") == []


@both
def test_the_namespace_holds_everybody_to_the_restricted_standard(overlay: str) -> None:
    labels = named(build(overlay), "Namespace", "headrace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@both
def test_ray_is_locked(overlay: str) -> None:
    [service] = of_kind(build(overlay), "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"].startswith("headrace-ray-redis:")


@both
def test_only_ray_and_its_operator_reach_rays_ports(overlay: str) -> None:
    docs = build(overlay)
    for port in RAY_PORTS:
        assert may_connect(docs, RAY_HEAD, RAY_WORKER, port) and may_connect(docs, RAY_WORKER, RAY_HEAD, port)
        for source in (API, PROXY, VALKEY, PROMETHEUS, STRANGER, INTERNET):
            for target in (RAY_HEAD, RAY_WORKER):
                assert not may_connect(docs, source, target, port), (source, port)
    assert may_connect(docs, OPERATOR, RAY_HEAD, 8265)
    assert not may_connect(docs, OPERATOR, RAY_HEAD, 6379)
    assert may_connect(docs, PROMETHEUS, RAY_WORKER, 8080)
    for port in (9099, 9132):
        assert not may_connect(docs, PROMETHEUS, RAY_WORKER, port)
    for port in (9100, 9131):
        assert may_connect(docs, PROMETHEUS, RAY_WORKER, port)
        assert not may_connect(docs, STRANGER, RAY_WORKER, port)


@both
def test_pods_reach_the_broker_and_nothing_else(overlay: str) -> None:
    docs = build(overlay)
    broker = VALKEY if overlay == "kind" else MEMORYDB
    for source in (API, RAY_WORKER, RAY_HEAD):
        assert may_connect(docs, source, broker, 6379)
    for source in (API, RAY_WORKER):
        for port in (80, 443, 6379):
            fetches_its_model = (overlay, source, port) == ("kind", RAY_WORKER, 443)
            assert may_connect(docs, source, INTERNET, port) is fetches_its_model
        assert not may_connect(docs, source, RAY_REDIS, 6379)
    for source in (STRANGER, INTERNET, PROMETHEUS, PROXY, OPERATOR):
        assert not may_connect(docs, source, VALKEY, 6379)
    assert may_connect(docs, RAY_HEAD, RAY_REDIS, 6379)


@both
def test_who_may_ask_the_pods(overlay: str) -> None:
    docs = build(overlay)
    assert may_connect(docs, PROMETHEUS, API, 8080)
    gateway = Peer({}, {"kubernetes.io/metadata.name": "gateways", "headrace/gateway": "true"})
    assert may_connect(docs, gateway, API, 8080)
    for source in (STRANGER, INTERNET, RAY_WORKER):
        assert not may_connect(docs, source, API, 8080)
    if overlay == "kind":
        assert may_connect(docs, INTERNET, PROXY, 8000)
        assert may_connect(docs, PROXY, API, 8080)


def test_the_route_has_no_timeout() -> None:
    route: Doc = named(build("production"), "HTTPRoute", "headrace")
    rules = [rule for rule in route["spec"]["rules"] if rule.get("backendRefs")]
    assert [rule["timeouts"] for rule in rules] == [{"request": "0s", "backendRequest": "0s"}]


def test_metrics_that_need_no_key_are_not_passed_on_to_the_world() -> None:
    route: Doc = named(build("production"), "HTTPRoute", "headrace")
    paths = {
        match["path"]["value"]: "backendRefs" in rule for rule in route["spec"]["rules"] for match in rule["matches"]
    }
    assert paths == {"/metrics": False, "/": True}
