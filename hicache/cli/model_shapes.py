"""The KV of models: the geometries of well-known ones, and the bytes per token of a `config.json` of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..arguments import model_label
from ..config.files import open_regular
from ..errors import ConfigError
from ..geometry import DTYPE_BYTES, KVGeometry, KVLayout

# A configuration has a few KiB.
_FILE_BYTES_MAX = 1 << 20
_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One model on one rank. `heads` are the rank's KV heads (MLA: 1; `head_dim` is then latent and rotary dims)."""

    description: str
    layers: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    layout: KVLayout = KVLayout.MHA
    tp_size: int = 1

    def geometry(self, page_size: int) -> KVGeometry:
        """Return the geometry of its pages."""
        return KVGeometry(self.layers, self.heads, self.head_dim, page_size, self.dtype, self.layout)


# Shapes from the models' published config.json files.
PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        description="no real model: so little KV that a laptop replays real traces", layers=4, heads=1, head_dim=8
    ),
    "qwen2.5-7b": Preset(description="Qwen2.5-7B: 28 layers, 4 KV heads of 128", layers=28, heads=4, head_dim=128),
    "llama-3.1-8b": Preset(description="Llama-3.1-8B: 32 layers, 8 KV heads of 128", layers=32, heads=8, head_dim=128),
    "llama-3.1-70b-tp8": Preset(
        description="Llama-3.1-70B on 8 ranks: 80 layers, 1 of 8 KV heads of 128",
        layers=80, heads=1, head_dim=128, tp_size=8,
    ),
    "llama-3.1-70b": Preset(
        description="Llama-3.1-70B: 80 layers, 8 KV heads of 128", layers=80, heads=8, head_dim=128
    ),
    "qwen3-8b": Preset(description="Qwen3-8B: 36 layers, 8 KV heads of 128", layers=36, heads=8, head_dim=128),
    "qwen3-32b": Preset(description="Qwen3-32B: 64 layers, 8 KV heads of 128", layers=64, heads=8, head_dim=128),
    "gpt-oss-20b": Preset(description="gpt-oss-20b: 24 layers, 8 KV heads of 64", layers=24, heads=8, head_dim=64),
    "gpt-oss-120b": Preset(description="gpt-oss-120b: 36 layers, 8 KV heads of 64", layers=36, heads=8, head_dim=64),
    "deepseek-v3": Preset(
        description="DeepSeek-V3 (MLA): 61 layers, a latent of 512 and 64 rotary dims",
        layers=61, heads=1, head_dim=576, layout=KVLayout.MLA,
    ),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's name, and the KV bytes of one token in all layers."""

    name: str
    token_bytes: int


def model_shape(named: str, dtype: str | None = None, *, ranks: int = 1) -> ModelShape:
    """Return the shape of one of the models of `hicache replay`, or of the `config.json` at a path (the file or its
    folder), on one of `ranks` that share its KV heads. `dtype` is that of the KV cache: by default the file's, or
    bfloat16. Raises ConfigError."""
    known = PRESETS.get(named.lower())
    if known is not None:
        return _shape(named, replace(known, dtype=dtype or known.dtype).geometry(1), ranks)
    path = Path(named, "config.json") if Path(named).is_dir() else Path(named)
    data = _read(path)
    try:
        return _shape(model_label(str(path.absolute().parent)), _geometry(json.loads(data), dtype), ranks)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(f"model {named[:200]!r}: its configuration does not describe attention; name one of "
                          f"{', '.join(PRESETS)}") from error


def _shape(name: str, geometry: KVGeometry, ranks: int) -> ModelShape:
    # Ranks beyond the number of heads have copies of them; those of MLA have equal latents.
    return ModelShape(name, replace(geometry, heads=max(1, geometry.heads // ranks)).token_bytes)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"model {str(path)[:200]!r}: is neither a file that can be read nor one of "
                          f"{', '.join(PRESETS)}") from error


def _geometry(model: Mapping[str, Any], dtype: str | None) -> KVGeometry:
    """Return the geometry of a configuration with the entries of transformers. Others raise builtin errors."""
    model = model.get("text_config") or model  # the language model of one that also reads images
    layers = model["num_hidden_layers"]
    own = model.get("dtype") or model.get("torch_dtype")
    dtype = dtype or (own if own in DTYPE_BYTES else _DTYPE)
    if model.get("kv_lora_rank"):
        return KVGeometry(layers, 1, model["kv_lora_rank"] + model["qk_rope_head_dim"], 1, dtype, KVLayout.MLA)
    heads = model["num_attention_heads"]
    size = model.get("head_dim") or model["hidden_size"] // heads
    return KVGeometry(layers, model.get("num_key_value_heads") or heads, size, 1, dtype)
