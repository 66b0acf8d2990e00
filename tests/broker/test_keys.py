"""Key names, job ids and positions."""

from __future__ import annotations

import pytest

from headrace.broker import keys, scripts


def test_all_keys_of_a_shard_share_its_hash_tag() -> None:
    for kind in keys.KEYS:
        assert keys.key(kind, 0x2A, "x").startswith("hr:{002a}:")
    assert keys.key("log", 1, "abc") == "hr:{0001}:log:abc"


def test_no_kind_of_key_can_be_taken_for_another() -> None:
    infixes = [entry.infix for entry in keys.KEYS.values()]
    assert len(set(infixes)) == len(infixes)
    for open_ended in (infix for infix in infixes if infix.endswith(":")):
        assert [infix for infix in infixes if infix.startswith(open_ended)] == [open_ended]


def test_the_functions_are_given_every_key_and_write_no_name_themselves() -> None:
    assert keys.lua_table() in scripts.library()
    for file in ("lib", *scripts.VERBS):
        assert "hr:" not in scripts.source(file)


def test_a_new_job_id_names_a_shard_and_is_random() -> None:
    ids = {keys.new_job_id(3) for _ in range(200)}
    assert len(ids) == 200
    assert {keys.shard_of(job_id) for job_id in ids} == {0, 1, 2}
    assert all(keys.is_job_id(job_id, 3) for job_id in ids)


def test_an_idempotent_job_id_is_a_function_of_secret_owner_and_key() -> None:
    ids = [
        keys.idempotent_job_id(secret, owner, key, 3)
        for secret, owner, key in (
            (b"s", "a", "k"),
            (b"t", "a", "k"),
            (b"s", "b", "k"),
            (b"s", "a", "l"),
            (b"s", "", "ak"),
        )
    ]
    assert len(set(ids)) == 5
    assert all(keys.is_job_id(job_id, 3) for job_id in ids)
    assert ids[0] == keys.idempotent_job_id(b"s", "a", "k", 3) == "00022851c91e2ac6a8d5159ce11ec5d7"
    assert {keys.shard_of(keys.idempotent_job_id(b"s", "a", str(i), 3)) for i in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "0" * 31 + "G", "0" * 31 + "A", "0" * 31 + "\n", "../" * 11])
def test_what_is_no_job_id_is_told(text: str) -> None:
    assert not keys.is_job_id(text, 65536)


def test_a_job_id_of_a_shard_that_is_not_there_is_none() -> None:
    assert keys.is_job_id("0001" + "0" * 28, 2)
    assert not keys.is_job_id("0002" + "0" * 28, 2)


def test_positions_compare_as_numbers() -> None:
    ids = ["10-0", "2-10", "2-9", "0-1", "1-0"]
    assert sorted(ids, key=keys.position) == ["0-1", "1-0", "2-9", "2-10", "10-0"]


@pytest.mark.parametrize(
    "text", ["", "1", "1-", "-1", "1-2-3", "01-2", "1-02", "+1-2", "1-2.3", "1 -2", "1-2\n", "٣-1"]
)
def test_what_is_no_position_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a log position"):
        keys.position(text)
