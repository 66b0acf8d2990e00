"""What makes the tokens. `protocol.py` is the contract, `make` builds the engine that a model's settings name."""

from __future__ import annotations

from headrace.broker.models import LlamacppModel, Model, RemoteModel, ScriptedModel, TransformersModel, VllmModel
from headrace.workers.engines.protocol import Engine


def make(model: Model, data_dir: str) -> Engine:
    """The engine of a model, not loaded yet. Its package is imported only here, so others need not be installed."""
    match model:
        case LlamacppModel():
            from headrace.workers.engines.llamacpp import LlamacppEngine

            return LlamacppEngine(model, data_dir)
        case VllmModel():
            from headrace.workers.engines.vllm import VllmEngine

            return VllmEngine(model, data_dir)
        case TransformersModel():
            from headrace.workers.engines.transformers import TransformersEngine

            return TransformersEngine(model, data_dir)
        case ScriptedModel():
            from headrace.workers.engines.scripted import ScriptedEngine

            return ScriptedEngine(model)
        case RemoteModel():
            from headrace.workers.engines.remote import RemoteEngine

            return RemoteEngine(model)
