"""What a GGUF model is and can do, for the registry."""

from __future__ import annotations

from headrace.broker.models import LlamacppModel
from headrace.workers.engines.llamacpp_prompt import Prompts
from headrace.workers.engines.protocol import Capabilities, Details

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0",
}  # fmt: skip
"""`llama_ftype` of llama.h, which a file has as `general.file_type`."""


def capabilities(model: LlamacppModel, prompts: Prompts) -> Capabilities:
    """Of a model that is loaded."""
    vocab, template = prompts.vocab, prompts.template
    has_tools = template is not None and (template.knows_tools or prompts.grammars.has_llguidance)
    architecture = vocab.meta("general.architecture") or ""
    dimensions = int(vocab.meta(f"{architecture}.embedding_length") or 0)
    return Capabilities(
        slots=model.slots,
        context_tokens=model.context_tokens,
        tools=has_tools,
        constraints=prompts.grammars.kinds,
        reasoning=template is not None and template.thinking is not None,
        embeddings=dimensions if model.embeddings else 0,
        fim=vocab.fim is not None,
        details=Details(
            format="gguf",
            family=architecture,
            parameters=vocab.parameters,
            quantization=FILE_TYPES.get(int(vocab.meta("general.file_type") or -1), ""),
            size_bytes=vocab.size_bytes,
            context_tokens=vocab.context_tokens,
            vocabulary=len(vocab.tokens),
            bos=vocab.text(vocab.bos_id),
            eos=vocab.text(vocab.eos_id),
            chat_template=template.source if template is not None else "",
            digest=model.source.sha256 if model.source is not None else "",
        ),
        step_tokens=model.batch_tokens,
    )
