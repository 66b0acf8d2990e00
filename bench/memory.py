"""What a live stream costs Redis: bytes a job and bytes a token, on an embedded server with the scripted engine.

python bench/memory.py --streams 500 --tokens 200 --rate 50
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile

from headrace.broker import keys
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.messages import Chat, Job, Message, View
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Admission
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings, Settings, WorkerSettings
from headrace.workers import engines
from headrace.workers.worker import Worker


async def used_bytes(broker: RedisBroker) -> int:
    info = await broker._nodes.first.redis.info("memory")
    return int(info["used_memory_dataset"])


async def entries(broker: RedisBroker, job_id: str) -> int:
    [last] = await broker.last_ids(keys.shard_of(job_id), [job_id])
    return int((last or "0-0").split("-")[1])


async def measure(streams: int, tokens: int, rate: float, prompt_bytes: int) -> float:
    """Bytes of the data set that so many streams left, over what was there before."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        server = EmbeddedServer(folder, has_users=False)
        await server.start()
        broker = RedisBroker(server.url, RedisSettings(), QueueSettings())
        await broker.open()
        model = ScriptedModel(name="m", slots=streams, tokens_per_s=rate)
        worker = Worker(
            Settings([model], worker=WorkerSettings(drain_s=0.0)), model, broker, engines.make(model, folder)
        )
        await worker.start()
        running = asyncio.create_task(worker.run())
        before = await used_bytes(broker)
        view = View("owner", "m", "openai.chat", "default")
        ids = [keys.new_job_id(1) for _ in range(streams)]
        for job_id in ids:
            chat = Chat([Message("user", "x" * prompt_bytes)])
            await broker.admit(Admission(Job(job_id, "m", chat, max_tokens=tokens + 1000), view, None, -1))
        while min([await entries(broker, job_id) for job_id in ids[:20]]) < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # the log can only be asked
        used = await used_bytes(broker) - before
        written = sum([await entries(broker, job_id) for job_id in ids])
        await worker.drain()
        await running
        await broker.close()
        await server.stop()
    print(f"{streams} streams, {written / streams:.0f} entries each: {used / streams:.0f} bytes a stream")
    return used / streams


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second and stream")
    parser.add_argument("--prompt-bytes", type=int, default=1000)
    given = parser.parse_args()
    few = await measure(given.streams, 1, 1.0, given.prompt_bytes)
    many = await measure(given.streams, given.tokens, given.rate, given.prompt_bytes)
    print(f"{few:.0f} bytes a stream before its tokens, {(many - few) / given.tokens:.0f} bytes a token")


if __name__ == "__main__":
    asyncio.run(main())
