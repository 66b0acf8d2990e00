"""`headrace serve`: everything on one machine: the embedded broker, Ray Serve with the models, and pods."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
from pathlib import Path
from typing import IO, Annotated

import msgspec
import typer
from rich.console import Console
from rich.status import Status

from headrace.broker import logs
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import BrokerDown, ConfigError, HeadraceError
from headrace.broker.models import Model
from headrace.broker.models_file import ModelsFile
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings
from headrace.cli import options
from headrace.cli.supervisor import Child

log = logging.getLogger(__name__)

_POD_PATIENCE_S = 3.0


def command(
    config: options.Config = None,
    pods: Annotated[int, typer.Option(min=1, max=64, help="How many API pods, on this many ports.")] = 1,
    port: Annotated[int | None, typer.Option(min=1, max=65472, help="The first pod's port; default: api.port.")] = None,
    insecure: options.Insecure = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every process's log, not only warnings.")
    ] = False,
) -> None:
    """Serve the models of headrace.yaml on this machine, and print the URL. Ctrl-C drains and ends everything."""
    settings = options.let_in(options.read(config), insecure)
    level = settings.log_level if verbose or settings.log_level == "error" else "warning"
    os.environ.update(HEADRACE_LOG_LEVEL=level, HEADRACE_DATA=str(Path(settings.data_dir).resolve()))
    logs.configure(level, settings.log_format)
    asyncio.run(_Serve(settings, config, pods, port or settings.api.port).run())


class _Serve:
    """One running `headrace serve`."""

    def __init__(self, settings: Settings, config: Path | None, pods: int, port: int) -> None:
        self._settings = settings
        self._config = config
        self._ports = range(port, port + pods)
        self._console = Console(stderr=True)
        self._id = f"serve-{socket.gethostname()}-{os.getpid()}"
        self._models: dict[str, str] = {}
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._children: list[Child] = []
        self._server: EmbeddedServer | None = None

    async def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        async with contextlib.AsyncExitStack() as held:
            # kept open here, so that a pod that is started again finds its clients waiting
            listeners = [held.enter_context(_bind(self._settings, port)) for port in self._ports]
            held.enter_context(_lock(self._settings.data_dir))
            with self._console.status("starting the broker") as status:
                await self._start_broker()
                held.push_async_callback(self._stop_broker)
                await self._check_exposure()
                presence = asyncio.create_task(self._keep_capacity(), name="presence")
                held.callback(presence.cancel)
                models = ModelsFile(self._config, os.environ, self._settings)
                following = asyncio.create_task(models.follow(self._take), name="follow models")
                held.callback(following.cancel)
                self._start_children(listeners)
                held.push_async_callback(self._end)
                await self._until_ready(status)
            if not self._stop.is_set():
                self._say_ready()
                await self._keep_broker()

    def _take(self, settings: Settings) -> None:
        """New models: those that are not there yet are on their way."""
        before, self._settings = self._settings, settings
        for model in {model.name for model in before.models if model not in settings.models}:
            self._models.pop(model, None)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    async def _start_broker(self) -> None:
        if self._settings.redis.url is None:
            self._server = EmbeddedServer(self._settings.data_dir)
            await self._server.start()

    async def _check_exposure(self) -> None:
        from headrace.api import exposure

        broker = options.broker_of(self._settings, "ops")
        try:
            await exposure.check(self._settings, broker)
        finally:
            await broker.close()

    async def _stop_broker(self) -> None:
        if self._server is not None:
            await self._server.stop()

    async def _keep_capacity(self) -> None:
        """Say, from before the first pod to after the last, that replicas are wanted: what waits is not refused."""
        broker = options.broker_of(self._settings, "scaler")
        try:
            while True:
                for model in self._settings.models:
                    if self._wants(model):
                        with contextlib.suppress(BrokerDown):
                            for name in model.names:
                                await broker.present("cluster", self._id, name, {})
                await asyncio.sleep(min(1.0, self._settings.queue.lease_s / 3))
        finally:
            await broker.close()

    def _wants(self, model: Model) -> bool:
        """Are replicas of it wanted, or on their way? Once a model is up, its autoscaler says so by itself."""
        state = self._models.get(model.name)
        if model.autoscaling is not None:
            return state not in ("failed", "unplaced", "ready")
        return bool(model.replicas) and state not in ("failed", "unplaced")

    def _start_children(self, listeners: list[socket.socket]) -> None:
        config = ["--config", str(self._config.resolve())] if self._config else []
        origins = [f"--origin={origin}" for origin in self._origins()]
        self._children = [
            Child(
                f"pod {listener.getsockname()[1]}",
                ["api", "--fd", str(listener.fileno()), *origins, *config],
                [listener.fileno()],
            )
            for listener in listeners
        ]
        self._children.append(Child("cluster", ["cluster", *config], on_line=self._on_cluster_line))
        for child in self._children:
            child.start()

    def _origins(self) -> list[str]:
        """Pages of one pod may go on at another, as the playground does; on this machine, whatever it is called."""
        if len(self._ports) == 1 or self._settings.api.host not in ("127.0.0.1", "localhost"):
            return []
        return [f"http://{host}:{port}" for host in ("127.0.0.1", "localhost") for port in self._ports]

    def _on_cluster_line(self, line: bytes) -> None:
        try:
            found = msgspec.json.decode(line)
        except msgspec.DecodeError:
            log.warning("%s", line.decode(errors="replace").rstrip(), extra={"event": "cluster_says"})
            return
        self._models[found["model"]] = found["state"]
        what = {"failed": "failed to start", "unplaced": "has no place"}.get(found["state"])
        if what is not None:
            self._console.print(f"[red]model {found['model']} {what}:[/] {found['message']}", highlight=False)

    async def _until_ready(self, status: Status) -> None:
        """Show what is going on until every pod and model is ready or has failed."""
        broker = options.broker_of(self._settings, "scaler")
        try:
            while not self._stop.is_set():
                missing = [model.name for model in self._settings.models if model.name not in self._settled()]
                pods = await _pods(broker)
                if not missing and pods >= len(self._ports):
                    return
                status.update(await self._progress(broker, missing))
                await asyncio.sleep(0.1)
        finally:
            await broker.close()

    def _settled(self) -> set[str]:
        return {name for name, state in self._models.items() if state in ("ready", "failed", "unplaced")}

    async def _progress(self, broker: RedisBroker, missing: list[str]) -> str:
        if not self._models:
            return "starting Ray Serve"
        try:
            replicas = await broker.listing("replicas")
        except BrokerDown:
            return "waiting for the broker"
        said = {replica["model"]: replica["progress"] for replica in replicas.values()}
        parts = [f"{name}: {said.get(name) or 'starting a replica'}" for name in missing]
        return ", ".join(parts) or "starting the pods"

    def _say_ready(self) -> None:
        ready = [name for name, state in self._models.items() if state == "ready"]
        if not ready:
            raise HeadraceError("no model could be started; the messages above say why")
        host = self._settings.api.host
        for port in self._ports:
            typer.echo(f"headrace is ready on http://{host}:{port}")
        typer.echo(f"models: {', '.join(ready)}    stop with Ctrl-C")

    async def _keep_broker(self) -> None:
        """Until we are told to stop; an embedded broker that dies is started again on its log."""
        while not self._stop.is_set():
            server = self._server
            if server is None or server.process is None:
                await self._stop.wait()
                return
            ended, stopped = asyncio.ensure_future(server.process.wait()), asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            stopped.cancel()
            if not self._stop.is_set():
                log.warning("the broker ended, starting it again", extra={"event": "child_ended"})
                await server.start()

    async def _end(self) -> None:
        """Replicas drain while pods still relay what they finish; then the pods end."""
        self._console.print("draining; Ctrl-C again ends it at once", style="dim")
        *pods, cluster = self._children
        await cluster.stop(self._settings.worker.drain_s + 10, force=self._force)
        await asyncio.gather(*(pod.stop(_POD_PATIENCE_S, force=self._force) for pod in pods))


def _bind(settings: Settings, port: int) -> socket.socket:
    from headrace.api import server

    return server.bind(settings, port)


def _lock(data_dir: str) -> IO[str]:
    """One `serve` a data folder, also if the other one's broker is not up yet."""
    folder = Path(data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "serve.lock").open("w")
    except OSError as error:
        raise ConfigError(f"data_dir: {data_dir!r} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"data_dir: another headrace serves from {data_dir!r}; stop it, or set HEADRACE_DATA"
        ) from None
    return lock


async def _pods(broker: RedisBroker) -> int:
    try:
        return len(await broker.listing("pods"))
    except BrokerDown:
        return 0
