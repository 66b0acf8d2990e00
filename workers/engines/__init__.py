"""What makes the tokens. `protocol.py` is the contract, `make` builds the engine that a model's settings name."""

from __future__ import annotations

from headrace.broker.settings import LlamacppModel, Model
from headrace.workers.engines.protocol import Engine


def make(model: Model, data_dir: str) -> Engine:
    """The engine of a model, not loaded yet. Its package is imported only here, so others need not be installed."""
    if isinstance(model, LlamacppModel):
        from headrace.workers.engines.llamacpp import LlamacppEngine

        return LlamacppEngine(model, data_dir)
    from headrace.workers.engines.scripted import ScriptedEngine

    return ScriptedEngine(model)
