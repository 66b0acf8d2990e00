"""What a replica says that it holds: no more than its cache has room for, and what fell out is told once."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.affinity import TOKENS_PER_BYTE
from headrace.broker.prefixes import LENGTHS, anchors, split
from headrace.workers.prefixes import Served
from tests.support import a_text_job


def prefix_of(text: str) -> bytes:
    return anchors(a_text_job(text))


A, B = prefix_of("a" * 10_000), prefix_of("b" * 10_000)
TOKENS = int(max(length for length in LENGTHS if length <= 10_000) * TOKENS_PER_BYTE)


def test_what_fits_is_held() -> None:
    served = Served(3 * TOKENS)
    served.serve(0, A, "1", 10)
    served.serve(0, B, "2", 10)
    assert served.dropped(0) == b""


def test_what_was_used_longest_ago_falls_out_its_end_first() -> None:
    served = Served(2 * TOKENS + 100)
    served.serve(0, A, "1".zfill(32), 10)
    served.serve(0, B, "2".zfill(32), 10)
    served.serve(0, A, "3".zfill(32), 10)
    served.serve(0, b"", "4".zfill(32), 500)
    dropped = split(served.dropped(0))
    assert dropped and set(dropped) < set(split(B))
    assert dropped[0] == split(B)[-1]
    assert served.dropped(0) == b""


def test_what_is_served_again_before_it_was_told_is_not_told() -> None:
    served = Served(TOKENS + 100)
    served.serve(0, A, "1".zfill(32), 10)
    served.serve(0, B, "2".zfill(32), 10)
    served.serve(0, A, "3".zfill(32), 10)
    assert set(split(served.dropped(0))) == set(split(B))


def test_every_shard_is_told() -> None:
    served = Served(TOKENS + 100, shards=2)
    served.serve(0, A, "1".zfill(32), 10)
    served.serve(1, B, "2".zfill(32), 10)
    assert set(split(served.dropped(0))) == set(split(served.dropped(1))) == set(split(A))


@given(st.integers(0, 1000), st.integers(1, 30_000))
def test_what_is_held_and_not_told_as_dropped_has_room(seed: int, room: int) -> None:
    chance, served, held = random.Random(seed), Served(room), set[bytes]()
    for number in range(40):
        prefix = prefix_of(chance.choice("abc") * chance.randint(0, 20_000))
        served.serve(0, prefix, str(number).zfill(32), 0)
        held = (held | set(split(prefix))) - set(split(served.dropped(0)))
        weights = {anchor: length for text in "abc" for length, anchor in _weighed(text)}
        used = sum(int(weights[anchor]) for anchor in held)
        assert used <= room or len(held) <= 1


def _weighed(text: str) -> list[tuple[int, bytes]]:
    found = split(prefix_of(text * 20_000))
    begins = [0, *LENGTHS]
    return [(int((LENGTHS[i] - begins[i]) * TOKENS_PER_BYTE), anchor) for i, anchor in enumerate(found)]
