"""Fields that would change the answer and cannot be honoured: OpenAI's own, vLLM's, SGLang's and llama-server's.

A field that stands here is refused by name, unless it has one of the values that change nothing. Fields that are known
and only hint (`user`, `metadata`, `store`, `prompt_cache_key`, `prediction`, `cache_prompt`) are ignored, and so are
fields that nobody knows, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from headrace.api.body import decode_again
from headrace.broker.errors import BadRequest

HARMLESS: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # SGLang, and others that clients know
    "audio_data": (),
    "ebnf": (),
    "image_data": (),
    "input_embeds": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "reasoning": (),
    "regex": (),
    "separate_reasoning": (True,),
    "session_params": (),
    "stream_reasoning": (True,),
    "structural_tag": (),
    "thinking": (),
    "top_a": (0,),
    "video_data": (),
    # llama-server
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "id_slot": (-1,),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_keep": (0,),
    "n_predict": (),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "reasoning_budget": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "return_progress": (False,),
    "return_tokens": (False,),
    "samplers": (),
    "t_max_predict_ms": (0, -1),
    "timings_per_token": (False,),
    "top_n_sigma": (0, -1),
    "xtc_probability": (0,),
}


def checker(known: Collection[str], more: Mapping[str, tuple[object, ...]] = {}) -> Callable[[bytes], None]:
    """A check for a route that knows some of these fields, and refuses `more` than all have.

    It takes a body that was decoded once already, and raises BadRequest with the field's name.
    """
    harmless = {name: values for name, values in {**HARMLESS, **more}.items() if name not in known}
    decoder = msgspec.json.Decoder(msgspec.defstruct("Extras", [(name, Any, None) for name in harmless]))

    def check(body: bytes) -> None:
        extras = decode_again(decoder, body)
        for name, values in harmless.items():
            value = getattr(extras, name)
            if value is not None and value not in values:
                raise BadRequest(f"{name} is not supported by this server.", param=name)

    return check
