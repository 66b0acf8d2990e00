"""A Dockerfile, read just far enough to run its commands somewhere else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """One instruction: `RUN`, `COPY`, ... and what follows it, on one line."""

    word: str
    rest: str


def stages(file: Path) -> dict[str, list[Step]]:
    """The instructions of each stage, by its name; those before the first stage are under ''."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text("utf-8"), flags=re.M)
    text = re.sub(r"\\\n\s*", "", text)
    found: dict[str, list[Step]] = {"": []}
    current = found[""]
    for line in text.splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            current = found.setdefault(rest.rpartition(" AS ")[2], [])
        current.append(Step(word, rest.strip()))
    return found


def command_of(steps: list[Step], word: str) -> list[str]:
    """The last `CMD`, `ENTRYPOINT` or `HEALTHCHECK`, as a list of words."""
    [*_, last] = [step.rest for step in steps if step.word == word]
    command: list[str] = json.loads(last[last.index("[") :])
    return command
