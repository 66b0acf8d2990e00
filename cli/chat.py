"""`headrace chat`: talk to a model from the terminal; an answer outlives its connection, and its pod."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.client import Client, ClientError

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""What a model must not send to a terminal: it could move the cursor, or set its title."""


def command(  # noqa: PLR0913  # each is an option of the command line
    url: Annotated[list[str] | None, typer.Option(help="A pod; say it again for more. Default: this host's.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that is served.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="HEADRACE_API_KEY", help="The key to send.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0 is the likeliest words.")] = None,
    once: Annotated[str | None, typer.Option(help="Answer this and exit; `-` reads all of stdin.")] = None,
) -> None:
    """Chat. Ctrl-C ends an answer; Ctrl-C or Ctrl-D at the prompt leaves. A line of piped input is a turn."""
    urls = url or [f"http://127.0.0.1:{os.environ.get('HEADRACE_PORT', '8080')}"]
    given = {"max_tokens": max_tokens, "temperature": temperature}
    chat = Chat(urls, api_key, system, {name: value for name, value in given.items() if value is not None})
    if not chat.run(model, sys.stdin.read() if once == "-" else once):
        raise typer.Exit(1)


class Chat:
    """One conversation. Its loop runs only while an answer does, so that the prompt has the terminal to itself."""

    def __init__(self, urls: list[str], api_key: str | None, system: str | None, params: dict[str, Any]) -> None:
        self._urls = urls
        self._api_key = api_key
        self._params = params
        self._messages = [{"role": "system", "content": system}] if system else []
        self._out = Console(soft_wrap=True)
        self._notes = Console(stderr=True, soft_wrap=True, highlight=False)
        self._has_line_open = False

    def run(self, model: str | None, once: str | None) -> bool:
        """The conversation, or one answer; False if there was no whole answer for what was piped in or asked once."""
        with asyncio.Runner() as runner:
            client = runner.run(self._connect())
            try:
                self._params["model"] = model or runner.run(_first_model(client))
                if once is not None:
                    return self._turn(runner, client, once)
                if not sys.stdin.isatty():
                    return min([self._turn(runner, client, text) for text in _piped()], default=True)
                self._note(f"{self._params['model']} at {', '.join(self._urls)}")
                for text in _typed():
                    self._turn(runner, client, text)
                return True
            except ClientError as error:
                return self._fail(error)
            finally:
                runner.run(client.aclose())

    async def _connect(self) -> Client:
        return Client(self._urls, self._api_key, on_reconnect=lambda url: self._note(f"reconnected to {url}"))

    def _turn(self, runner: asyncio.Runner, client: Client, text: str) -> bool:
        """One question and its answer; what an answer was stopped or failed after stays in the conversation."""
        said: list[str] = []
        asked = [*self._messages, {"role": "user", "content": text}]
        is_whole = False
        try:
            runner.run(self._answer(client, asked, said))
            is_whole = True
        except KeyboardInterrupt:
            self._note("stopped")
        except ClientError as error:
            self._fail(error)
        self._end_line()
        if said:
            self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return is_whole

    async def _answer(self, client: Client, asked: list[dict[str, str]], said: list[str]) -> None:
        async with contextlib.aclosing(client.chat(asked, **self._params)) as chunks:
            async for chunk in chunks:
                if chunk.text:
                    said.append(chunk.text)
                    self._show(chunk.text)

    def _show(self, text: str) -> None:
        self._out.out(text.translate(_CONTROLS) if self._out.is_terminal else text, end="", highlight=False)
        self._has_line_open = True

    def _end_line(self) -> None:
        if self._has_line_open:
            self._out.out("")
            self._has_line_open = False

    def _note(self, text: str) -> None:
        self._end_line()
        self._notes.print(f"[{text}]", style="dim", markup=False)

    def _fail(self, error: ClientError) -> bool:
        self._end_line()
        self._notes.print(f"error: {error}", style="red", markup=False)
        return False


async def _first_model(client: Client) -> str:
    return (await client.models())[0]


def _piped() -> Iterator[str]:
    return (line.strip() for line in sys.stdin if line.strip())


def _typed() -> Iterator[str]:
    """What the user types, until Ctrl-C or Ctrl-D at the prompt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # its import gives `input` a line editor and a history
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text:
            yield text
