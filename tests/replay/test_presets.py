"""The geometries of known models, compared with published or computed numbers."""

from __future__ import annotations

import pytest

from hicache.replay.presets import PRESETS

KIB = 1024
# KV bytes per token of one rank: 2 x layers x KV heads x head dim x 2 bytes, or layers x (512 + 64) x 2 for MLA.
KV_BYTES = {
    "tiny": 128,
    "qwen2.5-7b": 56 * KIB,
    "llama-3.1-8b": 128 * KIB,
    "llama-3.1-70b-tp8": 40 * KIB,
    "llama-3.1-70b": 320 * KIB,
    "qwen3-8b": 144 * KIB,
    "qwen3-32b": 256 * KIB,
    "gpt-oss-20b": 48 * KIB,
    "gpt-oss-120b": 72 * KIB,
    "deepseek-v3": 70_272,
}


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_token_has_as_many_bytes_as_in_the_model(name: str) -> None:
    assert PRESETS[name].geometry(64).token_bytes == KV_BYTES[name]


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_page_is_made_of_whole_words_at_every_page_size(name: str) -> None:
    assert all(PRESETS[name].geometry(size).block_bytes % 8 == 0 for size in (1, 16, 64, 256))


def test_different_models_have_different_namespaces() -> None:
    assert len({preset.namespace(name, 64).digest for name, preset in PRESETS.items()}) == len(PRESETS)
