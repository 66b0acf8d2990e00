"""The chaos run in short: streams through a deployment that is killed, paused and cut off, each checked to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _chaos(*options: str) -> dict[str, object]:
    """Run it; it must find nothing."""
    ran = subprocess.run(
        [sys.executable, "bench/chaos.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return summary


def test_every_text_is_whole_whatever_is_killed() -> None:
    summary = _chaos("--streams", "60", "--faults", "20", "--seed", "1")
    assert summary["violations"] == 0
    assert "lost" not in summary and len(summary["faults"]) == 10  # type: ignore[arg-type]


def test_no_text_is_wrong_when_the_server_loses_the_end_of_its_log() -> None:
    summary = _chaos("--streams", "40", "--faults", "13", "--seed", "3", "--lost-tail")
    assert summary["violations"] == 0
    assert summary["faults"]["lose_tail"] >= 2  # type: ignore[index]
