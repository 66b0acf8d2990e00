"""Complete generations in files, for debugging: off unless a folder is configured.

A line is one job that has ended as done, as JSON: its id, model, prompt and the text of each choice, read from its log
after its end, so that the answer of several workers is one. Files are the owner's alone (0600), and put away by size.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.broker import messages
from headrace.broker.errors import BrokerDown, ConfigError
from headrace.broker.keys import position
from headrace.broker.messages import Batch, Chat, Delta, Job, Prompt, Text, Tokens
from headrace.broker.protocol import Broker
from headrace.broker.settings import GenerationLogSettings

log = logging.getLogger(__name__)

Redact = Callable[[str], str]

_PAGE = 512


def opened(settings: GenerationLogSettings, replica: str) -> GenerationLog | None:
    """The log of a replica, None if it is off; raises ConfigError if the hook cannot be had or the folder written."""
    if settings.folder is None:
        return None
    return GenerationLog(settings, replica, _hook(settings.redact) if settings.redact else str)


def _hook(path: str) -> Redact:
    module, _, name = path.partition(":")
    try:
        hook = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"generation_log.redact: {path!r} is not package.module:function: {error}") from error
    if not callable(hook):
        raise ConfigError(f"generation_log.redact: {path!r} cannot be called")
    return hook  # type: ignore[no-any-return]  # it is the operator's, and checked by its answers


class GenerationLog:
    """One replica's files: `<replica>.jsonl`, and `.1` (the newest) and so on for those put away."""

    def __init__(self, settings: GenerationLogSettings, replica: str, redact: Redact) -> None:
        self._settings = settings
        self._redact = redact
        folder = Path(settings.folder or "")
        self._path = folder / f"{replica}.jsonl"
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"generation_log.folder: {str(folder)!r} cannot be written: {error.strerror}") from error

    def ended(self, broker: Broker, job: Job) -> None:
        """A job is done; its line is written some time, and what fails about it fails nobody."""
        self._tasks.add(task := asyncio.create_task(self._note(broker, job), name=f"generation log {job.id}"))
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Write what is still to be written."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        os.close(self._file)

    async def _note(self, broker: Broker, job: Job) -> None:
        try:
            texts, reasoning = await _answer(broker, job)
            line = {
                "at_ms": round(time.time() * 1000),
                "request_id": job.id,
                "model": job.model,
                "prompt": self._prompt(job.prompt),
                "texts": [self._said(text) for text in texts],
                "reasoning": [self._said(text) for text in reasoning],
            }
            self._write(msgspec.json.encode(line) + b"\n")
        except BrokerDown:
            pass
        except Exception:  # the operator's hook, or a full disk
            said = {"event": "generation_log_failed", "request_id": job.id}
            log.exception("a generation cannot be logged", extra=said)

    def _said(self, text: str) -> str:
        redacted = self._redact(text)
        if not isinstance(redacted, str):
            raise TypeError("the redaction hook must return a str")
        return redacted

    def _prompt(self, prompt: Prompt) -> Any:
        match prompt:
            case Chat(turns):
                return [{"role": turn.role, "content": self._said(turn.content)} for turn in turns]
            case Text(text):
                return self._said(text)
            case Tokens(token_ids):
                return token_ids
            case Batch(inputs):
                return [self._prompt(each) for each in inputs]

    # -- the file -------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        if size and size + len(line) > self._settings.max_bytes:
            self._put_away()
        os.write(self._file, line)

    def _put_away(self) -> None:
        os.close(self._file)
        for number in range(self._settings.files, 0, -1):
            newer = self._path if number == 1 else self._numbered(number - 1)
            if newer.exists():
                newer.replace(self._numbered(number))
        self._path.unlink(missing_ok=True)  # with no files to keep
        self._file = self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


async def _answer(broker: Broker, job: Job) -> tuple[list[str], list[str]]:
    """The text and the reasoning of each choice, as the log has them."""
    texts, reasoning = [""] * job.n, [""] * job.n
    first = "0-0"
    while rows := await broker.read(job.id, first, _PAGE):
        for entry_id, data in rows:
            for event in messages.decode_entry(entry_id, data).events:
                if isinstance(event, Delta):
                    texts[event.choice] += event.text
                    reasoning[event.choice] += event.reasoning or ""
        attempt, n = position(rows[-1][0])
        first = f"{attempt}-{n + 1}"
    return texts, reasoning
