"""`integrity.verify: load`: damaged pages of L2 are computed again, and not loaded to L1."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from hicache.backends.base import Direction
from hicache.config import HiCacheConfig, load_config
from hicache.config.integrity import IntegrityConfig
from hicache.errors import ConfigError, InvalidInput
from hicache.frame import Compression, FrameCodec
from hicache.keys import RadixKey
from tests.cache.host_world import HostWorld
from tests.cache.world import GEOMETRY, NAMESPACE, StepClock, World, codec, every_hit, memory_backend, prompt
from tests.ranks import Exchange

KEY = prompt(1, 2, 3, 4)
VERIFIES = IntegrityConfig(verify="load")
PAYLOAD = 256  # where the payload of a frame begins


def on_host(config: HiCacheConfig | None = None, **parts: Any) -> World:
    """Return a world that has KEY, sealed, only on L2."""
    config = config or every_hit(integrity=VERIFIES)
    world = World(config=config, backend=memory_backend(), host_codec=codec, **parts)
    leave(world, KEY)
    return world


def leave(world: World, key: RadixKey) -> None:
    """Serve a prompt and evict it from L1, so that its pages are only on L2."""
    world.serve(f"leave {key.tokens[:4]!r}", key)
    world.leave_l1()


def flip(world: World | HostWorld, key: RadixKey, page: int, at: int = PAYLOAD) -> None:
    """Change a bit of a page on L2."""
    (node,) = [node for node in world.cache.tree.nodes() if not node.children and key.tokens.startswith(node.key)]
    assert node.host is not None
    world.host.frame(int(node.host[page]))[at] ^= 4


def verified(world: World | HostWorld) -> dict[str, int]:
    return {outcome: count for outcome, count in world.cache.statistics().verified_pages.items() if count}


def test_undamaged_frames_are_verified_and_loaded() -> None:
    world = on_host()
    assert world.serve("again", KEY).host_hit_tokens == 16
    assert verified(world) == {"sound": 4} and world.compared_pages == 4


def test_a_damaged_page_and_its_descendants_are_evicted_from_l2_and_computed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = on_host()
    flip(world, KEY, 2)
    assert world.serve("again", KEY).host_hit_tokens == 8
    assert verified(world) == {"sound": 2, "damaged": 1} and world.wrong_pages == 0
    world.settle()
    assert "failed verification (tag); it is removed" in caplog.text
    world.cache.evict(100)  # the computed pages have replaced the damaged ones
    assert world.serve("third", KEY).host_hit_tokens == 16
    assert verified(world)["damaged"] == 1


def test_without_the_option_a_damaged_frame_is_loaded() -> None:
    world = on_host(every_hit())
    flip(world, KEY, 2)
    assert world.serve("again", KEY).host_hit_tokens == 16
    assert world.wrong_pages == 1 and not verified(world)
    world.wrong_pages = 0


@pytest.mark.parametrize("at", [0, 60, 200, PAYLOAD + 8])
def test_a_damaged_header_is_found_too(at: int) -> None:
    world = on_host()
    flip(world, KEY, 0, at)
    assert world.serve("again", KEY).host_hit_tokens == 0
    assert verified(world) == {"damaged": 1}


def overwrite(world: World, page: int) -> None:
    """Overwrite the header and the payload of a page of KEY with zeros."""
    (node,) = [node for node in world.cache.tree.nodes() if node.host is not None]
    assert node.host is not None
    world.host.frame(int(node.host[page]))[:] = bytes(codec().frame_bytes)


@pytest.mark.parametrize("compression", [None, Compression()])
def test_pages_that_storage_has_already_or_compresses_are_sealed_too(compression: Compression | None) -> None:
    def of_store(epoch: int) -> FrameCodec:
        return FrameCodec(NAMESPACE.digest, GEOMETRY.payload_bytes, compression=compression)

    store, clock = type(memory_backend())(of_store(0)), StepClock()
    world = World(config=every_hit(integrity=VERIFIES), backend=store, host_codec=codec, clock=clock)
    leave(world, KEY)
    world.cache.clear()
    request = world.begin("without a prefetch", KEY)  # computes pages that are PRESENT in storage
    world.cache.cache_finished_req(request, KEY)
    world.leave_l1()
    overwrite(world, 3)
    assert world.serve("again", KEY).host_hit_tokens == 12
    assert verified(world) == {"sound": 3, "damaged": 1}
    world.cache.clear()
    assert world.serve("from storage", KEY).storage_hit_tokens == 16
    world.leave_l1()
    overwrite(world, 2)
    clock.advance(11)  # the last verification is not valid any more
    assert world.serve("once more", KEY).host_hit_tokens == 8


@pytest.mark.parametrize("whole", [False, True], ids=["payload", "header too"])
def test_a_damaged_page_is_not_stored_again_after_storage_has_lost_it(
    whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(config=every_hit(integrity=VERIFIES), backend=memory_backend(), host_codec=codec)
    world.serve("first", KEY)  # on L1 and L2
    world.settle()
    backend, keys = world.controller.backend, KEY.page_keys(4, b"", 0, 4)
    assert backend is not None and backend.delete(keys[2:], deadline=time.monotonic() + 30) == 2
    world.cache.tree.stored.forget([keys[3]])
    if whole:
        overwrite(world, 2)
    else:
        flip(world, KEY, 2)
    world.serve("second", KEY)  # stores it again
    world.settle()
    assert backend.batch_has(keys, deadline=time.monotonic() + 30) == [True, True, False, False]
    assert "failed verification" in caplog.text and verified(world)["damaged"] == 1
    assert world.cache.tree.host_pages == 0  # the copies on L2 are gone, those on L1 are used
    assert world.controller.gate.may(Direction.WRITE)


def test_the_frame_of_another_page_counts_as_damaged() -> None:
    world = on_host()
    leave(world, prompt(5, 6, 7, 8))
    nodes = [node for node in world.cache.tree.nodes() if node.host is not None]
    first, second = (node.host.tolist() for node in nodes if node.host is not None)
    world.host.frame(first[1])[:] = world.host.frame(second[1])
    for key in (KEY, prompt(5, 6, 7, 8)):
        world.serve(f"again {key.tokens[:4]!r}", key)
    assert verified(world) == {"sound": 5, "damaged": 1} and world.wrong_pages == 0


def test_a_request_without_a_verification_computes_its_pages() -> None:
    world = on_host()
    flip(world, KEY, 0)
    assert world.attempt("not verified", KEY).host_hit_tokens == 0
    assert world.cache.statistics().skipped["load_not_verified"] == 1


def test_a_verification_is_valid_for_ten_seconds() -> None:
    clock = StepClock()
    world = on_host(clock=clock)
    world.cache.prefetch_from_storage("a", KEY)
    world.arrive("a")
    clock.advance(11)
    assert not world.cache.check_prefetch_progress("a")
    world.arrive("a")
    assert world.attempt("a", KEY).host_hit_tokens == 16
    assert verified(world) == {"sound": 8}


def test_a_damaged_page_is_not_loaded_while_a_pin_keeps_it_on_l2_and_an_earlier_verification_is_valid() -> None:
    clock = StepClock()
    world = World(config=every_hit(integrity=VERIFIES), backend=memory_backend(), host_codec=codec, clock=clock)
    longer = prompt(1, 2, 3, 4, 5, 6)
    leave(world, longer)
    assert world.cache.pin(KEY.head(16), ttl_s=1000.0)
    assert world.serve("short", KEY).host_hit_tokens == 16
    world.leave_l1()
    (first,) = (node for node in world.cache.tree.nodes() if node.parent is not None and node.parent.parent is None)
    assert first.host is not None and first.proved_until_s > -math.inf
    world.host.frame(int(first.host[1]))[PAYLOAD] ^= 4
    assert world.serve("long", longer).host_hit_tokens == 4
    assert verified(world)["damaged"] == 1 and world.wrong_pages == 0


def test_pages_that_left_l1_after_a_verification_are_verified_too() -> None:
    clock = StepClock()
    world = on_host(clock=clock)
    world.serve("fork", prompt(1, 2, 9))  # the first two pages are on L1 again
    world.settle()
    clock.advance(11)
    world.cache.prefetch_from_storage("a", KEY)
    world.arrive("a")
    world.cache.evict(100)
    world.arrive("a")
    assert world.attempt("a", KEY).host_hit_tokens == 16


def test_pages_that_are_not_sealed_are_loaded_and_counted() -> None:
    world = World(config=every_hit(integrity=VERIFIES), host_codec=codec)  # without storage nothing is sealed
    leave(world, KEY)
    assert world.serve("again", KEY).host_hit_tokens == 16
    assert verified(world) == {"untagged": 4}


def test_requests_that_need_the_same_frames_share_one_verification() -> None:
    world = on_host()
    for rid in "abc":
        world.cache.prefetch_from_storage(rid, KEY)
    world.until(lambda: all([world.cache.check_prefetch_progress(rid) for rid in "abc"]))
    assert verified(world) == {"sound": 4}


def test_a_verification_of_a_cleared_tree_does_not_change_the_new_one() -> None:
    world = on_host()
    flip(world, KEY, 0)
    world.cache.prefetch_from_storage("a", KEY)
    assert not world.cache.check_prefetch_progress("a")
    world.cache.clear()
    world.arrive("a")
    assert world.host.allocator.used_pages == 0
    assert world.serve("a", KEY).storage_hit_tokens == 16


def test_frames_of_new_weights_are_verified_with_their_own_codec() -> None:
    world = on_host(open_storage=lambda epoch: memory_backend(epoch=epoch))
    world.cache.update_weights(3)
    world.until(lambda: world.controller.gate.storage is not None)
    leave(world, KEY)
    assert world.serve("again", KEY).host_hit_tokens == 16
    assert verified(world) == {"sound": 4}


def test_a_host_cache_does_not_offer_a_damaged_page() -> None:
    world = HostWorld(config=every_hit(integrity=VERIFIES), backend=memory_backend(), host_codec=codec)
    key = prompt(1, 2, 3, 4, tail=0)
    world.cache.lookup("w", key)
    world.write("w", key)
    world.cache.abort("w")
    world.settle()
    flip(world, key, 3)
    assert world.cache.lookup("a", key, 1).loading
    world.until(lambda: not world.cache.lookup("a", key, 1).loading)
    assert world.cache.lookup("a", key, 1).pages == 2
    assert world.cache.begin_load("a", key, 1, 4) is None
    load = world.begin_load("a", key, 1, 3)
    world.compare(key, load)
    world.cache.end_load(load, 0.001)
    assert verified(world) == {"sound": 3, "damaged": 1}
    world.cache.abort("a")


@pytest.mark.parametrize(("damaged", "offered"), [(0, 0), (2, 2)])
def test_damaged_pages_that_arrived_for_a_request_are_freed_before_its_end(damaged: int, offered: int) -> None:
    world = HostWorld(config=every_hit(integrity=VERIFIES), backend=memory_backend(), host_codec=codec)
    key = prompt(1, 2, 3, 4, tail=0)
    world.write("w", key)
    world.cache.abort("w")
    world.settle()
    world.cache.clear()
    assert world.prefetch("a", key)
    flip(world, key, damaged)
    assert world.cache.lookup("a", key).loading
    world.until(lambda: not world.cache.lookup("a", key).loading)
    assert world.cache.lookup("a", key).pages == offered
    if offered:
        world.cache.end_load(world.begin_load("a", key, 0, offered), 0.001)
        assert world.cache.statistics().hit_tokens["storage"] == offered * GEOMETRY.page_size
    world.step()
    assert world.cache.tree.host_pages == offered == world.host.allocator.used_pages
    world.cache.abort("a")


def test_a_host_cache_rejects_a_load_that_was_not_verified() -> None:
    world = HostWorld(config=every_hit(integrity=VERIFIES), backend=memory_backend(), host_codec=codec)
    key = prompt(1, 2, tail=0)
    world.write("w", key)
    world.settle()
    assert world.cache.begin_load("a", key, 0, 2) is None
    assert world.cache.statistics().skipped["load_not_verified"] == 1
    world.cache.abort("a")


def scrubbed(rate: int, **parts: Any) -> World:
    return on_host(every_hit(integrity=IntegrityConfig(scrub_rate=rate)), **parts)


def test_a_scrub_of_an_idle_cache_finds_damage_before_a_request() -> None:
    world = scrubbed(1 << 40)
    flip(world, KEY, 2)
    world.until(lambda: verified(world).get("damaged", 0) == 1)
    assert world.cache.peek(KEY).host_pages == 2
    assert world.serve("again", KEY).host_hit_tokens == 8  # without `verify: load` it does not wait for a verification
    assert world.wrong_pages == 0


def test_a_scrub_repeats_its_rounds_at_its_rate() -> None:
    clock = StepClock()
    world = scrubbed(codec().frame_bytes, clock=clock)  # one page per second
    leave(world, prompt(5, 6, 7, 8))
    for turn in range(1, 6):
        sound = 4 * turn
        world.until(lambda: verified(world).get("sound", 0) >= sound)  # noqa: B023
        for _ in range(50):
            world.step()
        assert verified(world) == {"sound": sound}
        clock.advance(4.1)


def test_if_a_page_is_also_on_l1_only_its_damaged_copy_is_evicted() -> None:
    world = World(
        config=every_hit(integrity=IntegrityConfig(scrub_rate=1 << 40)), backend=memory_backend(), host_codec=codec
    )
    world.serve("first", KEY)
    world.serve("longer", prompt(1, 2, 3, 4, 5, 6))
    world.settle()
    (node,) = [node for node in world.cache.tree.nodes() if node.parent is not None and node.parent.parent is None]
    assert node.host is not None
    world.host.frame(int(node.host[0]))[PAYLOAD] ^= 1
    world.until(lambda: verified(world).get("damaged", 0) == 1)
    assert world.cache.tree.host_pages == 2
    assert world.serve("again", KEY).device_hit_tokens == 16


def test_a_scrub_stops_for_a_request() -> None:
    clock = StepClock()
    world = on_host(every_hit(integrity=IntegrityConfig(verify="load", scrub_rate=1 << 40)), clock=clock)
    verifier = world.cache._verifier
    assert verifier is not None
    world.until(lambda: not verifier._running)
    clock.advance(11)
    proofs = [verifier._start(list(world.cache.tree.nodes()), scrubs=scrubs) for scrubs in (True, False)]
    verifier._prove(proofs[0], lambda wait_s=0.0: None)
    assert proofs[0].sound_pages < 4
    world.until(lambda: all(proof.until_s for proof in proofs))
    assert proofs[1].sound_pages == 4


def test_configurations_that_cannot_be_verified_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="pass host_codec"):
        World(config=every_hit(integrity=VERIFIES))
    (group,) = Exchange(1).ranks()
    with pytest.raises(InvalidInput, match="several ranks"):
        World(config=every_hit(integrity=VERIFIES), host_codec=codec, ranks=group)
    with pytest.raises(ConfigError, match="tag none cannot be verified"):
        load_config(None, environ={}, overrides={"integrity.verify": "load", "integrity.tag": "none"})
    encrypted = {"integrity.verify": "load", "storage_format.encryption_key_env": "KEY"}
    with pytest.raises(ConfigError, match="have no tag"):
        load_config(None, environ={}, overrides=encrypted)
