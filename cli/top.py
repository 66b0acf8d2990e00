"""`headrace top`: the deployment as it changes, from the broker, or from a pod where only that can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console
from rich.live import Live

from headrace.broker.errors import BrokerDown, HeadraceError
from headrace.broker.settings import Settings
from headrace.broker.snapshot import Snapshot, look
from headrace.broker.tasks import cancel_all
from headrace.broker.verdict import Trouble
from headrace.cli import options, views
from headrace.client.sse import Parser

_AGAIN_S = 1.0
_SILENCE_S = 15.0
_decoder = msgspec.json.Decoder(Snapshot)
_trouble_decoder = msgspec.json.Decoder(Trouble)

Seen = Snapshot | Trouble
Url = Annotated[str | None, typer.Option(help="Ask this pod; default: the broker of the configuration.")]
ApiKey = Annotated[str | None, typer.Option(envvar="HEADRACE_API_KEY", help="The key to send to the pod.")]


class Unreachable(HeadraceError):
    """The pod did not answer as a pod does."""

    code = "unreachable"


def command(  # each is an option of the command line
    config: options.Config = None,
    url: Url = None,
    api_key: ApiKey = None,
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two looks at the broker.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end; so it is also in a pipe.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each look.")] = False,
) -> None:
    """Watch queues, replicas and latencies. Ctrl-C leaves."""
    settings = None if url else options.read(config)
    with contextlib.suppress(KeyboardInterrupt):
        if once or not (as_json or sys.stdout.isatty()):
            _show(asyncio.run(seen_by(url, api_key, settings)), as_json)
        else:
            asyncio.run(_watch(_of_broker(settings, every) if settings else _of_pod(str(url), api_key), as_json))


async def seen_by(url: str | None, api_key: str | None, settings: Settings | None) -> Snapshot:
    """One snapshot; raises BrokerDown, or Unreachable with the pod's own words."""
    if settings is not None and url is None:
        broker = options.broker_of(settings, "ops")
        try:
            return await look(broker, settings)
        finally:
            await broker.close()
    async with contextlib.aclosing(_of_pod(str(url), api_key)) as source:
        seen = await anext(source)
    if isinstance(seen, Trouble):
        raise Unreachable("; ".join(reason.text for reason in seen.verdict.reasons))
    return seen


def _show(seen: Seen, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(seen))
    else:
        console = Console(highlight=False)
        console.print(views.screen(seen, console.width))


async def _watch(source: AsyncIterator[Seen], as_json: bool) -> None:
    """Show what comes until Ctrl-C; one cancel is not enough to end what a client library is waiting for."""
    left = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, left.set)
    showing = asyncio.create_task(_show_all(source, as_json))
    leaving = asyncio.create_task(_set(left))
    await asyncio.wait([showing, leaving], return_when=asyncio.FIRST_COMPLETED)
    await cancel_all([each for each in (showing, leaving) if not each.done()])
    if not showing.cancelled():
        showing.result()


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _show_all(source: AsyncIterator[Seen], as_json: bool) -> None:
    if as_json:
        async for seen in source:
            _show(seen, as_json)
        return
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        async for seen in source:
            live.update(views.screen(seen, console.width, console.height), refresh=True)


async def _of_broker(settings: Settings, every_s: float) -> AsyncGenerator[Seen]:
    broker = options.broker_of(settings, "ops")
    try:
        while True:
            try:
                yield await look(broker, settings)
            except BrokerDown as error:
                yield Trouble.of(error)
            await asyncio.sleep(every_s)
    finally:
        await broker.close()


async def _of_pod(url: str, api_key: str | None) -> AsyncGenerator[Seen]:
    """What the pod sends; when it is lost it is asked again."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(timeout=httpx.Timeout(_SILENCE_S), headers=headers) as client:
        while True:
            try:
                async with client.stream("GET", f"{url.rstrip('/')}/ops/events") as response:
                    if response.status_code != 200:
                        raise Unreachable(_said(response.status_code, await response.aread()))
                    parser = Parser()
                    async for data in response.aiter_raw():
                        for event in parser.feed(data):
                            yield _decoded(event.data)
            except Unreachable as error:
                yield Trouble.of(error)
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
                yield Trouble.of(Unreachable(f"{url}: {error or type(error).__name__}"))
            await asyncio.sleep(_AGAIN_S)


def _decoded(data: str) -> Seen:
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        return _trouble_decoder.decode(data)


def _said(status: int, body: bytes) -> str:
    """An error's message, of whatever answers there."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, TypeError, KeyError):
        return f"HTTP {status}: this is no headrace pod"
