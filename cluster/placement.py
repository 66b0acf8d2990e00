"""Where a model's replica may lie: what Ray is asked for, and why it has no room for it. Knows Ray's words, not Ray.

A replica whose ranks lie on one node is one actor with all of its GPUs: its engine starts the ranks as its children,
which see those GPUs. Any other is a placement group with one bundle for each rank, as vLLM's Ray executor wants it (a
bundle may have one GPU at most); the actor is in the first, with no GPU of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.broker.models import Model, Strategy

Resources = Mapping[str, float]

_KIND = "accelerator_type:"
_SHARE = 0.001
"""Of a node's resource that names the kind of its GPUs: Ray's own convention."""


class Need(NamedTuple):
    """What one replica takes."""

    bundles: list[dict[str, float]]
    strategy: Strategy


def need_of(model: Model) -> Need:
    """One bundle for each rank, or one for all of them if they lie on one node."""
    if model.ranks == 1 or model.layout == "STRICT_PACK":
        return Need([_bundle(model, model.gpus)], "STRICT_PACK")
    return Need([_bundle(model, model.gpus / model.ranks) for _ in range(model.ranks)], model.layout)


def _bundle(model: Model, gpus: float) -> dict[str, float]:
    bundle = {"CPU": model.cpus}
    if gpus:
        bundle["GPU"] = gpus
    if model.accelerator is not None:
        bundle[_KIND + model.accelerator] = _SHARE
    return bundle


def options(model: Model) -> dict[str, Any]:
    """The options of a Serve deployment that say where its replicas may lie."""
    need = need_of(model)
    actor: dict[str, Any] = {"num_cpus": model.cpus}
    if len(need.bundles) > 1:
        bundles = {"placement_group_bundles": need.bundles, "placement_group_strategy": need.strategy}
        return {"ray_actor_options": actor, **bundles}
    actor["num_gpus"] = model.gpus
    if model.accelerator is not None:
        actor["accelerator_type"] = model.accelerator
    return {"ray_actor_options": actor}


def why_not(model: Model, nodes: Sequence[Resources]) -> str:
    """Why nodes that have these resources have no room for a replica, whatever else runs there; empty if they have."""
    need = need_of(model)
    if _fits(need, nodes):
        return ""
    return f"this model cannot be placed: {_missing(model, need)}"


def why_not_now(model: Model) -> str:
    """What to say of a replica for which there would be room, were it not taken."""
    return f"this model cannot be placed now: its replica needs {_wanted(model, need_of(model))}, which is in use"


def _fits(need: Need, nodes: Sequence[Resources]) -> bool:
    """Greedy, which is exact for bundles that are all alike: that the first has the actor too changes nothing here."""
    left = [dict(node) for node in nodes]
    for bundle in need.bundles:
        found = next((node for node in left if all(node.get(name, 0) >= much for name, much in bundle.items())), None)
        if found is None:
            return False
        if need.strategy == "STRICT_SPREAD":
            left.remove(found)
        for name, much in bundle.items():
            found[name] -= much
    return True


def _missing(model: Model, need: Need) -> str:
    wanted = _wanted(model, need)
    return f"no node has {wanted}" if len(need.bundles) == 1 else f"the nodes have not got {wanted}"


def _wanted(model: Model, need: Need) -> str:
    """The resources of one replica, for people: `2 GPUs of the kind A100 and 1 CPU`."""
    bundle, words = need.bundles[0], []
    if gpus := bundle.get("GPU"):
        words.append(_counted(gpus, "GPU") + (f" of the kind {model.accelerator}" if model.accelerator else ""))
    if cpus := bundle["CPU"]:
        words.append(_counted(cpus, "CPU"))
    one = " and ".join(words) or "a place"
    if len(need.bundles) == 1:
        return one
    where = ", each on a node of its own" if need.strategy == "STRICT_SPREAD" else ""
    return f"{len(need.bundles)} times {one}{where}"


def _counted(much: float, name: str) -> str:
    return f"{much:g} {name}{'s' if much > 1 else ''}"
