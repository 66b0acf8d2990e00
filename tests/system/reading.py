"""A client that sees every byte: streams with their positions, cut wherever a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import httpx
import msgspec


class Event(NamedTuple):
    """One SSE event: its position and its data, decoded if it is JSON."""

    position: str
    data: object

    @property
    def text(self) -> str:
        if isinstance(self.data, dict) and self.data.get("choices"):
            return str(self.data["choices"][0]["delta"].get("content") or "")
        return ""


DONE = "[DONE]"


def events(response: httpx.Response) -> Iterator[Event]:
    """The events of an open response, as they come."""
    position = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            position = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
            yield Event(position, DONE if data == DONE else msgspec.json.decode(data))
            position = ""


class Cut(NamedTuple):
    """What a client had when its connection was cut."""

    job: str
    events: list[Event]

    @property
    def position(self) -> str:
        return next((event.position for event in reversed(self.events) if event.position), "")

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def is_done(self) -> bool:
        return bool(self.events) and self.events[-1].data == DONE


def chat(url: str, body: dict[str, object], stop_after: int = 1 << 30, headers: dict[str, str] | None = None) -> Cut:
    """Start a stream and read so many events, or to the end."""
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, headers=headers, timeout=60
    ) as response:
        assert response.status_code == 200, response.read()
        return _take(response, stop_after)


def resume(url: str, cut: Cut, stop_after: int = 1 << 30) -> Cut:
    """Go on where a client was cut."""
    headers = {"Last-Event-ID": cut.position} if cut.position else {}
    with httpx.stream("GET", f"{url}/v1/streams/{cut.job}", headers=headers, timeout=60) as response:
        assert response.status_code == 200, response.read()
        return _take(response, stop_after)


def until_broken(url: str, body: dict[str, object], seen: list[Cut], headers: dict[str, str] | None = None) -> None:
    """Start a stream and read until its connection breaks, which raises; `seen` gets what was had."""
    taken: list[Event] = []
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, headers=headers, timeout=60
    ) as response:
        seen.append(Cut(response.headers["x-request-id"], taken))
        for event in events(response):
            taken.append(event)


def _take(response: httpx.Response, count: int) -> Cut:
    taken: list[Event] = []
    for event in events(response):
        taken.append(event)
        if len(taken) >= count:
            break
    return Cut(response.headers["x-request-id"], taken)
