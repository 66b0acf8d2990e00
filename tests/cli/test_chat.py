"""The terminal client against a real pod: once, piped, and on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from headrace.broker.embedded import EmbeddedServer
from headrace.cli import chat
from headrace.workers.engines.scripted import oracle
from tests.client.wire import TEXT, after, frames, listening, stream
from tests.serving import scripted_settings, serving
from tests.support import eventually


def answer(text: str, tokens: int) -> str:
    return "".join(f" {oracle(text, 0, 0, index):08x}" for index in range(tokens))


async def invoke(*args: str, piped: str | None = None) -> Result:
    app = typer.Typer()
    app.command()(chat.command)
    return await asyncio.to_thread(CliRunner().invoke, app, [*args], piped)


async def test_once_prints_one_answer(redis_server: EmbeddedServer) -> None:
    async with serving(scripted_settings(redis_server), redis_server) as [pod]:
        result = await invoke("--url", pod.url, "--once", "hello", "--max-tokens", "7", "--system", "be brief")
    assert (result.exit_code, result.stdout, result.stderr) == (0, answer("hello", 7) + "\n", "")


async def test_piped_lines_are_turns(redis_server: EmbeddedServer) -> None:
    async with serving(scripted_settings(redis_server), redis_server) as [pod]:
        result = await invoke("--url", pod.url, "--max-tokens", "3", piped="one\n\n two \n")
    assert (result.exit_code, result.stdout) == (0, f"{answer('one', 3)}\n{answer('two', 3)}\n")


async def test_a_dash_reads_all_of_stdin_as_one_question(redis_server: EmbeddedServer) -> None:
    text = "one\ntwo\n"
    async with serving(scripted_settings(redis_server), redis_server) as [pod]:
        result = await invoke("--url", pod.url, "--max-tokens", "3", "--once", "-", piped=text)
    assert (result.exit_code, result.stdout) == (0, f"{answer(text, 3)}\n")


@pytest.mark.parametrize("how", [("--once", "hi"), ()])
async def test_a_failure_is_one_line_and_exits_with_1(redis_server: EmbeddedServer, how: tuple[str, ...]) -> None:
    async with serving(scripted_settings(redis_server), redis_server) as [pod]:
        result = await invoke("--url", pod.url, "--model", "nobody", *how, piped="hi\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: 404 model_not_found: ")
    assert result.stderr.count("\n") == 1


async def test_no_server_is_a_failure_that_names_the_address() -> None:
    result = await invoke("--url", "http://127.0.0.1:9", "--once", "hi")
    assert (result.exit_code, result.stderr) == (1, "error: no answer from http://127.0.0.1:9\n")


async def test_a_lost_connection_is_a_note_and_not_a_hole() -> None:
    whole = stream(frames())
    async with (
        listening(lambda _: whole[: len(whole) // 2]) as one,
        listening(lambda asked: stream(after(asked.headers.get("last-event-id", "")))) as two,
    ):
        result = await invoke("--url", one.url, "--url", two.url, "--model", "m", "--once", "hi")
    # the note begins a line of its own, so the answer has a line break where it came
    assert (result.exit_code, result.stdout.replace("\n", "")) == (0, TEXT)
    assert result.stderr == f"[reconnected to {two.url}]\n"


class Terminal:
    """A chat on a terminal of its own; `text` is what has been shown."""

    def __init__(self, master: int, process: asyncio.subprocess.Process) -> None:
        self.text = ""
        self.process = process
        self._master = master
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        self.text += os.read(self._master, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)


@contextmanager
def a_pty() -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    try:
        yield master, slave
    finally:
        os.close(master)
        os.close(slave)


async def test_on_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(redis_server: EmbeddedServer) -> None:
    program = "import typer; from headrace.cli import chat; typer.run(chat.command)"
    settings = scripted_settings(redis_server, tokens_per_s=20)
    async with serving(settings, redis_server) as [pod], httpx.AsyncClient(base_url=pod.url) as http:

        async def is_idle() -> bool:
            return 'headrace_running_jobs{model="scripted"} 0.0' in (await http.get("/metrics")).text

        with a_pty() as (master, slave):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", program, "--url", pod.url, "--max-tokens", "2000"),
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env={**os.environ, "TERM": "dumb"},
            )
            terminal = Terminal(master, process)
            try:
                await eventually(lambda: "> " in terminal.text, 15)
                terminal.type("hello\n")
                await eventually(lambda: answer("hello", 3) in terminal.text, 15)
                process.send_signal(signal.SIGINT)
                await eventually(lambda: "[stopped]" in terminal.text and terminal.text.endswith("> "), 15)
                await eventually(is_idle, 15)
                terminal.type("\x04")
                assert await asyncio.wait_for(process.wait(), 10) == 0
            finally:
                terminal.close()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
