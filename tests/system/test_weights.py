"""`tests/weights` needs torch and vLLM, which have an interpreter of their own: it is run there, as one test."""

from __future__ import annotations

import os
import subprocess

from tests.system.conftest import MODELS, REPO, VLLM_PYTHON, need_vllm


def test_every_engine_keeps_the_contract_on_real_weights() -> None:
    need_vllm()
    # The warnings of torch and its like are not ours to mend.
    command = [str(VLLM_PYTHON), "-m", "pytest", "tests/weights", "-o", "filterwarnings=default", "--durations=10"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=REPO,
        env={**os.environ, "HEADRACE_TEST_DATA": str(MODELS.parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
