"""A real browser: `EventSource`, `fetch`, `WebSocket` and headrace.js in Chromium, on the pod's origin and another."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.chromium import ON_ITS_LOOP, evaluate
from tests.clients.deployment import CALL, LONG, THOUGHT, Deployment, words
from tests.clients.node import HEADRACE_JS
from tests.cutting import cutting

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = ON_ITS_LOOP

MODULE = "data:text/javascript;base64," + base64.b64encode(HEADRACE_JS.read_bytes()).decode()


@pytest.fixture
def page(world: Deployment) -> str:
    """A page of the first pod's origin."""
    return f"{world.url}/healthz"


EVENT_SOURCE = """
    const source = new EventSource(address), seen = {text: "", opened: 0, ids: []};
    source.onopen = () => seen.opened++;
    const end = await new Promise((resolve, reject) => {
        source.onmessage = ({data, lastEventId}) => {
            const said = JSON.parse(data);
            if (lastEventId) seen.ids.push(lastEventId);
            if (said.error || said.done) resolve(said); else seen.text += said.token;
        };
        source.onerror = () => source.readyState == EventSource.CLOSED && resolve({closed: true});
    });
    if (close) source.close();
    return {...seen, end};
"""


def ask(address: str, script: str = EVENT_SOURCE) -> str:
    return f"const address = {json.dumps(address)}, close = true; {script}"


async def test_event_source_streams(browser: Browser, page: str, world: Deployment) -> None:
    seen = await evaluate(browser, page, ask("/chat?prompt=hi&model=scripted&max_tokens=8"))
    assert seen["text"] == words("hi", 8)
    assert (seen["end"]["finish_reason"], seen["end"]["usage"]["completion_tokens"]) == ("length", 8)
    other = await evaluate(browser, page, ask(f"{world.urls[1]}/chat?prompt=hi&model=scripted&max_tokens=8"))
    assert other["text"] == words("hi", 8)


async def test_event_source_comes_back_by_itself_and_misses_nothing(
    browser: Browser, page: str, world: Deployment
) -> None:
    """The browser waits for some seconds before it comes back; the job has ended by then, its log has not."""
    async with cutting(world.urls[1], [1500]) as address:
        with world.one_job():
            seen = await evaluate(browser, page, ask(f"{address}/chat?prompt=hi&model=scripted&max_tokens=30"))
    assert seen["opened"] == 2
    assert seen["text"] == words("hi", 30)
    assert len(seen["ids"]) == len(set(seen["ids"]))


async def test_event_source_is_cancelled_by_closing_it(browser: Browser, page: str, world: Deployment) -> None:
    script = """
        const source = new EventSource(address);
        await new Promise((resolve) => source.onmessage = resolve);
        source.close();
    """
    with world.one_job("cancelled"):
        await evaluate(browser, page, ask(f"/chat?prompt=hi&model=scripted&max_tokens={LONG}", script))


async def test_event_source_gets_errors(browser: Browser, page: str, world: Deployment) -> None:
    with world.no_job():
        assert (await evaluate(browser, page, ask("/chat?prompt=hi&model=nobody")))["end"] == {"closed": True}
    seen = await evaluate(browser, page, ask("/chat?prompt=hi&model=broken"))
    assert seen["text"] == "half an answer"
    assert seen["end"]["error"]["code"] == "engine_error"


FETCH = """
    const stop = new AbortController();
    const response = await fetch(address, {method: "POST", body: JSON.stringify(body), signal: stop.signal});
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let said = "", job = response.headers.get("x-request-id");
    for (let part; !(part = await reader.read()).done;) {
        said += part.value;
        if (leave) { stop.abort(); break; }
    }
    return {status: response.status, job, said};
"""


async def fetched(browser: Browser, page: str, url: str, body: dict[str, Any], leave: bool = False) -> Any:
    given = f"const address = {json.dumps(url + '/v1/chat/completions')}, leave = {json.dumps(leave)}"
    return await evaluate(browser, page, f"{given}, body = {json.dumps(body)}; {FETCH}")


def asking(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}


async def test_fetch_streams_from_its_own_and_from_another_origin(
    browser: Browser, page: str, world: Deployment
) -> None:
    for url in world.urls:
        answer = await fetched(browser, page, url, asking("scripted", max_tokens=8))
        frames = [json.loads(line[6:]) for line in answer["said"].splitlines() if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"])
        assert (answer["status"], said) == (200, words("hi", 8))
        assert world.state(answer["job"]) == "done"


async def test_fetch_is_cancelled_by_its_signal(browser: Browser, page: str, world: Deployment) -> None:
    with world.one_job("cancelled"):
        await fetched(browser, page, world.urls[1], asking("scripted", max_tokens=LONG), leave=True)


async def test_fetch_gets_an_error_of_another_origin(browser: Browser, page: str, world: Deployment) -> None:
    answer = await fetched(browser, page, world.urls[1], asking("nobody"))
    assert answer["status"] == 404
    assert json.loads(answer["said"])["error"]["code"] == "model_not_found"


async def test_web_socket_streams_stops_and_gets_errors(browser: Browser, page: str, world: Deployment) -> None:
    script = """
        async function talk(body, count) {
            const socket = new WebSocket(address), seen = {text: ""};
            socket.onopen = () => socket.send(JSON.stringify(body));
            socket.onmessage = ({data}) => {
                const said = JSON.parse(data);
                if (said.error) seen.error = said.error.code; else seen.text += said.token;
                if (said.token && --count == 0) socket.send('{"stop": true}');
            };
            seen.code = await new Promise((resolve) => socket.onclose = ({code}) => resolve(code));
            return seen;
        }
        return [
            await talk({prompt: "hi", model: "scripted", max_tokens: 8}),
            await talk({prompt: "hi", model: "scripted", max_tokens: 5000}, 1),
            await talk({prompt: "hi", model: "broken"}),
            await talk({prompt: "hi", model: "nobody"}),
        ];
    """
    whole, stopped, failed, refused = await evaluate(
        browser, page, ask(f"ws{world.urls[1].removeprefix('http')}/ws/chat", script)
    )
    assert whole == {"text": words("hi", 8), "code": 1000}
    assert (stopped["error"], stopped["code"]) == ("cancelled", 1000)
    assert failed == {"text": "half an answer", "error": "engine_error", "code": 1011}
    assert refused == {"text": "", "error": "model_not_found", "code": 1008}


READ = """
    const {chat, HeadraceError} = await import(module), messages = [{role: "user", content: "hi"}];
    const seen = {text: "", reasoning: "", calls: [], places: []};
    const options = {onReconnect: (url) => seen.places.push(url)};
    try {
        for await (const chunk of chat(urls, {messages, ...fields}, options)) {
            seen.text += chunk.text;
            seen.reasoning += chunk.reasoning;
            seen.calls.push(...(chunk.toolCalls ?? []));
            if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
            if (leave) break;
        }
    } catch (error) {
        seen.error = [error instanceof HeadraceError, error.code, error.status];
    }
    return seen;
"""


def reading(urls: list[str], leave: bool = False, **fields: Any) -> str:
    given = {"module": MODULE, "urls": urls, "leave": leave, "fields": fields}
    return "".join(f"const {name} = {json.dumps(value)};" for name, value in given.items()) + READ


async def test_headrace_js_goes_on_across_pods(browser: Browser, page: str, world: Deployment) -> None:
    limits = [0, 900, 700, 1500, 100]
    async with cutting(world.urls[0], limits) as one, cutting(world.urls[1], limits) as two:
        with world.one_job():
            seen = await evaluate(browser, page, reading([one, two], model="scripted", max_tokens=60))
    assert not limits
    assert (seen["text"], seen["tokens"]) == (words("hi", 60), 60)
    assert seen["places"]


async def test_headrace_js_calls_a_tool_leaves_and_gets_errors(browser: Browser, page: str, world: Deployment) -> None:
    seen = await evaluate(browser, page, reading(world.urls, model="caller"))
    assert (seen["text"], seen["reasoning"]) == ("Let me look.", THOUGHT)
    assert seen["calls"][0]["function"]["name"] == CALL["name"]
    with world.one_job("cancelled"):
        await evaluate(browser, page, reading(world.urls, leave=True, model="scripted", max_tokens=LONG))
    assert (await evaluate(browser, page, reading(world.urls, model="nobody")))["error"] == [
        True,
        "model_not_found",
        404,
    ]
    assert (await evaluate(browser, page, reading(world.urls, model="broken")))["error"] == [True, "engine_error", 0]
