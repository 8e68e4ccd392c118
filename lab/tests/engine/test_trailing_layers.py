"""Layers with a window or a state: correct (compared with a float64 reference) and exact, as in the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hicache.errors import ConfigError, InvalidInput, InvariantError, TransferError
from hicache.tiers import FailedTransfer
from hicache_lab.engine import TILE, LlamaConfig, LlamaModel, Span, load_checkpoint
from hicache_lab.engine.checkpoint import parse_config
from lab.tests.engine.reference import reference_logits
from lab.tests.engine.test_checkpoint import HF_CONFIG, write_model
from lab.tests.engine.world import TINY, Device, mixed, random_tensors, random_tokens

LENGTH = 4 * TILE + 5
TOKENS = random_tokens(LENGTH, seed=1)
MODELS = [mixed("fw", 7), mixed("wfw", TILE + 3), mixed("fs"), mixed("sfws", 11)]


def name(value: object) -> str | None:
    return "-".join(kind[:3] for kind in value.kinds) if isinstance(value, LlamaConfig) else None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("length", [1, TILE, LENGTH])
@pytest.mark.parametrize("config", MODELS, ids=name)
def test_logits_equal_those_of_a_plain_forward_over_the_whole_prompt(config: LlamaConfig, length: int) -> None:
    device, tensors = Device(config, page_size=4), random_tensors(config)
    logits = device.forward(device.row(length), TOKENS[:length])
    expected = reference_logits(config, tensors, TOKENS[:length])[-1]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 4, 2 * TILE])
@pytest.mark.parametrize("config", [mixed("wfw", TILE + 3), mixed("sfws", 11)], ids=name)
def test_the_cuts_of_a_prompt_do_not_change_a_bit(config: LlamaConfig, page_size: int) -> None:
    device = Device(config, page_size=page_size, pages=4 * LENGTH)
    expected = device.forward(device.row(LENGTH), TOKENS)
    for step in (1, TILE - 1, 2 * TILE):
        # Other pages, in another order, and slots that have been used before.
        row = device.row(LENGTH, shuffle=step)
        for start in range(0, LENGTH, step):
            logits = device.forward(row, TOKENS[start : start + step], start)
        assert same_bits(logits, expected), step
        for pool in device.trailing.pools:
            pool.release(device.pages[row])
            pool.drop(device.pages[row])
        device.pool.allocator.free(device.pages[row])
        device.rows.free(row)


@pytest.mark.parametrize("config", MODELS, ids=name)
def test_other_requests_in_the_batch_do_not_change_a_bit(config: LlamaConfig) -> None:
    device = Device(config, page_size=4, pages=200)
    expected = device.forward(device.row(LENGTH), TOKENS)
    prompts = {device.row(LENGTH): TOKENS[::-1], device.row(LENGTH): TOKENS}
    for start, end in ((0, 30), (30, LENGTH)):
        for row in prompts:
            device.trailing.place(row, device.pages[row], start, end)
        logits = device.model.forward([Span(row, start, tokens[start:end]) for row, tokens in prompts.items()])
    assert same_bits(logits[1], expected)


def test_a_forward_that_failed_halfway_can_be_repeated() -> None:
    config = mixed("sf")
    device = Device(config, page_size=4)
    expected = device.forward(device.row(LENGTH), TOKENS)
    row = device.row(LENGTH)
    device.forward(row, TOKENS[:30])
    device.pool.loading = FailedTransfer(TransferError("the copy failed"))
    with pytest.raises(TransferError):  # in the layer after that of the state
        device.forward(row, TOKENS[30:50], 30)
    device.pool.loading = None
    device.forward(row, TOKENS[30:50], 30)
    assert same_bits(device.forward(row, TOKENS[50:], 50), expected)


@pytest.mark.parametrize("config", [mixed("fw", 7), mixed("fs")], ids=name)
def test_a_forward_waits_for_the_load_of_slots(config: LlamaConfig) -> None:
    device = Device(config, page_size=4)
    row = device.row(LENGTH)
    device.forward(row, TOKENS[:40])
    device.trailing.pools[0].pool.loading = FailedTransfer(TransferError("the copy failed"))
    with pytest.raises(TransferError):
        device.forward(row, TOKENS[40:], 40)


@pytest.mark.parametrize("config", [mixed("fw", 7), mixed("fs")], ids=name)
def test_changed_slots_change_the_logits(config: LlamaConfig) -> None:
    # The negative control of the tests above: the forward does read what is in the slots.
    device = Device(config, page_size=4)
    expected = device.forward(device.row(LENGTH), TOKENS[:61])
    row = device.row(LENGTH)
    device.forward(row, TOKENS[:60])
    slot = int(device.trailing.pools[0].slots(device.pages[row])[60 // 4 - 1])
    for layer in device.trailing.pools[0].pool.blocks.layers:
        layer[0].view(torch.float32)[slot] += 1.0
    assert not same_bits(device.forward(row, TOKENS[60:61], 60), expected)


def test_a_forward_without_slots_is_rejected() -> None:
    device = Device(mixed("fw", 7), page_size=4)
    row = device.row(LENGTH)
    device.trailing.pools[0].release(device.pages[row])
    device.trailing.pools[0].drop(device.pages[row][3:4])
    device.trailing.place(row, device.pages[row], 24, 40)
    with pytest.raises(InvariantError, match="window"):
        device.trailing.place(row, device.pages[row], 21, 40)  # needs the keys from position 15 on
    with pytest.raises(InvalidInput, match="TrailingLayers"):
        LlamaModel(mixed("fw", 7), {}, device.pool, device.rows)


FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def test_kinds_of_layers_are_read_from_the_configuration() -> None:
    assert parse_config(HF_CONFIG | {"layer_types": [FULL, WINDOW], "sliding_window": 9}) == parsed("fw", 9)
    assert parse_config(HF_CONFIG | {"layer_types": [LINEAR, FULL], "sliding_window": 9}) == parsed("sf")
    assert parse_config(HF_CONFIG | {"layer_types": [FULL, FULL]}).geometry(4).layers == 2
    assert parsed("fsw", 9).geometry(4).layers == 1


def parsed(kinds: str, window: int | None = None) -> LlamaConfig:
    config = mixed(kinds, window)
    values = HF_CONFIG | {"num_hidden_layers": config.layers, "layer_types": list(config.kinds)}
    return parse_config(values | {"sliding_window": window})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [FULL, "chunked_attention"]}, "only supports full_attention, sliding_attention"),
        ({"layer_types": FULL}, "only supports"),
        ({"layer_types": [FULL, {}]}, "only supports"),
        ({"layer_types": [FULL]}, "1 entries for 2 layers"),
        ({"layer_types": [LINEAR, WINDOW], "sliding_window": 9}, "at least one"),
        ({"layer_types": [FULL, WINDOW]}, "sliding_window is None"),
        ({"layer_types": [FULL, WINDOW], "sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"layer_types": [FULL, WINDOW], "sliding_window": "9"}, "sliding_window must be a positive integer"),
        ({"sliding_window": 9}, "without layer_types"),
    ],
)
def test_kinds_that_the_engine_cannot_compute_are_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(HF_CONFIG | changes)


def test_a_linear_layer_has_the_weights_of_its_decay(tmp_path: Path) -> None:
    decay, tensors = "model.layers.1.self_attn.decay_proj.weight", random_tensors(mixed("fs"))
    assert tensors.keys() - TINY.tensor_shapes().keys() == {decay}
    checkpoint = load_checkpoint(write_model(tmp_path, tensors, layer_types=[FULL, LINEAR]))
    assert torch.equal(checkpoint.tensors[decay], tensors[decay])
    with pytest.raises(ConfigError, match="decay_proj"):
        load_checkpoint(write_model(tmp_path, random_tensors(TINY), layer_types=[FULL, LINEAR]))
