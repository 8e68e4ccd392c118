"""Reads a Llama checkpoint in Hugging Face format from a local folder. Downloads nothing and runs no code from it.

    config.json               architecture and sizes
    model.safetensors         all weights, or
    model.safetensors.index.json and the shards it names
    tokenizer.json            read by `load_tokenizer`, which the model itself does not need

Only the plain architecture is supported: without biases, without scaled rotary embedding, with SiLU. Any other
checkpoint is rejected, because a forward that ignores a setting computes wrong text that looks right.

One extension: with the entry `layer_types`, some layers may have a sliding window or a recurrent state (`LayerKind`)
instead of full attention.
"""

from __future__ import annotations

import enum
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import tokenizers
import torch

from hicache.errors import ConfigError
from hicache.fingerprint import loaded_fingerprint
from hicache.geometry import KVGeometry

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
# Far above any real config or index; a larger file is something else.
_JSON_BYTES_MAX = 64 << 20


class LayerKind(enum.StrEnum):
    """The part of a prefix that a layer reads, by its name in `layer_types`."""

    FULL = "full_attention"  # the KV of all tokens
    WINDOW = "sliding_attention"  # the KV of the last `sliding_window` tokens, including the query's own
    LINEAR = "linear_attention"  # a recurrent state, see `trailing`


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a Llama model, in this package's terms. Raises ConfigError for impossible sizes.

    `layer_types` has one kind for each layer; empty, all layers have full attention. At least one layer must have it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int  # positions the model was made for
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tied_embeddings: bool = False
    eos_tokens: frozenset[int] = frozenset()
    layer_types: tuple[LayerKind, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"):
            _require_positive(name, getattr(self, name))
        _require_positive("context_tokens", self.context_tokens)
        if self.heads % self.kv_heads:
            raise ConfigError(f"model: {self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"model: head_dim {self.head_dim} is odd; rotary embedding needs an even number")
        if not (self.rms_norm_eps > 0 and self.rope_theta > 0):
            raise ConfigError("model: rms_norm_eps and rope_theta must be positive")
        if len(self.kinds) != self.layers:
            raise ConfigError(f"model: layer_types has {len(self.kinds)} entries for {self.layers} layers")
        if not self.layers_of(LayerKind.FULL):
            raise ConfigError(
                f"model: layer_types has no '{LayerKind.FULL}', but a cache finds prefixes by the KV of such layers; "
                "use a model with at least one"
            )
        if bool(self.layers_of(LayerKind.WINDOW)) is not (self.sliding_window is not None):
            raise ConfigError(
                f"model: sliding_window is {self.sliding_window}, and {self.layers_of(LayerKind.WINDOW)} entries of "
                f"layer_types are '{LayerKind.WINDOW}'; give both or neither"
            )
        if self.sliding_window is not None:
            _require_positive("sliding_window", self.sliding_window)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return self.layer_types or (LayerKind.FULL,) * self.layers

    def layers_of(self, kind: LayerKind) -> int:
        """Return the number of layers of `kind`."""
        return self.kinds.count(kind)

    def geometry(self, page_size: int, dtype: str = "float32", kind: LayerKind = LayerKind.FULL) -> KVGeometry:
        """Return the KV geometry of the layers of `kind`, by default that of L1. The engine computes in float32, so
        `float32` keeps KV without rounding.
        """
        layers = self.layers_of(kind)
        return KVGeometry(layers=layers, heads=self.kv_heads, head_dim=self.head_dim, page_size=page_size, dtype=dtype)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that the checkpoint must have, by name; matrices are `[out, in]`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer, kind in enumerate(self.kinds):
            prefix = f"model.layers.{layer}"
            if kind is LayerKind.LINEAR:
                shapes[f"{prefix}.self_attn.decay_proj.weight"] = (self.kv_heads, hidden)
            shapes |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
                f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}.mlp.up_proj.weight": (inner, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, inner),
            }
        return shapes

    def scale_names(self, part: str) -> list[str]:
        """Return the names of the scales of K (`k`) or V (`v`), one per layer. A checkpoint has all of them or none."""
        return [f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(self.layers)]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint. `tensors` are on the CPU in the stored dtype, with the scales of KV if it has any.

    `fingerprint` is that of the folder (`loaded_fingerprint`). It is the `model` of the cache's namespace, so
    engines with different weights never share a page. `label` is its label, the folder.
    """

    config: LlamaConfig
    tensors: Mapping[str, torch.Tensor]
    fingerprint: str
    label: str = ""


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read configuration and weights from `folder`. Blocks. Reads a weight file twice if its digest is not in the
    user's cache.

    Raises ConfigError for a missing or broken file, another architecture, and tensors that are missing or have another
    shape than the configuration says.
    """
    began_ns = time.time_ns()
    config_path = folder / CONFIG_FILE
    config = parse_config(_read_json(config_path), config_path)
    files = _weight_files(folder)
    wanted = config.tensor_shapes()
    names = {*wanted, *config.scale_names("k"), *config.scale_names("v")}
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safetensors.safe_open(str(path), framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118  a handle of safetensors is not a mapping
                    if name in names:
                        tensors[name] = shard.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error
    _check_tensors(folder, tensors, wanted)
    return Checkpoint(config, tensors, loaded_fingerprint(folder, began_ns), str(folder.resolve()))


def kv_scales(
    config: LlamaConfig, tensors: Mapping[str, torch.Tensor], kv_dtype: str
) -> tuple[list[float], list[float]]:
    """Return the scale of K and that of V of each layer: those of the checkpoint for KV in float8, else 1. Linear
    layers have no KV.

    Raises ConfigError if only some layers have scales, and for a scale that is not one positive number.
    """
    names = config.scale_names("k"), config.scale_names("v")
    if not kv_dtype.startswith("float8") or tensors.keys().isdisjoint(names[0] + names[1]):
        return [1.0] * config.layers, [1.0] * config.layers
    has_kv = [kind is not LayerKind.LINEAR for kind in config.kinds]
    keys, values = (
        [_scale(tensors, name) if has else 1.0 for has, name in zip(has_kv, some, strict=True)] for some in names
    )
    return keys, values


def _scale(tensors: Mapping[str, torch.Tensor], name: str) -> float:
    if name not in tensors:
        raise ConfigError(f"model: {name} is missing, but other scales of KV are there; download the checkpoint again")
    value = tensors[name].tolist() if tensors[name].numel() != 1 else tensors[name].item()
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ConfigError(f"model: {name} is {value}; this engine supports one positive number per layer")
    return value


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer in `folder`. Raises ConfigError if it is missing or cannot be read."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a model folder holds {CONFIG_FILE}, weights and {TOKENIZER_FILE}")
    try:
        tokenizer: Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a plain Exception for a file that it cannot parse
        raise ConfigError(f"{path}: cannot be read as a tokenizer: {error}") from error
    return tokenizer


def parse_config(values: Mapping[str, Any], source: Path | str = CONFIG_FILE) -> LlamaConfig:
    """Return a Hugging Face configuration in this package's terms. Raises ConfigError for unsupported settings."""
    names = values.get("architectures") or []
    if values.get("model_type") != "llama" or "LlamaForCausalLM" not in names:
        raise ConfigError(
            f"{source}: model_type {values.get('model_type')!r} with architectures {names!r}; "
            "this engine only supports LlamaForCausalLM"
        )
    for name, only in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"), ("rope_scaling", None)):
        if values.get(name, only) != only:
            raise ConfigError(f"{source}: {name} is {values[name]!r}; this engine only supports {only!r}")
    heads = _integer(values, "num_attention_heads", source)
    hidden = _integer(values, "hidden_size", source)
    return LlamaConfig(
        vocab_size=_integer(values, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=_integer(values, "intermediate_size", source),
        layers=_integer(values, "num_hidden_layers", source),
        heads=heads,
        kv_heads=_integer(values, "num_key_value_heads", source, default=heads),
        head_dim=_integer(values, "head_dim", source, default=hidden // max(1, heads)),
        context_tokens=_integer(values, "max_position_embeddings", source, default=2048),
        rms_norm_eps=_number(values.get("rms_norm_eps", 1e-6), "rms_norm_eps", source),
        rope_theta=_rope_theta(values, source),
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        eos_tokens=_eos_tokens(values.get("eos_token_id"), source),
        **_layer_types(values, source),
    )


def _layer_types(values: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """Return `layer_types` and `sliding_window`. A window that no layer uses is left out."""
    names, window = values.get("layer_types"), values.get("sliding_window")
    if names is None:
        if window is not None:
            raise ConfigError(f"{source}: sliding_window is {window!r} without layer_types; this engine needs both")
        return {}
    known = list(LayerKind)
    if not isinstance(names, list) or not names or not all(name in known for name in names):
        raise ConfigError(f"{source}: layer_types is {names!r}; this engine only supports {', '.join(known)}")
    kinds = tuple(map(LayerKind, names))
    return {"layer_types": kinds, "sliding_window": window if LayerKind.WINDOW in kinds else None}


def _rope_theta(values: Mapping[str, Any], source: Path | str) -> float:
    # Newer files have one entry for all parameters of the rotary embedding.
    rope = values.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{source}: rope_parameters {rope!r}; this engine only supports rope_type 'default'")
    return _number(rope.get("rope_theta", values.get("rope_theta", 10000.0)), "rope_theta", source)


def _eos_tokens(value: Any, source: Path | str) -> frozenset[int]:
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in tokens):
        raise ConfigError(f"{source}: eos_token_id must be an integer or a list of them, got {value!r}")
    return frozenset(tokens)


def _integer(values: Mapping[str, Any], name: str, source: Path | str, *, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if type(value) is not int:
        raise ConfigError(f"{source}: {name} must be an integer, got {value!r}")
    return value


def _number(value: Any, name: str, source: Path | str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{source}: {name} must be a number, got {value!r}")
    return float(value)


def _require_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"model: {name} must be a positive integer, got {value!r}")


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files in a fixed order. Raises ConfigError if one is missing."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise ConfigError(f"{folder}: {WEIGHTS_FILE} and {INDEX_FILE} are missing; other formats are not supported")
    shard_of = _read_json(index_path).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ConfigError(f"{index_path}: has no weight_map; download the file again")
    files = []
    for name in sorted({str(name) for name in shard_of.values()}):
        # The index is untrusted: it may only name files in its own folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index_path}: {name!r} is not the name of a safetensors file in this folder")
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name}: no such file, but {INDEX_FILE} names it")
        files.append(folder / name)
    return files


def _check_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise ConfigError(
            f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]!r}; download it again"
        )
    for name, shape in wanted.items():
        found = tensors[name]
        if tuple(found.shape) != shape or not found.dtype.is_floating_point:
            raise ConfigError(
                f"{folder}: {name} is {found.dtype} {list(found.shape)}, but {CONFIG_FILE} makes it {list(shape)}"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {_JSON_BYTES_MAX} bytes; this is not a model's configuration")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a model folder holds {CONFIG_FILE} and weights") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return values
