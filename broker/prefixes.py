"""A prompt's prefix as a few numbers: hashes of its first bytes, up to lengths that are the same for all prompts.

Two prompts that begin alike share the hashes up to there, so the longest one that a replica has served says how much of
a prompt its cache may hold, within a half. The lengths double: eleven of them reach from a kibibyte to a mebibyte, and
a prompt that is shorter than the first has none, as there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from headrace.broker.messages import Chat, Job, Text, Tokens, Tool

ANCHOR_BYTES = 8
_COUNT = 11
LENGTHS: tuple[int, ...] = tuple(1024 << number for number in range(_COUNT))
"""Bytes of the prompt up to each anchor."""


def anchors(job: Job) -> bytes:
    """The anchors of a job's prompt, eight bytes each, in order of length: what `Admission.prefix` is."""
    found: list[bytes] = []
    hasher, at = blake2b(digest_size=ANCHOR_BYTES), 0
    for piece in _pieces(job):
        view = memoryview(piece)
        while at + len(view) >= LENGTHS[len(found)]:
            cut = LENGTHS[len(found)] - at
            hasher.update(view[:cut])
            at, view = at + cut, view[cut:]
            found.append(hasher.copy().digest())
            if len(found) == _COUNT:
                return b"".join(found)
        hasher.update(view)
        at += len(view)
    return b"".join(found)


def split(prefix: bytes) -> list[bytes]:
    return [prefix[at : at + ANCHOR_BYTES] for at in range(0, len(prefix), ANCHOR_BYTES)]


def session(job: Job) -> bytes:
    """What all turns of a conversation have in common: the turns up to its first of a user."""
    if not isinstance(job.prompt, Chat):
        return b""
    pieces = []
    for message in job.prompt.messages:
        pieces.append(f"\0{message.role}\0{message.content}")
        if message.role == "user":
            break
    return "".join(pieces).encode(errors="surrogatepass")


def _pieces(job: Job) -> Iterator[bytes]:
    """The bytes of a prompt in the order in which templates render them; what is alike here is alike in tokens."""
    match job.prompt:
        case Chat(messages):
            yield _tools(job.tools)
            for message in messages:
                calls = msgspec.json.encode(message.tool_calls) if message.tool_calls else b""
                text = f"\0{message.role}\0{message.content}\0{message.tool_call_id or ''}"
                yield text.encode(errors="surrogatepass") + calls
        case Text(text):
            yield text.encode(errors="surrogatepass")
        case Tokens(token_ids):
            yield b"".join((token_id & 0xFFFF_FFFF).to_bytes(4) for token_id in token_ids)


def _tools(tools: Sequence[Tool]) -> bytes:
    return msgspec.json.encode(tools) if tools else b""
