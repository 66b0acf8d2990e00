"""What is wrong with a model's settings that no type can say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.broker.models import (
    LlamacppModel,
    Model,
    ModelAutoscaling,
    RemoteModel,
    ScriptedModel,
    ScriptedPart,
    VllmModel,
    WeightsModel,
)

Refuse = Callable[[str, object, str], None]
"""Raises for a path, the value that stands there, and what is wrong with it."""


def check_names(models: Sequence[Model], refuse: Refuse) -> None:
    """Refuse names that are none, that mean two models, or that mean no model."""
    known: set[str] = set()
    for index, model in enumerate(models):
        named = [(f"models[{index}].name", model.name)]
        named += [(f"models[{index}].aliases[{place}]", alias) for place, alias in enumerate(model.aliases)]
        named += [(f"models[{index}].adapters[{place}].name", each.name) for place, each in enumerate(model.adapters)]
        for where, name in named:
            if not name or len(name) > 128 or not name.isprintable() or "{" in name:
                refuse(where, name, "must be 1 to 128 printable characters without braces")
            if name in known:
                refuse(where, name, "stands twice")
            known.add(name)
    names = [name for model in models for name in model.names]
    for index, model in enumerate(models):
        for place, name in enumerate(model.fallbacks):
            if name not in names or name == model.name:
                refuse(f"models[{index}].fallbacks[{place}]", name, "must be the name of another model")


def check_model(where: str, model: Model, refuse: Refuse) -> None:
    """Refuse what no type can say."""
    if model.slots < 1:
        refuse(f"{where}.slots", model.slots, "must be at least 1")
    _check_placement(where, model, refuse)
    _check_adapters(where, model, refuse)
    if model.autoscaling is not None:
        _check_autoscaling(f"{where}.autoscaling", model, model.autoscaling, refuse)
    if isinstance(model, LlamacppModel):
        places = (model.source, model.path, model.uri)
        if sum(value is not None for value in places) != 1:
            refuse(f"{where}.path", model.path, "one of `path`, `source` and `uri` says where the GGUF file is")
        _check_uri(where, model.uri, refuse)
    if isinstance(model, WeightsModel):
        _check_weights(where, model, refuse)
    if isinstance(model, RemoteModel):
        _check_remote(where, model, refuse)
    if isinstance(model, ScriptedModel):
        _check_scripted(where, model, refuse)


def _check_placement(where: str, model: Model, refuse: Refuse) -> None:
    for field in ("replicas", "cpus", "gpus"):
        if getattr(model, field) < 0:
            refuse(f"{where}.{field}", getattr(model, field), "must not be negative")
    for field in ("tensor_parallel", "pipeline_parallel"):
        if getattr(model, field) < 1:
            refuse(f"{where}.{field}", getattr(model, field), "must be at least 1")
    if model.gpus > 1 and model.gpus != int(model.gpus):
        refuse(f"{where}.gpus", model.gpus, "must be a fraction of one GPU, or a whole number")
    if model.ranks > 1 and model.gpus not in (0, model.ranks):
        refuse(f"{where}.gpus", model.gpus, f"must be one for each of the {model.ranks} ranks, or 0 on CPUs")
    if model.accelerator is not None and not model.gpus:
        refuse(f"{where}.accelerator", model.accelerator, "needs `gpus`")
    if model.tensor_parallel > 1 and model.layout in ("SPREAD", "STRICT_SPREAD"):
        refuse(f"{where}.strategy", model.strategy, "would part the ranks of a tensor; they must lie on one node")


def _check_adapters(where: str, model: Model, refuse: Refuse) -> None:
    if not 1 <= model.adapters_loaded <= 256:
        refuse(f"{where}.adapters_loaded", model.adapters_loaded, "must be 1 to 256")
    for place, adapter in enumerate(model.adapters):
        here = f"{where}.adapters[{place}]"
        match model:
            case ScriptedModel():
                continue
            case VllmModel():
                if (adapter.path is None) == (adapter.hub is None):
                    refuse(f"{here}.path", adapter.path, "either `path` or `hub` says where the adapter is")
            case LlamacppModel():
                if adapter.path is None or adapter.hub is not None:
                    refuse(f"{here}.path", adapter.path, "must say where its GGUF file is")
            case _:
                refuse(f"{where}.adapters", [each.name for each in model.adapters], "this engine has no adapters")


def _check_scripted(where: str, model: ScriptedModel, refuse: Refuse) -> None:
    if model.script_end not in ("eos", "limit", "error"):
        refuse(f"{where}.script_end", model.script_end, "must be eos, limit or error")
    for place, part in enumerate(model.script):
        if isinstance(part, ScriptedPart) and (part.reasoning is None) == (part.tool_call is None):
            refuse(f"{where}.script[{place}]", part, "must have one of reasoning and tool_call")
    if not 1 <= model.dimensions <= 65536:
        refuse(f"{where}.dimensions", model.dimensions, "must be 1 to 65536")


def _check_weights(where: str, model: WeightsModel, refuse: Refuse) -> None:
    places = (model.source, model.path, model.hub, model.uri)
    if sum(value is not None for value in places) != 1:
        refuse(f"{where}.path", model.path, "one of `path`, `source`, `hub` and `uri` says where the model is")
    _check_uri(where, model.uri, refuse)
    if model.revision is not None and model.hub is None:
        refuse(f"{where}.revision", model.revision, "is of `hub` only")
    if model.context_tokens < 2:
        refuse(f"{where}.context_tokens", model.context_tokens, "must be at least 2")


def _check_uri(where: str, uri: str | None, refuse: Refuse) -> None:
    if uri is not None and not uri.startswith(("s3://", "gs://", "https://", "http://")):
        refuse(f"{where}.uri", uri, "must begin with s3://, gs:// or https://")


def _check_remote(where: str, model: RemoteModel, refuse: Refuse) -> None:
    if not model.url.startswith(("http://", "https://")):
        refuse(f"{where}.url", model.url, "must begin with http:// or https://")
    for field in ("connect_timeout_s", "event_timeout_s"):
        if getattr(model, field) <= 0:
            refuse(f"{where}.{field}", getattr(model, field), "must be positive")


def _check_autoscaling(where: str, model: Model, chosen: ModelAutoscaling, refuse: Refuse) -> None:
    if not 0 <= chosen.min_replicas <= chosen.max_replicas:
        refuse(f"{where}.min_replicas", chosen.min_replicas, "must be 0 to `max_replicas`")
    if chosen.max_replicas < 1:
        refuse(f"{where}.max_replicas", chosen.max_replicas, "must be at least 1")
    if not chosen.min_replicas <= model.replicas <= chosen.max_replicas:
        refuse(where.replace("autoscaling", "replicas"), model.replicas, "must be `min_replicas` to `max_replicas`")
    if not 0.5 <= chosen.attainment <= 0.9999:
        refuse(f"{where}.attainment", chosen.attainment, "must be 0.5 to 0.9999")
    for name in ("ttft_slo_s", "tpot_slo_s", "prefill_tokens_per_s"):
        if not getattr(chosen, name) > 0:
            refuse(f"{where}.{name}", getattr(chosen, name), "must be more than 0")
    if chosen.decode_tokens_per_s is not None and chosen.decode_tokens_per_s <= 0:
        refuse(f"{where}.decode_tokens_per_s", chosen.decode_tokens_per_s, "must be more than 0")
    for name in ("ttft_slo_prefills", "start_up_s", "kv_tokens", "hold_s", "idle_s"):
        if getattr(chosen, name) < 0:
            refuse(f"{where}.{name}", getattr(chosen, name), "must not be negative")
