"""`python -m tests.fuzz.run TARGET SECONDS [CORPUS]`: look for bytes on which a target does not hold, by coverage.

What was found new is kept in the folder CORPUS, if there is one, and a finding is written beside it; exits with 0 if
there is none.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

WATCHED = ["headrace.api.wire", "headrace.api.body", "headrace.client", "headrace.workers"]
with atheris.instrument_imports(include=WATCHED):
    from headrace.api.openapi import BODIES
    from tests.fuzz import targets


def main() -> None:
    """Never returns: the fuzzer ends the process."""
    name, seconds, *rest = sys.argv[1:]
    target, seeds = targets.TARGETS[name]
    corpus = Path(rest[0] if rest else tempfile.mkdtemp(prefix="hr-fuzz-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = Path(tempfile.mkdtemp(prefix="hr-fuzz-")) / "words"
    words.write_text("".join(f'"{word}"\n' for word in sorted(_words())), "utf-8")
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", f"-dict={words}", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={corpus}/found-", str(corpus)], target)
    atheris.Fuzz()


def _words() -> set[str]:
    """The names of all fields, so that the search need not spell them."""
    import msgspec

    found: set[str] = {"data: ", "event: ", "id: ", "[DONE]", "\\\\ud800", "9223372036854775808", "1e999"}
    types = [body.type for body in BODIES.values()]
    _, components = msgspec.json.schema_components(types)
    for component in components.values():
        found |= {rf"\"{name}\":" for name in component.get("properties", {})}
    return found


if __name__ == "__main__":
    main()
