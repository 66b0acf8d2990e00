"""`headrace simulate` as a command: its lines of JSON, its plan, its pictures, and how it says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEADER = "arrival_s,input_tokens,output_tokens\n"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "tiny.csv"
    rows = "".join(f"{second},{500 + 40 * (second % 7)},20\n" for second in range(120))
    file.write_text(HEADER + rows, "utf-8")
    return file


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "simulate", *arguments], capture_output=True, text=True, timeout=120
    )


def test_all_policies_say_a_line_of_json_a_run(trace: Path) -> None:
    answer = simulate("--trace", str(trace), "--policy", "all", "--start-up", "5", "--json", "--max-replicas", "4")
    assert answer.returncode == 0, answer.stderr
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    wanted = {"policy", "knob", "trace", "start_up_s", "seed", "attainment", "replica_hours"}
    wanted |= {"reversals_per_hour", "recovery_s"}
    assert all(wanted <= set(row) for row in rows)
    names = {row["policy"] for row in rows}
    assert {"headrace", "static", "ray", "ray_async", "keda", "kpa", "apa", "oracle"} <= names
    assert {"llmd_latency", "llmd_token", "dynamo"} <= names
    assert {(row["trace"], row["start_up_s"], row["seed"]) for row in rows} == {("tiny", 5.0, 0)}
    assert all(0 <= row["attainment"] <= 1 for row in rows)


def test_a_plan_says_how_many_and_what_they_cost(trace: Path) -> None:
    answer = simulate("--trace", str(trace), "--plan", "--attainment", "0.95", "--price", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    plan = json.loads(answer.stdout)
    assert plan["static"] == 1
    assert plan["static_cost"] == pytest.approx(2 * plan["static_replica_hours"])
    said = simulate("--trace", str(trace), "--plan", "--price", "2").stdout
    assert "1 replicas attain" in said


def test_tables_and_pictures(trace: Path, tmp_path: Path) -> None:
    answer = simulate("--trace", str(trace), "--policy", "headrace,static", "--pictures", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert "headrace" in answer.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"pareto_tiny_30s.png", "run_tiny_30s.png"}


def test_what_prefix_affinity_is_worth(tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 2048, "output_length": 9, "hash_ids": [0, i % 5, 10 + i % 5, 20 + i]}
        for i in range(60)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    answer = simulate("--trace", str(file), "--prefixes", "--replicas", "2", "--caches", "0,100000", "--json")
    assert answer.returncode == 0, answer.stderr
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [(row["placement"], row["cache_tokens"]) for row in found[:3]] == [
        ("none", 0),
        ("affinity", 0),
        ("hashing", 0),
    ]
    assert len(found) == 6
    assert all(0 < row["hit_share"] <= row["best_share"] for row in found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "steady", "--prefixes"], "hash_ids"),
        (["--trace", "/nonexistent.csv"], "cannot be read"),
        (["--trace", "steady", "--policy", "wizard"], "wizard"),
        (["--trace", "steady", "--floors", "x"], "--floors"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_exits_with_2(arguments: list[str], said: str) -> None:
    answer = simulate(*arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
