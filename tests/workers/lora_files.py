"""Tiny LoRA adapters for the default model, written by hand: as PEFT and as llama.cpp lay them out.

Both touch the query projection of every layer with numbers that are the same each time, large enough to be heard.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

WIDTH, LAYERS, RANK = 576, 30, 4
_F32, _STRING, _GGUF_F32, _ALIGN = 6, 8, 0, 32


def matrices(layer: int, scale: float) -> tuple[Matrix, Matrix]:
    """A (rank x in) and B (out x rank)."""
    random = np.random.default_rng(layer)
    a = random.standard_normal((RANK, WIDTH)).astype(np.float32)
    return a, (scale * random.standard_normal((WIDTH, RANK))).astype(np.float32)


def write_peft(folder: Path, scale: float) -> Path:
    """A folder as PEFT saves it."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    tensors = {}
    for layer in range(LAYERS):
        for word, matrix in zip("AB", matrices(layer, scale), strict=True):
            tensors[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{word}.weight"] = matrix
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors))
    return folder


def _safetensors(tensors: dict[str, Matrix]) -> bytes:
    header, data = {}, b""
    for name, matrix in tensors.items():
        begin, data = len(data), data + matrix.tobytes()
        header[name] = {"dtype": "F32", "shape": list(matrix.shape), "data_offsets": [begin, len(data)]}
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def write_gguf(file: Path, scale: float) -> Path:
    """A GGUF file; its dimensions stand the other way round."""
    values: list[tuple[str, int, bytes]] = [
        ("general.architecture", _STRING, _text("llama")),
        ("general.type", _STRING, _text("adapter")),
        ("adapter.type", _STRING, _text("lora")),
        ("adapter.lora.alpha", _F32, struct.pack("<f", RANK)),
    ]
    infos, data = b"", b""
    for layer in range(LAYERS):
        for word, matrix in zip("ab", matrices(layer, scale), strict=True):
            infos += _text(f"blk.{layer}.attn_q.weight.lora_{word}") + struct.pack("<I", 2)
            infos += struct.pack("<QQIQ", matrix.shape[1], matrix.shape[0], _GGUF_F32, len(data))
            data += matrix.tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, 2 * LAYERS, len(values))
    head += b"".join(_text(key) + struct.pack("<I", kind) + value for key, kind, value in values) + infos
    file.write_bytes(head + bytes(-len(head) % _ALIGN) + data)
    return file


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
