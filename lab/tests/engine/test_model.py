"""The forward: correct (compared with a float64 reference) and exact (equal bits for any division of the work)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hicache.errors import CapacityError, InvalidInput
from hicache.tiers import RequestToTokenPool
from hicache_lab.engine import TILE, LlamaModel, Span
from lab.tests.engine.reference import reference_logits
from lab.tests.engine.world import TINY, Device, random_tensors, random_tokens

LENGTH = 4 * TILE + 5
TOKENS = random_tokens(LENGTH, seed=1)
PAGE_SIZES = [1, TILE // 2, TILE, 4 * TILE]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def whole() -> tuple[torch.Tensor, torch.Tensor]:
    """Return KV bytes and last logits of `TOKENS`, computed in one forward."""
    device = Device()
    row = device.row(LENGTH)
    logits = device.forward(row, TOKENS)
    return device.kv(row, LENGTH), logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [1, TILE - 1, TILE, TILE + 1, LENGTH])
def test_logits_equal_those_of_a_plain_forward_over_the_whole_prompt(length: int, tied: bool) -> None:
    config = dataclasses.replace(TINY, tied_embeddings=tied, rope_theta=500.0)
    tensors = random_tensors(config)
    device = Device(config, tensors=tensors)
    logits = device.forward(device.row(length), TOKENS[:length])
    expected = reference_logits(config, tensors, TOKENS[:length])[-1]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


def test_weights_may_be_stored_in_bfloat16() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(TINY).items()}
    device = Device(tensors=tensors)
    logits = device.forward(device.row(LENGTH), TOKENS)
    torch.testing.assert_close(logits.double(), reference_logits(TINY, tensors, TOKENS)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_page_size_does_not_change_a_bit(page_size: int, whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    device = Device(page_size=page_size, pages=-(-LENGTH // page_size))
    row = device.row(LENGTH, shuffle=page_size)
    logits = device.forward(row, TOKENS)
    assert same_bits(device.kv(row, LENGTH), whole[0]) and same_bits(logits, whole[1])


@pytest.mark.parametrize("cut", [1, TILE - 1, TILE, TILE + 1, 3 * TILE + 1, LENGTH - 1])
def test_a_cached_prefix_does_not_change_a_bit(cut: int, whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    device = Device(page_size=1, pages=LENGTH)
    row = device.row(LENGTH)
    device.forward(row, TOKENS[:cut])
    logits = device.forward(row, TOKENS[cut:], start=cut)
    assert same_bits(device.kv(row, LENGTH), whole[0]) and same_bits(logits, whole[1])


def test_decoding_and_prefill_give_equal_bits_at_every_position() -> None:
    device, fresh = Device(), Device()
    row = device.row(LENGTH)
    for position, token in enumerate(TOKENS):
        logits = device.forward(row, [token], start=position)
        other = fresh.row(position + 1)
        assert same_bits(logits, fresh.forward(other, TOKENS[: position + 1]))
        assert same_bits(device.kv(row, position + 1), fresh.kv(other, position + 1))
        fresh.pool.allocator.free(fresh.rows.table[other, : position + 1 : 16].numpy() // 16)
        fresh.rows.free(other)


def test_other_requests_in_the_batch_do_not_change_a_bit(whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    device = Device()
    lengths = [1, 3 * TILE, LENGTH, TILE + 3]
    rows = [device.row(length, shuffle=length) for length in lengths]
    others = [random_tokens(length, seed=length + 100) for length in lengths]
    prompts = [others[0], others[1], TOKENS, others[3]]
    # The others decode or continue while ours is computed in two parts.
    device.model.forward([Span(rows[1], 0, prompts[1][:20]), Span(rows[2], 0, TOKENS[:37])])
    logits = device.model.forward(
        [
            Span(rows[0], 0, prompts[0]),
            Span(rows[1], 20, prompts[1][20:]),
            Span(rows[2], 37, TOKENS[37:]),
            Span(rows[3], 0, prompts[3]),
        ]
    )
    assert same_bits(device.kv(rows[2], LENGTH), whole[0]) and same_bits(logits[2], whole[1])


@pytest.mark.parametrize("cut", [1, TILE, LENGTH - 1])
def test_the_content_of_unused_pages_does_not_change_a_bit(cut: int, whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    device = Device()
    device.poison()
    device.rows.table.fill_(device.pool.pages)  # stale slots, as an earlier request of the row leaves them
    row = device.row(LENGTH, shuffle=7)
    device.forward(row, TOKENS[:cut])
    logits = device.forward(row, TOKENS[cut:], start=cut)
    assert same_bits(device.kv(row, LENGTH), whole[0]) and same_bits(logits, whole[1])


def test_the_caller_s_threads_do_not_change_a_bit(whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            device = Device()
            row = device.row(LENGTH)
            logits = device.forward(row, TOKENS)
            assert same_bits(device.kv(row, LENGTH), whole[0]) and same_bits(logits, whole[1])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_changed_kv_changes_the_logits(whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    # The negative control of the tests above: the forward does read what is cached.
    for layer in range(TINY.layers):
        device = Device()
        row = device.row(LENGTH)
        device.forward(row, TOKENS[:-1])
        device.pool.get_kv_buffer(layer)[0][device.place(row, slice(3, 4))] += 1.0
        assert not same_bits(device.forward(row, TOKENS[-1:], start=LENGTH - 1), whole[1])


def test_a_narrow_kv_dtype_rounds_once_for_all_readers() -> None:
    device = Device(dtype="bfloat16")
    first, second = device.row(LENGTH), device.row(LENGTH)
    logits = device.forward(first, TOKENS)
    device.forward(second, TOKENS[:40])
    again = device.forward(second, TOKENS[40:], start=40)
    assert same_bits(device.kv(first, LENGTH), device.kv(second, LENGTH)) and same_bits(logits, again)
    expected = reference_logits(TINY, random_tensors(TINY), TOKENS)[-1]
    torch.testing.assert_close(logits.double(), expected, rtol=0.2, atol=0.2)


def test_a_forward_rejects_invalid_input_and_computes_nothing() -> None:
    device = Device()
    row = device.row(LENGTH)
    good, before = Span(row, 0, TOKENS), device.kv(row, LENGTH)
    for bad in (Span(row, 0, []), Span(row, -1, [1]), Span(row, 0, [TINY.vocab_size]), Span(row, 0, [-1])):
        with pytest.raises(InvalidInput):
            device.model.forward([good, bad])
    with pytest.raises(CapacityError, match="position"):
        device.model.forward([good, Span(row, TINY.context_tokens - 1, [1, 1])])
    assert torch.equal(device.kv(row, LENGTH), before)


def test_a_model_rejects_pools_that_do_not_fit() -> None:
    device = Device()
    with pytest.raises(InvalidInput, match="layers"):
        LlamaModel(dataclasses.replace(TINY, layers=3), {}, device.pool, device.rows)
    with pytest.raises(InvalidInput, match="multiple"):
        LlamaModel(TINY, {}, device.pool, RequestToTokenPool(1, TILE + 1))
