"""TLS to a real server: everything of ours goes through it, and who is not vouched for is told so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.broker import tls
from headrace.broker.errors import BrokerDown, ConfigError
from headrace.broker.messages import Chat, Job, Message, View
from headrace.broker.protocol import Admission, Append, Hint
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.broker.steps import STEP, Pod, an_end, append, unknown_id
from tests.broker.tls_server import Authority, TlsServer, tls_server
from tests.support import eventually


@pytest.fixture(scope="module", params=["single", "cluster"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with tls_server(tmp_path_factory.mktemp("tls"), is_cluster=request.param == "cluster") as server:
        yield server


def broker_of(server: TlsServer, user: str, **settings: str | None) -> RedisBroker:
    return RedisBroker(server.url_of(user), replace(server.settings, **settings), QueueSettings())


async def test_a_job_lives_its_whole_life_over_tls(server: TlsServer) -> None:
    ops, gateway, worker, scaler = (broker_of(server, user) for user in ("ops", "gateway", "worker", "scaler"))
    for broker in (ops, gateway, worker, scaler):  # the first may bring the functions
        await broker.open()
    await scaler.present("cluster", "test", "m", {})
    pod = Pod()
    listener = gateway.listen_hints("p", pod.on_hint, pod.on_gap)
    await eventually(lambda: pod.gaps == server.settings.shards)  # in a cluster, a connection for each
    for shard in range(server.settings.shards):
        job = Job(f"{shard:04x}{unknown_id()[4:]}", "m", Chat([Message("user", "hello")]))
        await gateway.admit(Admission(job, View("alice", "m", "openai.chat"), "p", 1000))
        [claimed] = await worker.claim(shard, "r", "m", 1)
        assert (claimed.job.id, claimed.readers) == (job.id, ["p"])
        lane = worker.lane(shard)
        entry = Append(job.id, "1-1", STEP)
        assert (await lane.exchange([], [entry], [])).appends == ["ok"]
        settled = await lane.exchange([Hint("p", [entry])], [], [an_end(job.id, last="1-1")])
        assert (settled.settles, settled.deaf) == (["ok"], [])
        assert [id for id, _ in await gateway.read(job.id, "0-1", 10)] == ["0-1", "1-0", "1-1", "1-2"]
        await eventually(lambda entry=entry: entry in pod.heard)  # type: ignore[misc]
        await lane.close()
    await listener.close()
    for broker in (ops, gateway, worker, scaler):
        await broker.close()


async def test_a_server_that_nobody_vouches_for_is_told_and_not_spoken_to(server: TlsServer, tmp_path: Path) -> None:
    broker = broker_of(server, "worker", tls_ca_file=str(Authority(tmp_path, "another").file))
    with pytest.raises(BrokerDown, match=r"certificate is not trusted: .*redis\.tls_ca_file"):
        await broker.open()
    with pytest.raises(BrokerDown, match="certificate is not trusted"):
        await append(broker, f"0000{unknown_id()[4:]}", "1-1")
    await broker.close()


async def test_a_server_of_another_name_is_not_spoken_to(server: TlsServer) -> None:
    broker = RedisBroker(server.url_of("worker", "localhost"), server.settings, QueueSettings())
    with pytest.raises(BrokerDown, match="certificate is not trusted: Hostname mismatch"):
        await broker.open()
    await broker.close()


async def test_a_url_cannot_turn_the_checks_off(server: TlsServer) -> None:
    url = f"{server.url_of('worker', 'localhost')}?ssl_cert_reqs=none&ssl_check_hostname=false"
    broker = RedisBroker(url, server.settings, QueueSettings())
    with pytest.raises(BrokerDown, match="Hostname mismatch"):
        await broker.open()
    await broker.close()


async def test_a_client_without_a_certificate_is_told_so(server: TlsServer) -> None:
    broker = broker_of(server, "worker", tls_cert_file=None, tls_key_file=None)
    for _ in range(5):  # in the server's own words, or in ours if its hanging up overtakes them
        with pytest.raises(BrokerDown, match=r"refuses TLS: .*certificate.*redis\.tls_cert_file"):
            await broker.open()
    await broker.close()


@pytest.mark.parametrize(
    ("url", "settings", "why"),
    [
        ("redis://h", {"tls_ca_file": "/x"}, "redis.tls_ca_file: '/x' is for TLS; redis.url must begin with rediss://"),
        ("rediss://h", {"tls_ca_file": "/nowhere"}, "redis.tls_ca_file: '/nowhere' cannot be read: No such file"),
        ("rediss://h", {"tls_key_file": "/dev/null"}, "redis.tls_key_file: '/dev/null' needs redis.tls_cert_file"),
    ],
)
def test_a_wrong_configuration_names_the_setting(url: str, settings: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace(".", r"\.")):
        RedisBroker(url, RedisSettings(**settings), QueueSettings())  # type: ignore[arg-type]


def test_what_is_no_trouble_of_tls_is_not_called_one() -> None:
    reset, bare = ConnectionResetError(), RedisSettings()
    assert tls.refusal(reset) is None
    assert tls.suspicion(reset, "redis://h", bare) is None
    assert tls.suspicion(reset, "rediss://h", RedisSettings(tls_cert_file="/x")) is None
    assert tls.suspicion(ConnectionRefusedError(), "rediss://h", bare) is None
