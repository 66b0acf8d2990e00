"""Chaos: streams through a real deployment whose parts are killed, paused, cut off and drained; is every text whole?

`python bench/chaos.py --streams 60 --faults 15 --seed 1` starts Valkey, pods and workers of its own, makes the faults
in an order that the seed fixes, and checks every stream against the scripted engine's oracle. Exit status 1 on any
violation; the last line is a summary in JSON. See docs/reliability.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when it is run by its path

from bench.chaos_faults import Faults
from bench.chaos_stream import DEADLINE_S, Stream, ask
from bench.chaos_world import MODEL, World
from headrace.broker.errors import BrokerDown

_QUIET_S = 30.0
"""How long after the last stream everything must be at rest: longer than the grace time of requests that were lost."""


class Run:
    """All streams, all faults, and what was found."""

    def __init__(self, options: argparse.Namespace, world: World) -> None:
        self.options = options
        self.world = world
        self.streams = [Stream(number, options.seed, options.tokens, world.ports) for number in range(options.streams)]
        choice = random.Random(options.seed)
        self.faults = Faults(world, choice, lambda: [s for s in self.streams if s.is_running], tail=options.lost_tail)
        self.violations: list[str] = []
        self.began = 0
        self._faulted = 0
        self._choice = choice

    async def go(self) -> None:
        """Streams and faults keep step, so that faults are spread over the whole run."""
        slots = asyncio.Semaphore(self.options.concurrency)
        tasks = [asyncio.create_task(self._stream(number, slots)) for number in range(len(self.streams))]
        tasks.append(asyncio.create_task(self._make_faults()))
        if sys.stderr.isatty():
            tasks.append(asyncio.create_task(self._show()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        await self.faults.settle()

    async def check_rest(self) -> None:
        """Nothing may be left of all the jobs but logs that expire."""
        deadline = time.monotonic() + _QUIET_S
        while (left := await self._left()) and time.monotonic() < deadline:  # noqa: ASYNC110  # processes tell nobody
            await asyncio.sleep(0.25)
        self.violations += [f"left at the end: {each}" for each in left]
        self.violations += [f"a key without expiry: {key}" for key in await self.world.keys_without_expiry()]
        for stream in self.streams:
            where = f"stream {stream.number} ({stream.job or 'never accepted'})"
            self.violations += [f"{where}: {each}" for each in stream.violations]
            if stream.outcome == "lost" and not self.options.lost_tail:
                self.violations.append(f"{where}: lost, {stream.reading.error} at {stream.reading.position}")

    async def _left(self) -> list[str]:
        stats = await self.world.broker.stats(MODEL)
        left = [f"{count} jobs wait in {band}" for band, count in stats.waiting.items() if count]
        if stats.running:
            left.append(f"{stats.running} jobs run")
        for port in self.world.ports:
            try:
                if open_streams := await _open_streams(port):
                    left.append(f"pod {port}: {open_streams:g} streams are open")
            except Exception as error:  # noqa: BLE001  # whatever it is, it is asked again, and told at the end
                left.append(f"pod {port} does not tell its metrics: {error!r}")
        return left

    async def _stream(self, number: int, slots: asyncio.Semaphore) -> None:
        stream, options = self.streams[number], self.options
        behind = (number - options.concurrency) * options.faults / options.streams
        await self._wait_for(lambda: self._faulted >= behind)
        async with slots:
            self.began += 1
            await stream.run()
        try:
            await stream.audit(may_lose=options.lost_tail)
        except Exception as error:  # noqa: BLE001  # an audit that cannot be done is a finding, not the end of the run
            if not options.lost_tail:
                stream.violations.append(f"audit: {error!r}")

    async def _make_faults(self) -> None:
        await self._wait_for(lambda: any(stream.is_running for stream in self.streams))
        for number in range(self.options.faults):
            needed = number * len(self.streams) / self.options.faults
            await self._wait_for(partial(self._has_begun, needed))
            await asyncio.sleep(self._choice.uniform(0.1, 0.8))
            await self.faults.next()
            self._faulted += 1

    def _has_begun(self, count: float) -> bool:
        return self.began >= count

    @staticmethod
    async def _wait_for(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  # a tenth of a second is as good, and needs no counting of waiters
            await asyncio.sleep(0.1)

    async def _show(self) -> None:
        while not all(stream.outcome for stream in self.streams):
            ended = sum(bool(stream.outcome) for stream in self.streams)
            bad = sum(len(stream.violations) for stream in self.streams)
            faults = f"{self._faulted}/{self.options.faults} faults"
            line = f"\r{ended}/{len(self.streams)} streams, {faults}, {bad} violations "
            print(line, end="", file=sys.stderr, flush=True)
            await asyncio.sleep(0.5)
        print(file=sys.stderr)


async def _open_streams(port: int) -> float:
    async with ask(port, "GET", "/metrics", {}) as answer:
        lines = b"".join([piece async for piece in answer.pieces()]).decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("headrace_streams_open{"))


def summary(run: Run, took_s: float) -> dict[str, object]:
    """Everything in numbers."""
    gaps = sorted(stream.longest_gap_s for stream in run.streams)
    grown = {each.role: 0 for each in (*run.world.pods, *run.world.workers)}
    for each in (*run.world.pods, *run.world.workers):
        grown[each.role] = max(grown[each.role], each.growth_bytes() or 0)
    return {
        "seed": run.options.seed,
        "streams": len(run.streams),
        "tokens": sum(len(stream.reading.text) // 9 for stream in run.streams),
        **dict(sorted(Counter(stream.outcome for stream in run.streams).items())),
        "faults": dict(sorted(run.faults.made.items())),
        "hints_dropped": run.world.proxy.dropped,
        "reconnects": sum(stream.reconnects for stream in run.streams),
        "gap_p50_s": round(gaps[len(gaps) // 2], 2),
        "gap_p99_s": round(gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)], 2),
        "growth_mib": {role: round(count / 2**20, 1) for role, count in grown.items()},
        "took_s": round(took_s, 1),
        "violations": len(run.violations),
    }


def report(run: Run, numbers: dict[str, object]) -> None:
    for violation in run.violations:
        print(f"VIOLATION {violation}")
    for name, value in numbers.items():
        print(f"{name:>14}  {value}")
    print(json.dumps(numbers), flush=True)


async def main(options: argparse.Namespace) -> int:
    logging.disable(logging.INFO)
    folder = Path(tempfile.mkdtemp(prefix="hr-chaos-"))
    world = World(folder, options.pods, options.workers, options.rate)
    run = Run(options, world)
    started = time.monotonic()
    try:
        await world.start()
        async with asyncio.timeout(DEADLINE_S + options.limit):
            await run.go()
            await run.check_rest()
        numbers = summary(run, time.monotonic() - started)
    except (TimeoutError, BrokerDown) as error:
        run.violations.append(f"the run did not end: {error!r}")
        numbers = summary(run, time.monotonic() - started)
    finally:
        await world.close()
    report(run, numbers)
    if run.violations or options.keep:
        print(f"logs are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return 1 if run.violations else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--faults", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=120, help="a stream has half of it to all of it")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens per second and stream")
    parser.add_argument("--pods", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds after which the run has failed")
    parser.add_argument("--lost-tail", action="store_true", help="also lose the end of Valkey's log")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse(sys.argv[1:]))))
