"""The models of a file are followed; nothing else of it is, and nothing that is wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace.broker.models_file import ModelsFile
from headrace.broker.settings import Settings, load

ONE = "models: [{name: a, engine: scripted}]\n"
TWO = "models: [{name: a, engine: scripted, slots: 9}, {name: b, engine: scripted}]\n"


def write(file: Path, text: str) -> None:
    """A new file in place of the old one, as editors and Kubernetes do it."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "headrace.yaml"
    write(file, ONE)
    return file


def follow(file: Path, **env: str) -> tuple[ModelsFile, Settings]:
    known = load(file, env)
    return ModelsFile(file, env, known), known


def test_new_models_are_told_once(file: Path) -> None:
    models, known = follow(file, HEADRACE_API__GRACE_S="3")
    assert models.changed() is None
    write(file, TWO)
    changed = models.changed()
    assert changed is not None
    assert [(model.name, model.slots) for model in changed.models] == [("a", 9), ("b", 8)]
    assert changed.api == known.api
    assert models.changed() is None


@pytest.mark.parametrize("text", ["models: [", "models: []", "models: [{name: a}]", ""])
def test_a_file_that_is_wrong_changes_nothing_until_it_is_right(
    file: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    models, _ = follow(file)
    write(file, text)
    assert models.changed() is None
    assert "the configuration has changed, but" in caplog.text
    file.unlink()
    assert models.changed() is None
    write(file, TWO)
    assert models.changed() is not None


def test_what_takes_a_restart_is_named_and_does_not_come_with_the_models(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models, known = follow(file)
    with caplog.at_level(logging.WARNING):
        write(file, ONE + "queue: {lease_s: 1.0}\napi: {port: 9000}\n")
        assert models.changed() is None
        assert "queue, api: takes effect with the next start" in caplog.text
        write(file, TWO + "queue: {lease_s: 1.0}\n")
        changed = models.changed()
    assert changed is not None and changed.queue == known.queue
