"""`headrace keys`: make, list, replace and revoke API keys. The broker keeps the SHA-256 of each and what it may."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from msgspec import structs
from rich.console import Console
from rich.table import Table

from headrace.broker import api_keys
from headrace.broker.api_keys import KeySettings, StoredKey
from headrace.broker.errors import BadRequest, NotFound
from headrace.broker.protocol import Broker
from headrace.cli import options
from headrace.cli.durations import seconds

app = typer.Typer(help="API keys.", no_args_is_help=True)

Owner = Annotated[str, typer.Argument(help="Who the key speaks for.")]
Id = Annotated[str, typer.Argument(help="The key, by its id as `list` shows it, or the beginning of that.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Expires = Annotated[str | None, typer.Option(help="When it ends: 90d, 12h, or 2027-01-31T00:00:00Z.")]
Many = list[str] | None


@app.command("new")
def new(owner: Owner) -> None:
    """Print a new key, once, and the line for headrace.yaml, which holds only its SHA-256. The broker is not asked."""
    token = api_keys.new_token()
    typer.echo(f"key (shown only now): {token}")
    typer.echo(f"for headrace.yaml, under keys:\n  - {{owner: {owner}, sha256: {api_keys.digest(token)}}}")


@app.command("create")
def create(  # noqa: PLR0913  # each is an option of the command line
    owner: Owner,
    scope: Annotated[Many, typer.Option(help="use (default), metrics or admin; say it again for more.")] = None,
    model: Annotated[Many, typer.Option(help="A model that it may use; say it again for more. Default: all.")] = None,
    route: Annotated[Many, typer.Option(help="An address that it may use, with those below it. Default: all.")] = None,
    expires: Expires = None,
    ceiling: Annotated[str, typer.Option(help="The best priority: interactive, default or batch.")] = "interactive",
    weight: Annotated[float, typer.Option(help="Against other owners, while they wait too.")] = 1.0,
    limit: Annotated[Many, typer.Option(help="NAME=NUMBER, of this key; see docs/keys.md.")] = None,
    owner_limit: Annotated[Many, typer.Option(help="NAME=NUMBER, of all keys of its owner together.")] = None,
    as_json: Json = False,
    config: options.Config = None,
) -> None:
    """Make a key and print it, once. Pods know it within two seconds."""
    fields: dict[str, Any] = {"scopes": scope, "models": model, "routes": route, "ceiling": ceiling, "weight": weight}
    waiting, own = _split(_numbers(limit))
    fields |= {"expires": _moment(expires), "limits": own, "owner_limits": _numbers(owner_limit), **waiting}
    token = api_keys.new_token()
    key = _key(owner=owner, sha256=api_keys.digest(token), **fields)
    options.with_broker(config, lambda broker: _put(broker, StoredKey(key, api_keys.now_ms()), "key_created"))
    _show_new(token, key, as_json=as_json)


@app.command("list")
def show(
    owner: Annotated[str | None, typer.Option(help="Only those of this owner.")] = None,
    as_json: Json = False,
    config: options.Config = None,
) -> None:
    """List the keys that the broker keeps; those of headrace.yaml stand there."""
    found = options.with_broker(config, lambda broker: broker.ledger.all_keys())
    rows = [_row(stored) for stored in found if owner in (None, stored.key.owner)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    columns = ("id", "owner", "state", "scopes", "created", "expires")
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table if rows else "no keys")


@app.command("revoke")
def revoke(key: Id, config: options.Config = None) -> None:
    """End a key now. Pods refuse it within two seconds; what it has already begun goes on to its end."""

    async def ask(broker: Broker) -> StoredKey:
        stored = await _find(broker, key)
        await _put(broker, structs.replace(stored, revoked_ms=stored.revoked_ms or api_keys.now_ms()), "key_revoked")
        return stored

    typer.echo(f"{options.with_broker(config, ask).key.id} revoked")


@app.command("rotate")
def rotate(
    key: Id,
    overlap: Annotated[str, typer.Option(help="How long the old one is still good: 24h, 30m, 0s.")] = "24h",
    as_json: Json = False,
    config: options.Config = None,
) -> None:
    """Make a key that may what this one may, print it once, and let the old one expire."""
    token = api_keys.new_token()

    async def ask(broker: Broker) -> KeySettings:
        old = await _find(broker, key)
        if old.state(time.time()) != "active":
            raise BadRequest(f"the key {old.key.id} is not good any more: make a new one with `headrace keys create`")
        new = structs.replace(old.key, sha256=api_keys.digest(token))
        await _put(broker, StoredKey(new, api_keys.now_ms()), "key_created")
        end = datetime.now(UTC) + timedelta(seconds=seconds(overlap))
        expires = min(end, old.key.expires or end)
        await _put(broker, structs.replace(old, key=structs.replace(old.key, expires=expires)), "key_rotated")
        return new

    _show_new(token, options.with_broker(config, ask), as_json=as_json)


async def _put(broker: Broker, stored: StoredKey, action: str) -> None:
    """Note what is about to be done, and do it."""
    key = stored.key
    await options.note(broker, action, f"key {key.id}", f"owner {key.owner}, scopes {' '.join(key.scopes)}")
    await broker.ledger.put_key(stored)


async def _find(broker: Broker, beginning: str) -> StoredKey:
    found = [stored for stored in await broker.ledger.all_keys() if stored.key.sha256.startswith(beginning)]
    if len(found) != 1 or len(beginning) < 4:
        raise NotFound(f"{len(found)} keys begin with {beginning!r}; `headrace keys list` shows their ids")
    return found[0]


def _key(**fields: Any) -> KeySettings:
    """A checked key; raises BadRequest, which names the field. What is None is the default."""

    def refuse(path: str, value: object, why: str) -> NoReturn:
        raise BadRequest(f"{path}: {value!r} {why}")

    try:
        key = msgspec.convert({name: value for name, value in fields.items() if value is not None}, KeySettings)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error).replace("$.", "")) from error
    api_keys.check("key", key, refuse)
    return key


def _numbers(given: Sequence[str] | None) -> dict[str, int] | None:
    """`NAME=NUMBER`, several of them."""
    parts = [each.partition("=") for each in given or ()]
    for name, _, number in parts:
        if not number.isdecimal():
            raise BadRequest(f"a limit is NAME=NUMBER, like requests_per_minute=60, not {name[:64]!r}")
    return {name.replace("-", "_"): int(number) for name, _, number in parts} or None


def _split(limits: dict[str, int] | None) -> tuple[dict[str, int], dict[str, int] | None]:
    """What its owner may have waiting, which is of another kind, and the rest."""
    waiting = {name: number for name, number in (limits or {}).items() if name.startswith("max_waiting_")}
    return waiting, {name: number for name, number in (limits or {}).items() if name not in waiting} or None


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return msgspec.convert(text, datetime, strict=False).astimezone(UTC)
    except msgspec.ValidationError:
        return datetime.now(UTC) + timedelta(seconds=seconds(text))


def _show_new(token: str, key: KeySettings, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"key": token, "id": key.id, "owner": key.owner}))
    else:
        typer.echo(f"key (shown only now): {token}\nid: {key.id}")


def _row(stored: StoredKey) -> dict[str, Any]:
    key = stored.key
    said = msgspec.to_builtins(key)
    return {
        "id": key.id,
        "owner": key.owner,
        "state": stored.state(time.time()),
        "created": datetime.fromtimestamp(stored.created_ms / 1000, UTC).isoformat(timespec="seconds"),
        "expires": key.expires.isoformat(timespec="seconds") if key.expires else "never",
        "scopes": list(key.scopes),
        **{name: value for name, value in said.items() if name not in ("owner", "sha256", "expires", "scopes")},
    }
