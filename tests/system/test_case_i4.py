"""Case I4: a key, a password and a prompt, each with a mark, and a look for the marks wherever something is said."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace.broker import embedded
from headrace.broker.embedded import EmbeddedServer
from tests.system.conftest import Machine, MakeMachine, answers, scripted, until

PROMPT = "MARKED-prompt-7c1f"
SECRETS = KEY, WRONG, PASSWORD, TOKEN = [f"MARKED-{name}-7c1f" for name in ("key", "wrong", "password", "token")]
HI = [{"role": "user", "content": PROMPT}]


class Witness:
    """What was answered: every status line, header and body."""

    def __init__(self, machine: Machine) -> None:
        self.url = machine.urls[0]
        self.heads: list[str] = []
        self.bodies: list[str] = []

    def ask(self, method: str, path: str, key: str = KEY, **request: Any) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = httpx.request(method, self.url + path, headers={**headers, **request.pop("headers", {})}, **request)
        self.heads.append(f"{answer.status_code} {answer.headers}")
        self.bodies.append(answer.text)
        return answer.status_code


@pytest.fixture
def machine(make_machine: MakeMachine) -> Iterator[Machine]:
    models = [scripted(tokens_per_s=0), {**scripted(script=["a"], script_end="error"), "name": "failing"}]
    machine = make_machine({"models": models, "log_level": "debug"})
    settings = yaml.safe_load(machine.config.read_text("utf-8"))
    settings["redis"] = {"url": f"unix://marked:{PASSWORD}@{embedded.socket_path(str(machine.folder))}"}
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    settings["keys"] = [{"owner": "alice", "sha256": sha256, "scopes": ["use", "metrics"]}]
    machine.config.write_text(yaml.safe_dump(settings), "utf-8")
    yield machine
    machine.end()


def test_i4_no_secret_is_said_anywhere_and_no_prompt_where_it_does_not_belong(machine: Machine) -> None:
    witness = Witness(machine)
    pod = machine.start("api")
    until(lambda: answers(machine.urls[0], "/healthz"), 60)
    assert witness.ask("POST", "/v1/chat/completions", json={"model": "scripted", "messages": HI}) == 503  # no broker
    with asyncio.Runner() as runner:
        server = EmbeddedServer(str(machine.folder), has_users=False)
        runner.run(server.start())
        with redis.Redis.from_url(server.url, protocol=2) as client:
            client.execute_command("ACL", "SETUSER", "marked", "on", f">{PASSWORD}", "~*", "&*", "+@all")
            workers = [machine.start("worker", "--model", name) for name in ("scripted", "failing")]
            until(lambda: len(machine.pids("replica")) == 2, 60)
            use(witness)
            command_lines(machine, witness)
            for process in (pod, *workers):
                process.terminate()
                process.wait(60)
            kept, names = everything(client)
        runner.run(server.stop())
    files = [path.read_bytes() for path in machine.folder.rglob("*") if is_of_the_broker(machine, path)]
    log = machine.said()
    assert "job_admitted" in log and "Traceback" not in log
    for said in (log, *witness.heads, *witness.bodies, *names, *kept, *(data.decode("latin-1") for data in files)):
        assert [secret for secret in SECRETS if secret in said] == [], said[:2000]
    for line in log.splitlines():
        assert PROMPT not in line or " DEBUG " in line, line
    assert not any(PROMPT in said for said in (*names, *witness.heads))
    assert any(PROMPT in said for said in kept)  # where it belongs: in the queue and in what is stored


def is_of_the_broker(machine: Machine, path: Path) -> bool:
    return path.is_file() and path.is_relative_to(machine.folder / "broker")


def use(witness: Witness) -> None:
    """Requests of all kinds of outcome, in several formats, by all ways that a key can be sent."""
    chat = {"model": "scripted", "messages": HI, "max_tokens": 3}
    for body in (chat, {**chat, "stream": True}):
        assert witness.ask("POST", "/v1/chat/completions", json=body) == 200
        assert witness.ask("POST", "/v1/chat/completions", WRONG, json=body) == 401
        assert witness.ask("POST", "/v1/messages", "", headers={"x-api-key": WRONG}, json=body) == 401
        assert witness.ask("POST", "/v1/messages", "", headers={"x-api-key": KEY}, json=body) == 200
    assert witness.ask("POST", "/v1/responses", json={"model": "scripted", "input": PROMPT}) == 200
    assert witness.ask("POST", "/v1/chat/completions", json={**chat, "temperature": PROMPT}) == 400
    assert witness.ask("POST", "/v1/chat/completions", content=b'{"model": "' + PROMPT.encode()) == 400
    assert witness.ask("POST", "/v1/chat/completions", json={**chat, "model": "failing"}) == 500
    assert witness.ask("POST", "/v1/chat/completions", json={**chat, "model": "failing", "stream": True}) == 200
    assert witness.ask("GET", f"/chat?prompt={PROMPT}&key={TOKEN}") == 400
    assert witness.ask("GET", f"/v1/models?key={TOKEN}", "") == 401
    assert witness.ask("GET", f"/v1/nothing?key={TOKEN}", "") == 401
    assert witness.ask("GET", "/metrics") == 200 and witness.ask("GET", "/metrics", WRONG) == 401
    assert witness.ask("GET", "/v1/usage") == 200
    url = witness.url.replace("http", "ws") + f"/ws/chat?token={TOKEN}"
    with pytest.raises(InvalidStatus) as refused:
        connect(url, subprotocols=["headrace", f"bearer.{WRONG}"])  # type: ignore[list-item]  # they are texts
    witness.bodies.append((refused.value.response.body or b"").decode())
    with connect(url, subprotocols=["headrace", f"bearer.{KEY}"]) as socket:  # type: ignore[list-item]
        witness.heads.append(str(socket.response and socket.response.headers))
        socket.send(json.dumps({"prompt": PROMPT, "max_tokens": 2}))
        witness.bodies += [str(message) for message in socket]


def command_lines(machine: Machine, witness: Witness) -> None:
    """What the commands say; a key is shown once, by the command that makes it, and nowhere else."""
    made = json.loads(machine.run("keys", "create", "bob", "--json").stdout)
    until(lambda: witness.ask("GET", "/v1/models", made["key"]) == 200, 15)
    for command in ("keys list", f"keys revoke {made['id']}", "audit", "usage", "status --json", "jobs dead"):
        done = machine.run(*command.split())
        assert done.returncode == 0, done.stderr
        witness.bodies += [done.stdout, done.stderr]
    assert not any(made["key"] in said for said in (*witness.bodies, *witness.heads, machine.said()))


def everything(client: redis.Redis) -> tuple[list[str], list[str]]:
    """All values of the server, and all names of its keys."""
    read: dict[str, Callable[[Any], object]] = {
        "hash": client.hgetall,
        "zset": lambda name: client.zrange(name, 0, -1),
        "set": client.smembers,
        "list": lambda name: client.lrange(name, 0, -1),
        "stream": client.xrange,
        "string": client.get,
    }
    names = [name.decode() for name in client.scan_iter()]

    def value(name: str) -> str:
        kind = client.type(name)
        return str(read[kind.decode() if isinstance(kind, bytes) else kind](name))

    return [value(name) for name in names], names
