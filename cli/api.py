"""`headrace api`: one pod."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer
from msgspec.structs import replace

from headrace.broker import logs
from headrace.broker.models_file import ModelsFile
from headrace.cli import options


def command(
    config: options.Config = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port to listen on; default: api.port.")
    ] = None,
    insecure: options.Insecure = False,
    fd: Annotated[int | None, typer.Option(hidden=True, help="A bound socket, inherited from `serve`.")] = None,
    origin: Annotated[list[str] | None, typer.Option(hidden=True, help="One more of api.origins.")] = None,
) -> None:
    """Run one API pod. It needs a broker: a running `headrace serve` on the same data folder, or redis.url."""
    from headrace.api import exposure, server

    settings = options.let_in(options.read(config), insecure)
    settings = replace(settings, api=replace(settings.api, origins=[*settings.api.origins, *(origin or [])]))
    logs.configure(settings.log_level, settings.log_format)
    if fd is None:  # else `serve` has looked
        options.with_broker(config, lambda broker: exposure.check(settings, broker))
    listener = socket.socket(fileno=fd) if fd is not None else server.bind(settings, port or settings.api.port)
    if fd is None:
        typer.echo(f"headrace pod on http://{settings.api.host}:{listener.getsockname()[1]}")
    models = ModelsFile(config, os.environ, settings)
    server.run(settings, options.broker_of(settings, "gateway"), listener, models)
