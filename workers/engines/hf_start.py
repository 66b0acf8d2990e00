"""Loads a model with transformers, and compiles constraints for it; importing this module takes seconds."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.broker.errors import BadRequest, ConfigError, EngineFailed
from headrace.broker.messages import Constraint, Grammar, JsonObject, JsonSchema, Regex
from headrace.broker.models import TransformersModel
from headrace.workers.engines.chat_template import ChatTemplate
from headrace.workers.engines.hf_decode import Decoding
from headrace.workers.engines.hf_vocab import HfVocab
from headrace.workers.engines.protocol import Capabilities, Details, Generation


class Loaded(NamedTuple):
    """What there is between `load` and `close`."""

    model: Any
    vocab: HfVocab
    template: ChatTemplate | None
    compiler: Any

    def decoding(self, generation: Generation) -> Decoding:
        """A sequence that is about to begin; raises BadRequest for a constraint that is wrong."""
        constraint = generation.job.constraint
        grammar = None if constraint is None else compiled(self.compiler, constraint)
        return Decoding(self.model, self.vocab, generation, grammar)


def start(model: TransformersModel, folder: str) -> Loaded:
    """Blocks until the weights are loaded."""
    if model.threads:
        torch.set_num_threads(model.threads)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=model.revision or "main")
        weights = AutoModelForCausalLM.from_pretrained(folder, revision=model.revision or "main", dtype=model.dtype)
        weights = weights.to(model.device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineFailed(f"transformers cannot load {folder}: {' '.join(str(error).split())[:300]}") from error
    limit = int(getattr(weights.config, "max_position_embeddings", 0))
    if 0 < limit < model.context_tokens:
        raise ConfigError(
            f"models: {model.name}: context_tokens is {model.context_tokens}, but the model was made for {limit}"
        )
    ends = weights.generation_config.eos_token_id
    ends = {*([ends] if isinstance(ends, int) else ends or ()), tokenizer.eos_token_id} - {None}
    vocab = HfVocab(tokenizer, weights.config.vocab_size, ends)
    return Loaded(weights, vocab, vocab.chat_template(model), xgrammar.GrammarCompiler(vocab.info))


def capabilities(model: TransformersModel, loaded: Loaded) -> Capabilities:
    """What a loaded model is and can do, for the registry."""
    config, template = loaded.model.config, loaded.template
    return Capabilities(
        slots=model.slots,
        context_tokens=model.context_tokens,
        constraints=("json", "grammar", "regex"),
        details=Details(
            format="safetensors",
            family=str(config.model_type),
            parameters=int(loaded.model.num_parameters()),
            quantization=str(loaded.model.dtype).removeprefix("torch."),
            context_tokens=int(getattr(config, "max_position_embeddings", 0)),
            vocabulary=len(loaded.vocab.tokens),
            bos=loaded.vocab.bos,
            eos=loaded.vocab.eos,
            chat_template=template.source if template is not None else "",
            digest=model.source.sha256 if model.source is not None else "",
        ),
    )


def compiled(compiler: Any, constraint: Constraint) -> Any:
    try:
        match constraint:
            case JsonObject():
                return compiler.compile_json_schema('{"type": "object"}')
            case JsonSchema(schema):
                return compiler.compile_json_schema(schema)
            case Regex(pattern):
                return compiler.compile_regex(pattern)
            case Grammar(gbnf):
                return compiler.compile_grammar(gbnf)
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[-1][:300]
        raise BadRequest(f"this constraint cannot be kept: {first}", param="response_format") from error
