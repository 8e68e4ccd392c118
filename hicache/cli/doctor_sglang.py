"""`hicache doctor --sglang`: the sizes in SGLang's flags, and the flags that HiCache's tree refuses or ignores.

Reads the flags as text; SGLang need not be installed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..config import DeviceConfig, HiCacheConfig
from ..integrations.sglang_tree.settings import flag, refused, without_effect
from ..units import format_size
from .doctor_machine import Figures, Row, Verdict
from .model_shapes import ModelShape, model_shape

# SGLang's other names of fields, and the abbreviations that its parser accepts.
_ALIASES = {
    "model": "model_path", "tp": "tp_size", "tensor_parallel_size": "tp_size", "pp": "pp_size",
    "pipeline_parallel_size": "pp_size", "dp": "dp_size", "data_parallel_size": "dp_size",
    "attention_data_parallel_size": "attn_dp_size", "attention_context_parallel_size": "attn_cp_size",
    "decode_context_parallel_size": "dcp_size", "enable_hicache": "enable_hierarchical_cache",
}
NUMBERS = {
    "page_size", "max_total_tokens", "tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size",
    "nnodes",
}
_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp8_e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3fn"}
_NUMBER_MAX = 10**12
# SGLang's default. The tree warns of pages that are shorter than the second number.
_PAGE_TOKENS, _PAGE_TOKENS_MIN = 1, 16


def parse_flags(text: str) -> dict[str, Any]:
    """Return the values of SGLang's flags by field: a number, text, or True for a flag without a value. Other words,
    such as the name of the program, are skipped. Raises click.UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--sglang: {error}") from error
    given: dict[str, Any] = {}
    field = None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            field = _ALIASES.get(name, name)
            given[field] = value if has_value else True
        elif field is not None and given[field] is True:
            given[field] = word
    for field in NUMBERS & given.keys():
        number = str(given[field])
        if not number.isdecimal() or not 0 < int(number) <= _NUMBER_MAX:
            raise click.UsageError(f"--sglang: {field}: {number[:40]!r} is not a number from 1 on")
        given[field] = int(number)
    return given


@dataclass(frozen=True, slots=True)
class SGLang:
    """What the flags `given` say. `attention_ranks` share the KV heads of a model, and `local_ranks` are the processes
    with an L2 each on this machine."""

    given: Mapping[str, Any]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._number("page_size", _PAGE_TOKENS)

    @property
    def attention_ranks(self) -> int:
        groups = self._number("attn_dp_size", self._number("dp_size") if self._has_dp_attention else 1)
        return max(1, self._number("tp_size") // groups)

    @property
    def local_ranks(self) -> int:
        copies = 1 if self._has_dp_attention else self._number("dp_size")
        return max(1, self._number("tp_size") * self._number("pp_size") * copies // self._number("nnodes"))

    @property
    def _has_dp_attention(self) -> bool:
        return "enable_dp_attention" in self.given

    def _number(self, field: str, default: int = 1) -> int:
        return int(self.given.get(field, default))

    def shape(self, model: str | None, dtype: str | None) -> ModelShape | None:
        """Return the KV of one rank: of `model`, or of SGLang's model if it is a local folder. None without one."""
        path = str(self.given.get("model_path", ""))
        if model is None and not (path and Path(path).exists()):
            return None
        own = _DTYPES.get(str(self.given.get("kv_cache_dtype")))
        return model_shape(model or path, dtype or own, ranks=self.attention_ranks)

    def applied(self, config: HiCacheConfig) -> HiCacheConfig:
        """Return `config` with SGLang's page size and L1, which replace the entries of the configuration."""
        device = DeviceConfig().model_copy(update={"tokens": self.given.get("max_total_tokens")})
        return config.model_copy(update={"page_size": self.page_size, "device": device})

    def rows(self, config: HiCacheConfig, shape: ModelShape | None) -> Iterator[Row]:
        """Judge the flags beside the configuration as it was written."""
        yield self._sizes(shape)
        for field, verdict, finding, advice in self._findings(config):
            yield Row(f"sglang {flag(field)}", verdict, finding, advice)
        for name, words in refused(self.given):
            yield Row(f"sglang {name}", Verdict.FAIL, "HiCache's tree refuses it", words)
        for name, words in without_effect(self.given):
            yield Row(f"sglang {name}", Verdict.WARN, "has no effect under HiCache's tree", words)

    def _findings(self, config: HiCacheConfig) -> Iterator[tuple[str, Verdict, str, str]]:
        size = self.page_size
        if "page_size" in config.model_fields_set and config.page_size != size:
            yield ("page_size", Verdict.FAIL, f"{size}, but page_size is {config.page_size} in the configuration",
                   "set both to the same number, or remove page_size")
        elif size < _PAGE_TOKENS_MIN:
            yield "page_size", Verdict.WARN, f"{size}, and each page is an object in storage", "use --page-size 64"
        if self.given.get("radix_cache_backend") != "hicache":
            yield ("radix_cache_backend", Verdict.WARN, "SGLang uses its own tree, for which these rows do not hold",
                   "add --radix-cache-backend hicache")
        if "enable_hierarchical_cache" not in self.given:
            yield ("enable_hierarchical_cache", Verdict.FAIL, "is not set: SGLang does not load from host memory",
                   "add --enable-hierarchical-cache")

    def _sizes(self, shape: ModelShape | None) -> Row:
        tokens, ranks = self.given.get("max_total_tokens"), self.local_ranks
        figures: Figures = {"page_size": self.page_size, "ranks": ranks, "l1_tokens": tokens}
        found = f"pages of {self.page_size} tokens, {ranks} rank{'s' if ranks > 1 else ''} on this machine"
        advice = ""
        if shape is not None:
            figures["token_bytes"] = shape.token_bytes
            found += f", {shape.token_bytes:,} bytes per token and rank"
        else:
            advice = "pass --model: SGLang's model is not a local folder"
        if tokens is None:
            found += "; SGLang computes the size of L1"
            advice = advice or "add the max_total_num_tokens of SGLang's log as --max-total-tokens"
        else:
            found += f", L1 of {tokens:,} tokens"
            if shape is not None:
                figures["l1"] = tokens * shape.token_bytes
                found += f" ({format_size(tokens * shape.token_bytes)} per rank)"
        return Row("sglang", Verdict.INFO, found, advice, figures)
