"""One scheduler process with a `HostCache`, and worker processes that copy: tokens are equal also if a worker is slow,
fails or dies."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.seeds import rng, seeds
from tests.waiting import wait_for
from tests.workers.engine import Request, State
from tests.workers.model import RankModel
from tests.workers.worker import BreakNextCopy, Hold
from tests.workers.world import (
    HOST_PAGES,
    SHAPE,
    SHARED_PAGES,
    World,
    expected_tokens,
    make_prompts,
    started,
    whole_pages,
)

pytestmark = pytest.mark.long

PROMPTS = make_prompts(1)
OTHER = make_prompts(2)[0]
PIECES = SHAPE.layers * SHAPE.blocks_per_page  # of one rank in a page


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output for request in requests]


def hits(requests: list[Request]) -> list[int]:
    return [request.hit_pages for request in requests]


@pytest.mark.parametrize(("ranks", "hashed_keys"), [(1, True), (2, True), (4, True), (2, False)])
def test_tokens_are_equal_computed_from_l2_and_from_storage_after_a_restart(
    tmp_path: Path, ranks: int, hashed_keys: bool
) -> None:
    expected = [expected_tokens(prompt) for prompt in PROMPTS]
    reusable = [whole_pages(prompt) for prompt in PROMPTS]
    with started(tmp_path, ranks, hashed_keys=hashed_keys) as world:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            (cold,) = world.serve(prompt)
            assert cold.output == tokens
        world.drop_blocks()
        warm = world.serve(*PROMPTS)
        assert outputs(warm) == expected and hits(warm) == reusable
    with started(tmp_path, ranks, hashed_keys=hashed_keys) as world:
        restarted = world.serve(*PROMPTS)
        assert outputs(restarted) == expected and hits(restarted) == reusable


def test_an_engine_with_a_device_cache_loads_the_pages_behind_its_own(tmp_path: Path) -> None:
    with started(tmp_path, 2, keeps_pages=True) as world:
        world.serve(*PROMPTS)
        world.drop_blocks()
        world.serve(PROMPTS[0])
        requests = world.serve(*PROMPTS)
        own = [request.device_pages for request in requests]
        assert own == [whole_pages(PROMPTS[0]), SHARED_PAGES, SHARED_PAGES]
        assert hits(requests) == [whole_pages(prompt) - pages for prompt, pages in zip(PROMPTS, own, strict=True)]
        assert outputs(requests) == [expected_tokens(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("rank", [0, 1])
def test_zeroed_frames_change_the_tokens(tmp_path: Path, rank: int) -> None:
    """The negative control of all tests of equal tokens. Zeroes only one rank's part of the frames."""
    with started(tmp_path, 2) as world:
        world.serve(*PROMPTS)
        world.drop_blocks()
        world.host.buffer[:, world.host.piece_slice(rank * PIECES, PIECES)] = 0
        for request in world.serve(*PROMPTS):
            assert request.hit_pages == whole_pages(request.prompt)
            assert request.output != expected_tokens(request.prompt)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_frame_has_the_blocks_of_all_ranks_in_the_order_rank_block_layer(tmp_path: Path, ranks: int) -> None:
    with started(tmp_path, ranks) as world:
        world.serve(OTHER)
        load = world.cache.begin_load("reading", world.engine.key(OTHER), 0, 1)
        assert load is not None
        found = bytes(world.host.payload(int(load.host_pages[0])))
        world.cache.end_load(load, None)
        world.cache.abort("reading")
    blocks = range(SHAPE.blocks_per_page)
    models = [RankModel(SHAPE, rank, ranks, len(blocks)) for rank in range(ranks)]
    for model in models:
        model.forward(OTHER[: SHAPE.page_tokens], 0, blocks)
    parts = [kv[:, block].numpy().tobytes() for model in models for block in blocks for kv in model.kv]
    assert found == b"".join(parts)


def test_a_worker_imports_neither_tree_nor_cache_nor_storage(tmp_path: Path) -> None:
    above = ("radix", "cache", "controller", "backends", "events", "metrics")
    with started(tmp_path, 1) as world:
        loaded = {name.split(".")[1] for name in world.ready[0].modules}
    assert "tiers" in loaded and not loaded & set(above)


def test_pages_of_a_slow_write_stay_invisible_and_other_requests_are_not_delayed(tmp_path: Path) -> None:
    with started(tmp_path, 2) as world:
        engine = world.engine
        engine.workers.send(Hold(True), 1)
        slow = world.submit(PROMPTS[0])
        wait_for(lambda: engine.copying_ranks == {1}, engine.step)
        other, again = world.submit(OTHER), world.submit(PROMPTS[0])
        wait_for(lambda: other.answered and again.answered and engine.copying_ranks == {1}, engine.step)
        assert slow.state is State.WRITING
        assert again.hit_pages == 0 and world.pages_on_host(PROMPTS[0]) == 0
        engine.workers.send(Hold(False), 1)
        engine.run(slow, other, again)
        assert world.pages_on_host(PROMPTS[0]) == whole_pages(PROMPTS[0])
        world.drop_blocks()
        (warm,) = world.serve(PROMPTS[0])
        assert warm.hit_pages == whole_pages(PROMPTS[0])
        assert outputs([slow, again, warm]) == [expected_tokens(PROMPTS[0])] * 3
        assert other.output == expected_tokens(OTHER)


def test_a_slow_load_on_one_worker_delays_only_requests_with_that_prefix(tmp_path: Path) -> None:
    with started(tmp_path, 2) as world:
        engine = world.engine
        world.serve(PROMPTS[0])
        world.drop_blocks()
        engine.workers.send(Hold(True), 1)
        slow = world.submit(PROMPTS[0])
        wait_for(lambda: engine.copying_ranks == {1}, engine.step)
        other, behind = world.submit(OTHER), world.submit(PROMPTS[1])
        wait_for(lambda: other.answered, engine.step)
        assert (slow.state, behind.state) == (State.LOADING, State.WAITING)
        engine.workers.send(Hold(False), 1)
        engine.run(slow, other, behind)
        assert hits([slow, other, behind]) == [whole_pages(PROMPTS[0]), 0, SHARED_PAGES]
        assert outputs([slow, other, behind]) == [expected_tokens(each.prompt) for each in (slow, other, behind)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_computed_and_later_loads_work(tmp_path: Path, rank: int) -> None:
    with started(tmp_path, 2) as world:
        world.serve(PROMPTS[0])
        free_pages = world.host.allocator.free_pages
        for failed, pages in ((1, 0), (1, whole_pages(PROMPTS[0]))):
            world.drop_blocks()
            if pages == 0:
                world.engine.workers.send(BreakNextCopy(), rank)
            (request,) = world.serve(PROMPTS[0])
            assert request.output == expected_tokens(PROMPTS[0])
            assert (request.hit_pages, world.engine.failed_copies) == (pages, failed)
        assert world.host.allocator.free_pages == free_pages


@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_fails_on_one_rank_stays_invisible_and_later_writes_work(tmp_path: Path, rank: int) -> None:
    with started(tmp_path, 2) as world:
        for failed, pages in ((1, 0), (1, whole_pages(PROMPTS[0]))):
            if pages == 0:
                world.engine.workers.send(BreakNextCopy(), rank)
            (request,) = world.serve(PROMPTS[0])
            assert request.output == expected_tokens(PROMPTS[0])
            assert (request.hit_pages, world.engine.failed_copies) == (0, failed)
            assert world.pages_on_host(PROMPTS[0]) == pages
            assert world.host.allocator.free_pages == HOST_PAGES - pages
        world.drop_blocks()
        (warm,) = world.serve(PROMPTS[0])
        assert warm.output == expected_tokens(PROMPTS[0]) and warm.hit_pages == whole_pages(PROMPTS[0])


@pytest.mark.parametrize("state", [State.LOADING, State.WRITING])
def test_a_worker_that_dies_during_a_copy_is_replaced_and_tokens_are_equal(tmp_path: Path, state: State) -> None:
    with started(tmp_path, 2, keep_pool=True) as world:
        engine = world.engine
        if state is State.LOADING:
            world.serve(PROMPTS[0])
        free_pages = world.host.allocator.free_pages
        engine.workers.send(Hold(True), 1)
        request = world.submit(PROMPTS[0])
        wait_for(lambda: request.state is state and engine.copying_ranks == {1}, engine.step)
        running = world.submit(OTHER)
        os.kill(engine.workers.processes[1].pid or 0, signal.SIGKILL)
        wait_for(lambda: engine.lost_workers == 1, engine.step)
        assert engine.failed_copies == 1
        assert world.host.allocator.free_pages == free_pages
        assert world.pages_on_host(PROMPTS[0]) == (whole_pages(PROMPTS[0]) if state is State.LOADING else 0)
        world.replace_workers()
        engine.run(request, running)
        again = world.serve(PROMPTS[0], OTHER)
        assert outputs([request, running, *again]) == 2 * [expected_tokens(PROMPTS[0]), expected_tokens(OTHER)]
        world.drop_blocks()
        warm = world.serve(PROMPTS[0], OTHER)
        assert outputs(warm) == outputs(again)
        assert hits(warm) == [whole_pages(PROMPTS[0]), whole_pages(OTHER)]


def disturb(world: World, chance: random.Random) -> None:
    """Slow, break or kill a worker, clear the cache, or do nothing."""
    workers, rank = world.engine.workers, chance.randrange(2)
    match chance.choices(("nothing", "hold", "go on", "break", "clear", "kill"), (30, 5, 10, 4, 1, 1))[0]:
        case "hold":
            workers.send(Hold(True), rank)
        case "go on":
            workers.send(Hold(False))
        case "break":
            workers.send(BreakNextCopy(), rank)
        case "clear":
            world.cache.clear()
        case "kill":
            lost_workers = world.engine.lost_workers
            workers.processes[rank].kill()
            wait_for(lambda: world.engine.lost_workers > lost_workers, world.engine.step)
            world.replace_workers()


@pytest.mark.parametrize("seed", seeds(6))
def test_random_traffic_with_evictions_and_slow_failing_and_dying_workers_makes_equal_tokens(
    tmp_path: Path, seed: int
) -> None:
    chance = rng(seed)
    prompts = [prompt for group in range(3) for prompt in make_prompts(chance.randrange(1 << 30))]
    expected = [expected_tokens(prompt) for prompt in prompts]
    # Both tiers are too small for all prompts.
    with started(tmp_path, 2, host_pages=20, keep_pool=True, keeps_pages=seed % 2 == 1, blocks=40) as world:
        requests: list[tuple[int, Request]] = []
        for _ in range(50):
            number = chance.randrange(len(prompts))
            requests.append((number, world.submit(prompts[number])))
            disturb(world, chance)
            for _ in range(chance.randrange(6)):
                world.engine.step()
        world.engine.workers.send(Hold(False))
        world.engine.run(*(request for _, request in requests))
        assert [request.output for _, request in requests] == [expected[number] for number, _ in requests]
        # In the traffic, a slow machine may have no hits. A copy that is to break may still be outstanding.
        wait_for(lambda: world.pages_on_host(prompts[0]) > 0, lambda: world.serve(prompts[0]))
        wait_for(lambda: hits(world.serve(prompts[0]))[0] > 0, world.drop_blocks)
