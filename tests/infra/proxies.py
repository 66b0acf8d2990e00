"""nginx and HAProxy as the configurations in `infra/proxy` run them, on free ports before the pods of a test."""

from __future__ import annotations

import contextlib
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp

import httpx

from tests.infra.tools import INFRA, program, run
from tests.system.conftest import free_ports, until

SOURCE = INFRA / "proxy"
NAMES = ("nginx", "haproxy")


class Proxy:
    """A running proxy. `replaced` changes words of its configuration, each of which must be there."""

    def __init__(self, name: str, pods: Sequence[str], replaced: dict[str, str] | None = None) -> None:
        self.name = name
        self._program = program(name, f"apt-get install {'nginx-light' if name == 'nginx' else name}")
        self._folder = Path(mkdtemp(prefix="hr-proxy-"))
        self._folder.chmod(0o755)  # nginx's workers are not root
        self._ports = free_ports(2)
        self.url, self.tls_url = f"http://127.0.0.1:{self._ports[0]}", f"https://localhost:{self._ports[1]}"
        _certificate(self._folder)
        pods = [pod.removeprefix("http://") for pod in pods]
        self._config = self._nginx(pods) if name == "nginx" else self._haproxy(pods)
        text = self._config.read_text("utf-8")
        for old, new in (replaced or {}).items():
            assert old in text
            text = text.replace(old, new)
        self._config.write_text(text, "utf-8")
        command = {
            "nginx": ["-e", "stderr", "-c", str(self._config), "-g", "daemon off;"],
            "haproxy": ["-W", "-f", str(self._config)],
        }[name]
        with (self._folder / "log").open("w") as log:
            self.process = subprocess.Popen([self._program, *command], stdout=log, stderr=subprocess.STDOUT)

    def _nginx(self, pods: Sequence[str]) -> Path:
        config = self._folder / "nginx.conf"
        text = (SOURCE / "nginx.conf").read_text("utf-8")
        config.write_text(text.replace("/tmp/", f"{self._folder}/").replace("/dev/stdout", str(self._folder / "log")))
        first, second = (line for line in (SOURCE / "upstream.conf").read_text("utf-8").splitlines() if line[0] != "#")
        (self._folder / "upstream.conf").write_text(
            f"{first.replace('127.0.0.1:8080', pods[0])}\n{second.replace('127.0.0.1:8081', pods[-1])}\n"
        )
        (self._folder / "listen.conf").write_text(
            (SOURCE / "listen.conf").read_text("utf-8").replace("8000;", f"127.0.0.1:{self._ports[0]};")
            + f"listen 127.0.0.1:{self._ports[1]} ssl http2;\n"
            f"ssl_certificate {self._folder}/tls.crt;\nssl_certificate_key {self._folder}/tls.key;\n"
        )
        return config

    def _haproxy(self, pods: Sequence[str]) -> Path:
        config = self._folder / "haproxy.cfg"
        both = f"bind 127.0.0.1:{self._ports[0]}\n    bind 127.0.0.1:{self._ports[1]} ssl crt {self._folder}/tls.pem"
        text = (SOURCE / "haproxy.cfg").read_text("utf-8").replace("bind :8000", f"{both} alpn h2,http/1.1")
        text = text.replace("127.0.0.1:8080", pods[0]).replace("127.0.0.1:8081", pods[-1])
        config.write_text(text)
        return config

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._folder / "tls.crt"))

    def wait(self) -> None:
        """Until it answers for a pod."""
        until(lambda: self._answers() or self.process.poll() is not None, 20)
        assert self.process.poll() is None, self.said()

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200
        return False

    def said(self) -> str:
        return (self._folder / "log").read_text("utf-8")

    def reload(self) -> None:
        """Read the configuration again, as its operator would have it do."""
        self.process.send_signal(signal.SIGHUP if self.name == "nginx" else signal.SIGUSR2)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            shutil.rmtree(self._folder)


def _certificate(folder: Path) -> None:
    openssl = program("openssl", "apt-get install openssl")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(folder / "tls.key")]
    run([openssl, "req", "-x509", "-days", "2", *key, "-out", str(folder / "tls.crt"), *names])
    (folder / "tls.pem").write_text((folder / "tls.crt").read_text() + (folder / "tls.key").read_text())


@contextlib.contextmanager
def proxy(name: str, pods: Sequence[str], replaced: dict[str, str] | None = None) -> Iterator[Proxy]:
    """A proxy before one or two pods; it need not answer yet."""
    running = Proxy(name, pods, replaced)
    try:
        yield running
    finally:
        running.end()
