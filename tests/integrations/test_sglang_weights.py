"""The watch over the weights of an SGLang engine, tested without SGLang."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache.integrations.sglang_tree import weights
from hicache.integrations.sglang_tree.weights import WeightsWatch, _pieces

DTYPES = [
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool,
    torch.int64, torch.complex64,
]
# Elements of each tensor that a test changes.
TRIES = 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use pieces of 64 bytes, so that a small tensor has several."""
    monkeypatch.setattr(weights, "_WORDS_MAX", 16)


class Model(torch.nn.Module):
    """Tensors of the kinds that models have."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator)

        self.weight = torch.nn.Parameter(numbers(13, 11))
        self.other = torch.nn.Parameter(numbers(13, 11))
        self.tied = self.weight
        self.transposed = torch.nn.Parameter(numbers(13, 11).t())
        self.with_gaps = torch.nn.Parameter(numbers(13, 200)[2:, 3:190:2])
        self.empty = torch.nn.Parameter(numbers(0, 5))
        self.scale = torch.nn.Parameter(numbers(1)[0], requires_grad=False)
        for number, dtype in enumerate(DTYPES):
            # Not whole words, at an offset that is not one.
            self.register_buffer(f"buffer{number}", (100 * numbers(35)).to(dtype)[1:])

    def tensors(self) -> dict[str, torch.Tensor]:
        named = itertools.chain(self.named_parameters(), self.named_buffers())
        return {name: tensor.detach() for name, tensor in named}


NAMES = [name for name, tensor in Model().tensors().items() if tensor.numel()]


def watch(model: torch.nn.Module, **options: Any) -> WeightsWatch:
    return WeightsWatch(lambda: [model], lambda: "version", **options)


def flip(tensor: torch.Tensor, index: tuple[int, ...]) -> None:
    """Flip one bit of an element."""
    element = tensor[index].reshape(1).clone()
    element.view(torch.uint8)[0] ^= 1
    tensor[index] = element[0]


def test_weights_that_were_written_again_have_not_changed() -> None:
    """The negative control of the other tests."""
    model = Model()
    watched = watch(model)
    assert not watched.changed()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.weight.data = model.weight.detach().clone()  # at another address
    assert not watched.changed()


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_of_any_tensor_is_reported_once(name: str) -> None:
    model, choose = Model(), random.Random(7)
    tensor = model.tensors()[name]
    watched = watch(model)
    for _ in range(TRIES):
        flip(tensor, tuple(choose.randrange(size) for size in tensor.shape))
        assert watched.changed()
        assert not watched.changed()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "scale"])
def test_two_swapped_elements_of_a_tensor_are_a_change(name: str) -> None:
    model = Model()
    tensor = model.tensors()[name]
    first, last = (0,) * tensor.dim(), tuple(size - 1 for size in tensor.shape)
    if tensor[first] == tensor[last]:
        flip(tensor, last)
    watched = watch(model)
    tensor[first], tensor[last] = tensor[last].clone(), tensor[first].clone()
    assert watched.changed()


def test_swapped_tensors_are_a_change() -> None:
    model = Model()
    watched = watch(model)
    model.weight.data, model.other.data = model.other.data, model.weight.data
    assert watched.changed()


def test_pieces_that_move_within_a_tensor_are_a_change() -> None:
    model = torch.nn.Linear(16, 8, bias=False)  # a row is a piece
    watched = watch(model)
    model.weight.data = model.weight.detach()[[1, 0, *range(2, 8)]]
    assert watched.changed()


def test_new_weights_in_place_are_a_change_and_so_is_another_name_for_the_same_ones() -> None:
    model, version = Model(), ["first"]
    watched = WeightsWatch(lambda: [model], lambda: version[0])
    model.weight.data.copy_(torch.ones(13, 11))
    assert watched.changed()
    version[0] = "second"
    assert watched.changed()
    assert not watched.changed()


def test_another_shape_type_tie_or_model_is_a_change() -> None:
    model = Model()
    watched = watch(model)
    changes: list[Callable[[], object]] = [
        lambda: setattr(model.weight, "data", model.weight.detach().view(11, 13)),
        lambda: setattr(model.weight, "data", model.weight.detach().view(torch.int32).view(torch.float32).t()),
        lambda: setattr(model, "empty", torch.nn.Parameter(torch.empty(0, 6))),
        lambda: setattr(model, "tied", torch.nn.Parameter(model.weight.detach().clone())),
        lambda: model.register_buffer("buffer5", model.tensors()["buffer5"].view(torch.int8)),
        lambda: model.add_module("draft", torch.nn.Linear(1, 1)),
    ]
    for change in changes:
        change()
        assert watched.changed()
    assert not watched.changed()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (64,), (7, 9), (2, 3, 50), (1, 1, 40, 30)])
def test_pieces_are_all_bytes_of_any_view_and_none_is_larger_than_its_limit(shape: tuple[int, ...]) -> None:
    count = int(torch.tensor(shape).prod())
    whole = torch.arange(count, dtype=torch.int64).view(shape)
    views = [whole, whole[..., ::3], whole.expand(3, *shape)] if shape else [whole]
    views += [view.permute(order) for view in views[1:] for order in itertools.permutations(range(view.dim()))]
    for view in views:
        pieces = list(_pieces(view))
        assert all(len(piece) <= 64 for piece in pieces)
        found = torch.cat(pieces).view(torch.int64)
        assert sorted(found.tolist()) == sorted(view.reshape(-1).tolist())


def test_weights_that_may_be_unmapped_are_not_touched_and_always_new() -> None:
    class Unmapped(torch.nn.Module):
        def named_parameters(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the weights were touched")

    watched = watch(Unmapped(), readable=False)
    assert watched.changed() and watched.changed()
    with pytest.raises(AssertionError):
        watch(Unmapped())


def test_a_tensor_without_memory_of_its_own_is_always_new(caplog: pytest.LogCaptureFixture) -> None:
    watched = watch(torch.nn.Linear(2, 2, device="meta"))
    assert watched.changed() and watched.changed()
    assert "weight has no memory of its own" in caplog.text
