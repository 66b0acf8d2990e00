"""Simulated replicas remember prompts as their model says; the broker's rule finds them on a small made-up trace."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.broker.errors import ConfigError
from headrace.cluster.simulation.prefix_cache import UNBOUNDED, BlockCache, best_share, prefix_of
from headrace.cluster.simulation.prefix_fleet import PLACEMENTS, Affine
from headrace.cluster.simulation.prefix_table import compare, table
from headrace.cluster.simulation.trace import BLOCK_TOKENS, Trace, load, of
from headrace.cluster.simulation.world import ReplicaModel

MODEL = ReplicaModel(cache_tokens=UNBOUNDED)


def conversations(count: int, turns: int, seed: int = 1) -> Trace:
    """Conversations that share a beginning of three blocks; each turn adds four. The turns of all are mixed."""
    chance, names = random.Random(seed), iter(range(3, 10**6))
    rows: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(count):
        at = chance.uniform(0, 300)
        blocks: tuple[int, ...] = (0, 1, 2)
        for _ in range(turns):
            blocks += tuple(next(names) for _ in range(4))
            rows.append((at, blocks))
            at += chance.uniform(10, 60)
    arrivals = np.array([at for at, _ in rows])
    inputs = np.array([len(blocks) * BLOCK_TOKENS + 100 for _, blocks in rows])
    return of("made up", arrivals, inputs, np.full(len(rows), 100), [blocks for _, blocks in rows])


def test_a_prompt_that_comes_again_is_prefilled_from_its_cache() -> None:
    blocks = tuple(range(40))
    trace = of("twice", np.array([0.0, 100.0]), np.array([20_580, 20_580]), np.array([1, 1]), [blocks, blocks])
    fleet = PLACEMENTS["none"](trace, MODEL, 1)
    assert fleet.run().ttft_s == pytest.approx([20_580 / 20_000, 100 / 20_000])
    assert fleet.hit_blocks == 40


def test_a_cache_forgets_the_end_of_what_was_used_longest_ago() -> None:
    cache = BlockCache(5 * BLOCK_TOKENS)
    cache.use((0, 1, 2))
    cache.use((7, 8, 9))
    assert (cache.hits((0, 1, 2)), cache.hits((7, 8, 9))) == (2, 3)


def test_prefixes_of_blocks_are_alike_as_far_as_blocks_are() -> None:
    one, other = prefix_of((1, 2, 3, 4, 5, 6)), prefix_of((1, 2, 3, 7, 8, 9))
    shared = next(index for index in range(0, len(one), 8) if one[index : index + 8] != other[index : index + 8])
    assert 0 < shared < len(one) == len(other)


def test_affinity_finds_most_of_what_can_be_found_and_nobody_waits_longer() -> None:
    trace = conversations(120, 6)
    rows = {row.placement: row for row in compare(trace, ReplicaModel(), [4], [0], list(PLACEMENTS))}
    best = rows["affinity"].unbounded_share
    assert rows["affinity"].hit_share > 0.9 * best
    assert rows["none"].hit_share < 0.7 * best
    assert rows["affinity"].wait_p99_s <= 1.1 * rows["hashing"].wait_p99_s
    assert rows["affinity"].ttft_p99_s <= rows["none"].ttft_p99_s
    assert len(table(list(rows.values()))) == 4


def test_a_small_cache_is_not_thought_to_hold_everything() -> None:
    trace = conversations(120, 6)
    [row] = compare(trace, ReplicaModel(), [4], [100_000], ["affinity"])
    assert row.hit_share <= row.best_share < row.unbounded_share
    assert row.hit_share > 0.7 * row.best_share


def test_every_request_is_served_once_and_none_is_overtaken_too_often() -> None:
    trace = conversations(300, 3)
    fleet = Affine(trace, MODEL, 2)
    run = fleet.run()
    assert np.isfinite(run.ttft_s).all()
    assert max(fleet._passed) <= 8


def test_copies_of_a_trace_have_prompts_of_their_own() -> None:
    trace = conversations(20, 3)
    assert best_share(trace.scaled(2), UNBOUNDED) == pytest.approx(best_share(trace, UNBOUNDED), abs=0.02)


def test_a_trace_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="hash_ids"):
        list(compare(load("square"), MODEL, [1], [0], ["none"]))
