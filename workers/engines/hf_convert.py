"""Makes a Hugging Face folder of a GGUF file: `python -m headrace.workers.engines.hf_convert <file> <folder>`.

A line `SHARE 0.5` says how far it is. The weights are dequantized to bfloat16; the tokenizer and the chat template come
from the file too.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(gguf: Path, folder: Path) -> None:
    _say(0.05)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    torch.set_num_threads(1)  # a second one gains nothing, and a server may be running beside
    _say(0.3)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=quantization)
    _say(0.75)
    # It is not quantized any more, whatever the file was; with these it would not be saved, or not be read.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    _say(0.85)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    _say(1.0)


def _say(share: float) -> None:
    sys.stdout.write(f"SHARE {share}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
