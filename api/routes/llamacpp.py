"""llama.cpp's own addresses. `model` in the body or in the query chooses, or else it is the first one."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import catalog, submit
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.routes.bare import BareRoute
from headrace.api.wire import BY_NAME
from headrace.api.wire.ollama_models import serves
from headrace.broker.errors import BrokerDown, NoCapacity
from headrace.broker.models import Model


def router(pod: Pod) -> APIRouter:
    """What llama-server's clients speak."""
    routes = APIRouter(route_class=BareRoute, dependencies=[GUARD])

    def generates(path: str, name: str) -> None:
        @routes.post(path, response_class=Response, name=path)
        async def generate(request: Request) -> Response:
            return await submit.generate(pod, request, BY_NAME[name])

    for path in ("/completion", "/completions"):
        generates(path, "llamacpp.completion")
    for kind in ("tokenize", "detokenize", "apply-template", "embedding"):
        generates(f"/{kind}", f"llamacpp.{kind}")

    @routes.get("/props")
    async def props(request: Request) -> Response:
        model, replicas = await _replicas(pod, request)
        context = model.context_tokens
        return as_json(
            {
                "default_generation_settings": {"id": 0, "n_ctx": context, "is_processing": False, "params": {}},
                "total_slots": sum(int(each["slots"]) for each in replicas),
                "model_alias": model.name,
                "model_path": model.name,
                "modalities": {"vision": False, "audio": False},
                "build_info": "headrace",
            }
        )

    @routes.get("/slots")
    async def slots(request: Request) -> Response:
        model, replicas = await _replicas(pod, request)
        busy = [
            slot < int(each["running"])
            for each in sorted(replicas, key=lambda each: each["pid"])
            for slot in range(int(each["slots"]))
        ]
        context = model.context_tokens
        return as_json(
            [
                {"id": id, "n_ctx": context, "speculative": False, "is_processing": is_busy}
                for id, is_busy in enumerate(busy)
            ]
        )

    @routes.get("/health")
    async def health() -> Response:
        """Also TGI's: is any replica ready? Like the other probes it needs no key."""
        pod.require_broker()
        replicas = await pod.broker.listing("replicas")
        if not any(each["state"] == "ready" for each in replicas.values()):
            raise NoCapacity("no model is ready")
        return as_json({"status": "ok"})

    return routes


async def _replicas(pod: Pod, request: Request) -> tuple[Model, list[dict[str, str]]]:
    """The model that a request means, and its replicas that are ready."""
    model = catalog.chosen(pod, request, "")
    try:
        found = await pod.broker.listing("replicas")
    except BrokerDown as error:
        pod.trouble = error
        raise
    return model, [each for each in found.values() if serves(each, model.name) and each["state"] == "ready"]
