"""The threads of the llama.cpp engine, and how its chunks are read when they say no."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from headrace.broker.errors import BadRequest, ContextLengthExceeded, EngineFailed
from headrace.workers.engines import model_files
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.llamacpp_slots import Sequence, Slots
from headrace.workers.engines.llamacpp_wire import StreamReader
from headrace.workers.engines.protocol import Step
from tests.workers.llamacpp_runs import DATA_DIR, default_model


@pytest.fixture(scope="module")
def vocab() -> Iterator[GgufVocab]:
    vocab = GgufVocab(model_files.find(default_model(), DATA_DIR, lambda what, share: None))
    yield vocab
    vocab.close()


def fail(error: Exception) -> None:
    raise AssertionError("this sequence must not fail") from error


async def test_a_thread_that_dies_or_returns_early_fails_its_sequence(vocab: GgufVocab) -> None:
    def die(body: bytes, callback: Callable[[bytes], bool]) -> None:
        if body == b"die":
            raise RuntimeError("no memory")

    slots = Slots(die, 1, asyncio.get_running_loop())
    errors: asyncio.Queue[Exception] = asyncio.Queue()
    for body in (b"die", b"return"):
        slots.start(Sequence(body, StreamReader(vocab, 1, None), lambda step: None, errors.put_nowait))
    messages = [str(await asyncio.wait_for(errors.get(), 5)) for _ in range(2)]
    assert ["no memory" in message for message in messages] == [True, False]
    slots.join()


async def test_a_request_that_llamacpp_does_not_take_is_the_callers_error(vocab: GgufVocab) -> None:
    def refuse(body: bytes, callback: Callable[[bytes], bool]) -> None:
        raise ValueError("tools need a template")

    def never(body: bytes, callback: Callable[[bytes], bool]) -> None:
        raise AssertionError("the sequence has a way of its own")

    slots = Slots(never, 1, asyncio.get_running_loop())
    errors: asyncio.Queue[Exception] = asyncio.Queue()
    sequence = Sequence(b"", StreamReader(vocab, 1, None), lambda step: None, errors.put_nowait)
    sequence.complete = refuse
    slots.start(sequence)
    error = await asyncio.wait_for(errors.get(), 5)
    assert (type(error), str(error)) == (BadRequest, "tools need a template")
    slots.join()


async def test_llamacpp_gets_no_more_than_its_slots_and_never_what_was_cancelled(vocab: GgufVocab) -> None:
    last_chunk = b'{"choices":[{"finish_reason":"stop"}],"__verbose":{"stop_type":"eos"}}'
    begun: list[bytes] = []
    begins, gate = threading.Semaphore(0), threading.Event()

    def make(body: bytes, callback: Callable[[bytes], bool]) -> None:
        begun.append(body)
        begins.release()
        assert gate.wait(10)
        callback(last_chunk)

    slots = Slots(make, 2, asyncio.get_running_loop())
    ended: asyncio.Queue[Step] = asyncio.Queue()
    sequences = [Sequence(b"%d" % i, StreamReader(vocab, 1, None), ended.put_nowait, fail) for i in range(4)]
    for sequence in sequences:
        slots.start(sequence)
    for _ in range(2):
        assert begins.acquire(timeout=10)
    sequences[2].cancel()
    assert sorted(begun) == [b"0", b"1"]
    gate.set()
    for _ in range(3):
        assert (await asyncio.wait_for(ended.get(), 10)).end == "eos"
    assert sorted(begun) == [b"0", b"1", b"3"]
    slots.join()


@pytest.mark.parametrize(
    ("chunk", "error"),
    [
        (b'{"error":{"code":400,"type":"exceed_context_size_error","message":"long"}}', ContextLengthExceeded),
        (b'{"error":{"code":400,"type":"invalid_request_error","message":"bad"}}', BadRequest),
        (b'{"error":{"code":500,"type":"server_error","message":"gone"}}', EngineFailed),
        (b'{"choices":[{"text":"Hi"}]}', EngineFailed),
        (b'{"choices":[{}],"__verbose":{"tokens":[],"tokens_predicted":1}}', EngineFailed),
        (b"{", EngineFailed),
    ],
)
def test_chunks_that_say_no_are_errors_of_their_kind(vocab: GgufVocab, chunk: bytes, error: type[Exception]) -> None:
    reader = StreamReader(vocab, 5, None)
    with pytest.raises(error) as raised:
        reader.read(chunk)
    assert type(raised.value) is error
