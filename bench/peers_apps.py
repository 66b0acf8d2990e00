"""Two of the peers, as their tutorials write them: a FastAPI proxy on httpx, and a Ray Serve deployment that streams.

`python bench/peers_apps.py proxy PORT UPSTREAM_PORT` or `python bench/peers_apps.py serve PORT INTERVAL_MS`.
"""

# no annotations from __future__: FastAPI and Ray's pickle must find their words
import asyncio
import sys
import zlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

FRAME = 'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"scripted","choices":[%s]}\n\n'


def proxy(port: int, upstream: int) -> None:
    import httpx
    import uvicorn

    app = FastAPI()
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=2000))

    @app.post("/v1/chat/completions")
    async def forward(request: Request) -> StreamingResponse:
        asked = client.build_request(
            "POST", f"http://127.0.0.1:{upstream}/v1/chat/completions", content=await request.body()
        )
        answer = await client.send(asked, stream=True)
        return StreamingResponse(answer.aiter_raw(), media_type="text/event-stream")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", backlog=4096)


def serve(port: int, interval_ms: int) -> None:
    import ray
    from ray import serve as ray_serve

    app = FastAPI()

    @ray_serve.deployment(max_ongoing_requests=5000, ray_actor_options={"num_cpus": 0.1})
    @ray_serve.ingress(app)
    class Streams:
        @app.post("/v1/chat/completions")
        async def chat(self, request: Request) -> StreamingResponse:
            asked = await request.json()
            return StreamingResponse(_tokens(asked, interval_ms / 1000), media_type="text/event-stream")

    ray.init(include_dashboard=False, num_cpus=4, log_to_driver=False)
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    ray_serve.run(Streams.bind())  # type: ignore[attr-defined]  # what the decorator makes of it
    asyncio.run(asyncio.Event().wait())


async def _tokens(asked: dict[str, Any], interval_s: float) -> AsyncIterator[str]:
    text = asked["messages"][-1]["content"]
    loop = asyncio.get_running_loop()
    due = loop.time()
    for index in range(asked["max_tokens"]):
        token = zlib.crc32(f"{text}|0|0|{index}".encode())
        yield FRAME % f'{{"index":0,"delta":{{"content":" {token:08x}"}},"finish_reason":null}}'
        due += interval_s
        await asyncio.sleep(max(0.0, due - loop.time()))
    yield FRAME % '{"index":0,"delta":{},"finish_reason":"length"}' + "data: [DONE]\n\n"


if __name__ == "__main__":
    {"proxy": proxy, "serve": serve}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
