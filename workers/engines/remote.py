"""A model that another server runs: its stream is read, and said again as steps.

Such a server tells text and no token ids, so an answer that has begun cannot be continued elsewhere: what was not begun
is begun again, the rest ends as `not_continuable`. Read on in `remote_frames.py` (bytes to events), `remote_wire.py`
(what all servers have in common) and one module for each kind of server.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec

from headrace.broker.errors import BadRequest, ContextLengthExceeded, EngineFailed, HeadraceError
from headrace.broker.messages import Batch, Chat, Job, Prompt, Result, Text, Tokens
from headrace.broker.models import RemoteModel
from headrace.workers.engines.protocol import (
    Capabilities,
    Details,
    Figures,
    Generation,
    Run,
    Step,
    Token,
    trace_headers,
)
from headrace.workers.engines.remote_frames import Event
from headrace.workers.engines.remote_llamacpp import LlamacppApi
from headrace.workers.engines.remote_ollama import OllamaApi
from headrace.workers.engines.remote_openai import OpenaiApi
from headrace.workers.engines.remote_tgi import TgiApi
from headrace.workers.engines.remote_wire import Api, Request

logger = logging.getLogger(__name__)

APIS: dict[str, Api] = {"openai": OpenaiApi(), "ollama": OllamaApi(), "llamacpp": LlamacppApi(), "tgi": TgiApi()}
BUSY = (408, 425, 429, 502, 503, 504)
"""A server that says one of these may be asked again."""
RETRY_S = (0.1, 0.3, 1.0, 2.0)
"""When a server that cannot be reached is tried again; one that is busy is asked every so often."""


class _Unreachable(Exception):
    """Nothing of an answer has come; the reason is the cause."""


class _Busy(Exception):
    """The server is there and says that it cannot now."""


class RemoteEngine:
    """An `Engine` (see `protocol.py`)."""

    def __init__(self, model: RemoteModel) -> None:
        self._model = model
        self._api = APIS[model.api]
        self._client: httpx.AsyncClient | None = None
        self._open: set[_Sequence] = set()
        self._is_closed = False
        self._is_unreachable = False
        self.capabilities = Capabilities(
            slots=model.slots,
            context_tokens=model.context_tokens,
            tools=self._api.tools,
            constraints=self._api.constraints,
            details=Details(format="remote", family=model.api),
        )

    async def load(self, progress: Callable[[str, float], None]) -> None:
        """Wait until the server is there; it may be started after us."""
        key = os.environ.get(self._model.key_env or "")
        self._client = httpx.AsyncClient(
            base_url=self._model.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # The time between events is watched where events are known; pings are none.
            timeout=httpx.Timeout(None, connect=self._model.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._model.slots),
        )
        progress("connecting", 0.0)
        while not await self._is_there():
            if self._is_closed:
                raise EngineFailed("the engine was closed while it loaded")
            progress("connecting", 0.0)
            await asyncio.sleep(0.5)
        progress("ready", 1.0)

    async def _is_there(self) -> bool:
        try:
            answer = await self._ready().get(self._api.probe, timeout=self._model.connect_timeout_s)
        except httpx.HTTPError:
            return False
        # One that does not know the path, or us, is there.
        return answer.status_code < 500

    async def encode(self, job: Job) -> list[int]:
        """Only how many tokens there may be: four bytes each; the server says at the end how many there were."""
        self._api.request("", Generation(job, [], [], job.max_tokens))
        return [0] * -(-_size(job.prompt) // 4)

    async def answer(self, job: Job, advance: Callable[[], None] = lambda: None) -> tuple[Result, int]:
        raise BadRequest(f"a model on a remote server cannot {job.kind}", param="model")

    def can_continue(self, job: Job) -> bool:
        return False

    def token(self, token_id: int) -> Token:
        raise EngineFailed("a remote server tells no token ids")

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        sequence = _Sequence(emit, fail)
        self._open.add(sequence)
        sequence.task = asyncio.create_task(self._make(sequence, generation), name=f"remote {generation.job.id}")
        sequence.task.add_done_callback(lambda _: self._open.discard(sequence))
        return sequence

    async def _make(self, sequence: _Sequence, generation: Generation) -> None:
        try:
            await self._try(sequence, generation)
        except HeadraceError as error:
            said = {"event": "remote_failed", "request_id": generation.job.id}
            # what a server says may quote the prompt
            logger.warning("a remote server failed: %s", error.code, extra=said)
            logger.debug("it says: %s", error.__cause__ or error, extra=said)
            sequence.fail(error)
        except _Unreachable as error:
            # No fault of the job: the replica gives it to another one, or to its successor once the server is back.
            logger.error("%s is away: %s", self._model.url, error.__cause__, extra={"event": "remote_away"})
            self._is_unreachable = True
        except Exception:
            said = {"event": "sequence_failed", "request_id": generation.job.id}
            logger.exception("a sequence failed", extra=said)
            sequence.fail(EngineFailed())

    async def _try(self, sequence: _Sequence, generation: Generation) -> None:
        """Again if nothing has come: a few times if the server is away, for the time of an event if it is busy."""
        waits = iter(RETRY_S)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._model.event_timeout_s
        while True:
            try:
                return await self._once(sequence, generation)
            except _Unreachable:
                wait_s = next(waits, None)
                if wait_s is None:
                    raise
            except _Busy as error:
                wait_s = RETRY_S[1]
                if clock() + wait_s > deadline:
                    raise EngineFailed("the remote server is busy") from error
            await asyncio.sleep(wait_s)

    async def _once(self, sequence: _Sequence, generation: Generation) -> None:
        name = self._model.remote_name or self._model.name
        request, headers = self._api.request(name, generation), trace_headers(generation.job)
        try:
            if request.render is not None:
                path, body = request.render
                answer = await self._ready().post(path, json=body, headers=headers, timeout=self._model.event_timeout_s)
                await _check_status(answer)
                request.body["prompt"] = msgspec.json.decode(answer.content)["prompt"]
            async with (
                asyncio.timeout(self._model.event_timeout_s) as silence,
                self._ready().stream("POST", request.path, json=request.body, headers=headers) as answer,
            ):
                await _check_status(answer)
                await self._read(sequence, request, answer, silence)
        except TimeoutError as error:
            limit = self._model.event_timeout_s
            raise EngineFailed(f"the remote server has sent no event for {limit:g} s") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            if sequence.has_begun:
                raise EngineFailed("the remote server ended early") from error
            raise _Unreachable from error

    def _rest(self, silence: asyncio.Timeout) -> None:
        silence.reschedule(asyncio.get_running_loop().time() + self._model.event_timeout_s)

    async def _read(
        self, sequence: _Sequence, request: Request, answer: httpx.Response, silence: asyncio.Timeout
    ) -> None:
        async for event in _events(request, answer):
            self._rest(silence)
            for step in request.reader.read(event):
                sequence.give(step)
            if request.reader.is_over or sequence.is_over:
                break
        last = request.reader.end()
        if last is None:
            raise EngineFailed("the remote server ended early")
        sequence.give(last)

    def figures(self) -> Figures:
        return Figures(len(self._open))

    async def check_health(self) -> None:
        self._ready()
        if self._is_unreachable:
            raise EngineFailed("the remote server cannot be reached")

    async def close(self) -> None:
        self._is_closed = True
        tasks = [sequence.task for sequence in self._open if sequence.task is not None]
        for sequence in list(self._open):
            sequence.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._client is not None:
            await self._client.aclose()

    def _ready(self) -> httpx.AsyncClient:
        if self._client is None or self._is_closed:
            raise EngineFailed("the engine is closed" if self._is_closed else "the engine is not loaded")
        return self._client


class _Sequence:
    """A sequence that was started; a protocol `Run`. Its task's end closes the connection, which stops the server."""

    def __init__(self, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        self.has_begun = False
        self._emit = emit
        self._fail = fail

    def cancel(self) -> None:
        self.is_over = True
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    def give(self, step: Step) -> None:
        if not self.is_over:
            self.has_begun = True
            self.is_over = step.end is not None
            self._emit(step)

    def fail(self, error: Exception) -> None:
        if not self.is_over:
            self.is_over = True
            self._fail(error)


async def _events(request: Request, answer: httpx.Response) -> AsyncIterator[Event]:
    async for chunk in answer.aiter_bytes():
        for event in request.frames.feed(chunk):
            if event.data.strip():  # some servers ping with empty ones
                yield event


async def _check_status(answer: httpx.Response) -> None:
    """A refusal is the caller's to know; a server that is busy or broken is not the caller's fault."""
    if answer.status_code == 200:
        return
    body = await answer.aread()
    if answer.status_code in BUSY:
        raise _Busy from RuntimeError(f"{answer.status_code}: {body[:300]!r}")
    if answer.status_code in (400, 413, 422):
        code, message, param = _reason(body)
        kind = ContextLengthExceeded if "context" in code else BadRequest
        raise kind(f"the remote server refuses this: {message}", param=param)
    reason = RuntimeError(f"{answer.status_code}: {body[:300]!r}")
    raise EngineFailed(f"the remote server answers with status {answer.status_code}") from reason


def _reason(body: bytes) -> tuple[str, str, str | None]:
    """Code, message and parameter of an error, as OpenAI, llama.cpp, Ollama or TGI put it."""
    try:
        told: Any = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return "", "it does not say why", None
    error = told.get("error", told) if isinstance(told, dict) else told
    if not isinstance(error, dict):
        return str(told.get("error_type", "")) if isinstance(told, dict) else "", str(error)[:300], None
    param = error.get("param")
    code = f"{error.get('code', '')} {error.get('type', '')}"
    return code, str(error.get("message", ""))[:300], param if isinstance(param, str) else None


def _size(prompt: Prompt) -> int:
    match prompt:
        case Chat(messages):
            return sum(len(message.content.encode()) for message in messages)
        case Text(text):
            return len(text.encode())
        case Tokens(token_ids):
            return 4 * len(token_ids)
        case Batch(inputs):
            return sum(map(_size, inputs))
