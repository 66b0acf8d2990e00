"""The Kubernetes manifests as `kubectl kustomize` builds them, and what they say about pods and who reaches whom."""

from __future__ import annotations

import copy
import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from tests.infra.tools import HEADRACE, INFRA, ROOT, program, run

OVERLAYS = ("kind", "production")
SCHEMAS = Path(os.environ.get("HEADRACE_SHARED", ROOT.parent / "shared")) / "schemas"
"""Schemas of custom resources, where a machine has them."""

Doc = dict[str, Any]


@cache
def _built(overlay: str) -> str:
    folder = Path(mkdtemp(prefix="hr-infra-"))
    try:
        shutil.copytree(INFRA, folder / "infra", ignore=shutil.ignore_patterns("terraform", "secrets"))
        at = folder / "infra" / "kubernetes" / "overlays" / overlay
        if overlay == "kind":
            run([at / "make-secrets.sh"], env={"HEADRACE": str(HEADRACE)})
        said = subprocess.run(
            [program("kubectl", "it builds Kustomize overlays"), "kustomize", at], capture_output=True, text=True
        )
        assert said.returncode == 0, said.stderr
        return said.stdout
    finally:
        shutil.rmtree(folder)


def build(overlay: str) -> list[Doc]:
    """All resources of an overlay."""
    return [doc for doc in yaml.safe_load_all(_built(overlay)) if doc]


def of_kind(docs: list[Doc], *kinds: str) -> list[Doc]:
    return [doc for doc in docs if doc["kind"] in kinds]


def named(docs: list[Doc], kind: str, name: str) -> Doc:
    [found] = [doc for doc in of_kind(docs, kind) if doc["metadata"]["name"] == name]
    return found


class PodKind(NamedTuple):
    """What a controller makes pods from."""

    name: str
    labels: dict[str, str]
    spec: Doc


def pods(docs: list[Doc]) -> list[PodKind]:
    """Every kind of pod that an overlay leads to, Ray's with the labels that KubeRay adds."""
    found = [
        PodKind(doc["metadata"]["name"], template["metadata"]["labels"], template["spec"])
        for doc in of_kind(docs, "Deployment", "StatefulSet")
        for template in [doc["spec"]["template"]]
    ]
    for doc in of_kind(docs, "RayService"):
        cluster = doc["spec"]["rayClusterConfig"]
        found.append(_ray_pod("ray-head", "head", cluster["headGroupSpec"]["template"]))
        for group in cluster["workerGroupSpecs"]:
            found.append(_ray_pod(f"ray-{group['groupName']}", "worker", group["template"]))
    return found


def _ray_pod(name: str, role: str, template: Doc) -> PodKind:
    return PodKind(name, {**template["metadata"]["labels"], "ray.io/node-type": role}, template["spec"])


def containers(docs: list[Doc]) -> Iterator[tuple[str, Doc]]:
    for pod in pods(docs):
        for container in [*pod.spec["containers"], *pod.spec.get("initContainers", [])]:
            yield f"{pod.name}/{container['name']}", container


# -- who reaches whom: network policies as the API defines them ------------------------------------------------------


class Peer(NamedTuple):
    """One end of a connection: labels of a pod and of its namespace, or an address outside."""

    labels: Mapping[str, str] = MappingProxyType({})
    namespace: Mapping[str, str] = MappingProxyType({"kubernetes.io/metadata.name": "headrace"})
    address: str | None = None


def matches(selector: Doc | None, labels: Mapping[str, str]) -> bool:
    """Does a label selector select these labels?"""
    selector = selector or {}
    wanted = selector.get("matchLabels") or {}
    for rule in selector.get("matchExpressions") or []:
        assert rule["operator"] == "Exists", rule
        if rule["key"] not in labels:
            return False
    return all(labels.get(key) == value for key, value in wanted.items())


def may_connect(docs: list[Doc], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Do the policies of both ends let this connection through? Ends outside of our namespace have none."""
    return _lets(docs, "Egress", source, target, port, protocol) and _lets(
        docs, "Ingress", target, source, port, protocol
    )


def _lets(docs: list[Doc], way: str, own: Peer, other: Peer, port: int, protocol: str) -> bool:
    if own.address is not None or own.namespace["kubernetes.io/metadata.name"] != "headrace":
        return True
    policies = [
        doc["spec"]
        for doc in of_kind(docs, "NetworkPolicy")
        if way in doc["spec"]["policyTypes"] and matches(doc["spec"]["podSelector"], own.labels)
    ]
    side = "to" if way == "Egress" else "from"
    rules = [rule for policy in policies for rule in policy.get(way.lower()) or []]
    return not policies or any(_rule_lets(rule, side, other, port, protocol) for rule in rules)


def _rule_lets(rule: Doc, side: str, other: Peer, port: int, protocol: str) -> bool:
    ports, peers = rule.get("ports"), rule.get(side)
    if ports and not any(_is_port(each, port) and each.get("protocol", "TCP") == protocol for each in ports):
        return False
    return not peers or any(_is_peer(peer, other) for peer in peers)


def _is_port(rule: Doc, port: int) -> bool:
    first: int = rule["port"]
    last: int = rule.get("endPort", first)
    return first <= port <= last


def _is_peer(peer: Doc, other: Peer) -> bool:
    if block := peer.get("ipBlock"):
        return other.address is not None and ipaddress.ip_address(other.address) in ipaddress.ip_network(block["cidr"])
    if other.address is not None:
        return False
    own_namespace = {"matchLabels": {"kubernetes.io/metadata.name": "headrace"}}
    return matches(peer.get("namespaceSelector", own_namespace), other.namespace) and matches(
        peer.get("podSelector"), other.labels
    )


# -- custom resources ------------------------------------------------------------------------------------------------


def schema_of(doc: Doc) -> Doc | None:
    """The schema of a custom resource with unknown fields as errors, or None if this machine has none."""
    group, _, version = doc["apiVersion"].partition("/")
    file = SCHEMAS / f"{group}_{version}_{doc['kind']}.json"
    return _strict(json.loads(file.read_text("utf-8"))) if file.exists() else None


def _strict(schema: Doc) -> Doc:
    """The API server drops fields that it does not know; here they are errors."""
    strict = copy.deepcopy(schema)

    def close(node: Any) -> None:
        if isinstance(node, dict):
            if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
                node.setdefault("additionalProperties", False)
            if node.pop("x-kubernetes-int-or-string", False):
                node.pop("type", None)
            for child in node.values():
                close(child)
        elif isinstance(node, list):
            for child in node:
                close(child)

    close(strict)
    if "metadata" in strict["properties"]:
        strict["properties"]["metadata"] = {"type": "object"}
    return strict
