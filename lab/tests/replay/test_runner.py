"""Replays through tiers that are far too small, and the detection of wrong bytes from each tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hicache.cli.model_shapes import PRESETS
from hicache.errors import ConfigError, InvalidInput
from hicache.frame import HEADER_BYTES
from hicache.keys import RadixKey
from hicache_lab.clocks import ManualClock
from hicache_lab.replay.job import ReplayJob
from hicache_lab.replay.runner import Replay, namespace_of, start
from hicache_lab.replay.timing import Call
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.synthetic import synthetic_trace
from hicache_lab.traces.tokens import TokenSource
from lab.tests.replay.world import go, job, request, rounds, small_config, started, tiers
from tests.seeds import seeds

pytestmark = pytest.mark.long

ONE_AT_A_TIME = {"running_max": 1, "waiting_max": 1}


def hits(replay: Replay) -> tuple[int, int, int]:
    counts = replay.model.counts.hits
    return counts["device"], counts["host"], counts["storage"]


def test_a_repeated_prompt_comes_from_l1(tmp_path: Path) -> None:
    with started(job(tmp_path, rounds(1, 2), small_config(storage=None), **ONE_AT_A_TIME)) as replay:
        go(replay)
        # The last page of a prompt is computed, since the logits of its last token are wanted.
        assert hits(replay) == (960, 0, 0)
        assert replay.model.counts.computed_tokens == 1024 + 64
        result = replay.result()
        assert result.tokens.reasons == {"new": 960, "tail": 128}
        assert {reason: count for reason, count in result.samples[-1].computed_tokens.items() if count} == {
            "new": 960, "tail": 128}
        assert replay.model.counts.wrong.total() == 0


@pytest.mark.parametrize("storage", [None, "memory", "file"])
def test_pages_that_left_a_tier_come_from_the_next(tmp_path: Path, storage: str | None) -> None:
    """There are twice as many prompts as fit into the tier above the last one."""
    options = {"storage.options.path": str(tmp_path / "pages")} if storage == "file" else {}
    prompts = 4 if storage is None else 8
    config = small_config(storage=storage, device=2048, host=512 * prompts if storage else 8192, **options)
    with started(job(tmp_path, rounds(prompts, 2), config, **ONE_AT_A_TIME)) as replay:
        go(replay)
        result = replay.result()
    tokens = result.tokens
    assert tokens.hits["host" if storage is None else "storage"] == prompts * 960
    assert tokens.hits["device"] == 0
    assert tokens.computed == prompts * (1024 + 64)
    assert result.wrong_bytes == 0 and result.checked_bytes > 2 * prompts * 1024 * 128
    assert result.evicted_pages["device"] > 0
    assert (result.moved_bytes["storage_to_host"] > 0) == (result.evicted_pages["host"] > 0) == (storage is not None)


def test_requests_that_began_are_counted_once_and_others_not(tmp_path: Path) -> None:
    options = {"running_max": 1, "waiting_max": 4}
    with started(job(tmp_path, rounds(4, 1), small_config(storage=None), **options)) as replay:
        replay.step()
        assert replay.unfinished == 4
        assert (replay.model.counts.prompt_tokens, replay.model.counts.output_tokens) == (1024, 20)
        go(replay)
        assert (replay.model.counts.prompt_tokens, replay.model.counts.output_tokens) == (4096, 80)


def test_a_replay_is_complete_if_it_went_to_its_end(tmp_path: Path) -> None:
    one = job(tmp_path, rounds(1, 2), small_config(storage=None), **ONE_AT_A_TIME)
    with started(one) as replay:
        samples = replay.run()
        next(samples)
        assert not replay.result().complete
        list(samples)
        assert replay.result().complete


def test_the_next_turn_finds_the_pages_of_the_last_output(tmp_path: Path) -> None:
    trace = [request(0, [1, 2], tail=100, output=200), request(1, [1, 3, 4], output=5)]
    with started(job(tmp_path, trace, small_config(storage=None), **ONE_AT_A_TIME)) as replay:
        go(replay)
        # All whole pages of prompt and output; the output's last token has no KV.
        assert hits(replay) == ((612 + 199) // 64 * 64, 0, 0)
        assert replay.model.counts.seen_tokens == 812


@pytest.mark.parametrize("seed", seeds(3))
def test_a_synthetic_trace_through_tiers_far_too_small_has_no_wrong_byte(tmp_path: Path, seed: int) -> None:
    # Outputs are cut, because each of their tokens is a step, and each step is checked.
    trace = [replace(one, output_length=one.output_length % 16)
             for one in synthetic_trace(80, seed) if one.input_length < 15_000]
    config = small_config(device=16_384, host=32_768)
    with started(job(tmp_path, trace, config, running_max=6, prefill_tokens_max=2048)) as replay:
        go(replay)
        assert replay.ended == len(trace)
        assert replay.model.counts.wrong.total() == 0
        assert hits(replay)[0] > 0 and sum(hits(replay)[1:]) > 0, "only one tier was ever hit"
        assert sum(hits(replay)) + replay.model.counts.computed_tokens == replay.model.counts.prompt_tokens
        assert sum(hits(replay)) <= replay.model.counts.seen_tokens
        tokens = replay.result().tokens
        assert sum(tokens.reasons.values()) == tokens.computed + tokens.recomputed
        assert tokens.reasons["new"] > 0 and any(name.startswith("evicted.") for name in tokens.reasons)


def test_different_models_have_different_namespaces() -> None:
    assert len({namespace_of(name, 64).digest for name in PRESETS}) == len(PRESETS)


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "deepseek-v3"])
def test_a_model_of_each_layout_is_replayed_without_wrong_bytes(tmp_path: Path, preset: str) -> None:
    small = small_config(storage="memory", device=512, host=1024, page_size="16", prefetch__threshold_tokens="64")
    trace = [replace(one, input_length=100, hash_ids=one.hash_ids[:1]) for one in rounds(12, 2, output=3)]
    with started(replace(job(tmp_path, trace, small, **ONE_AT_A_TIME), preset=preset)) as replay:
        go(replay)
        assert replay.ended == 24
        assert hits(replay)[2] > 0
        assert replay.model.counts.wrong.total() == 0


def test_requests_are_not_preempted_while_evicted_pages_are_in_flight_to_l2(tmp_path: Path) -> None:
    """L1 is full with four requests and the pages of four earlier ones, so decoding must write those pages back."""
    trace = [request(i, [i], tail=320, output=200 if i >= 4 else 1) for i in range(8)]
    config = small_config(storage=None, device=2048, write_policy="write_back")
    waits = 0
    with started(job(tmp_path, trace, config, running_max=4)) as replay:
        while not replay.finished:
            before = replay.engine.statistics().preemptions
            replay.step()
            saving = replay.cache.writeback_pages
            waits += saving > 0
            assert not (saving and replay.engine.statistics().preemptions > before)
            assert replay.cache.drain(20)
        assert waits > 0
        assert replay.ended == 8
        assert replay.model.counts.wrong.total() == 0


@pytest.mark.parametrize(("length", "calls"), [(512, 1), (500, 1), (492, 0), (450, 0)])
def test_pages_are_allocated_only_at_page_boundaries(tmp_path: Path, length: int, calls: int) -> None:
    trace = [TraceRequest(0, 0, length, 20, (1,))]
    with started(job(tmp_path, trace, small_config(storage=None))) as replay:
        go(replay)
        assert replay.times.calls[Call.EXTEND].calls == calls
        assert replay.ended == 1


def test_a_request_that_never_fits_is_skipped_and_counted(tmp_path: Path) -> None:
    trace = [request(0, range(9)), request(1, [100]), request(2, [101], output=4000)]
    with started(job(tmp_path, trace, small_config(storage=None, device=4096))) as replay:
        go(replay)
        assert (replay.ended, replay.too_long) == (1, 2)


@pytest.mark.parametrize(("length", "output"), [(1, 0), (1, 1), (63, 1), (64, 1), (65, 0), (512, 2), (30, 100)])
def test_requests_of_every_length_end_with_the_kv_of_all_but_their_last_token(
    tmp_path: Path, length: int, output: int
) -> None:
    trace = [TraceRequest(i, 0, length, output, (7,)) for i in range(2)]
    with started(job(tmp_path, trace, small_config(storage=None), **ONE_AT_A_TIME)) as replay:
        go(replay)
        assert replay.ended == 2
        assert replay.model.counts.wrong.total() == 0
        assert hits(replay)[0] == (length - 1) // 64 * 64


def test_every_nth_request_is_replayed_and_the_tokens_are_as_in_the_whole_trace(tmp_path: Path) -> None:
    trace = [request(0, [1, 2], tail=100, output=200), request(1, [5]), request(2, [1, 3, 4], output=5)]
    config = small_config(storage=None)
    for share, ended in ((0, 2), (1, 1)):
        options = {**ONE_AT_A_TIME, "process": share, "processes": 2}
        with started(job(tmp_path, trace, config, **options)) as replay:
            go(replay)
            assert replay.ended == ended
            assert hits(replay)[0] == (768 if share == 0 else 0)


def test_with_a_speed_up_requests_arrive_at_their_time(tmp_path: Path) -> None:
    trace = [request(0, [1], at_ms=0), request(1, [2], at_ms=8000)]
    one, clock = job(tmp_path, trace, small_config(storage=None), speed_up=4), ManualClock()
    with started(one) as other:  # closed by the context: only its cache is used
        replay = Replay(other.cache, one, clock=clock)
        for _ in range(100):
            replay.step()
        assert (replay.ended, replay.unfinished, replay.finished) == (1, 0, False)
        clock.advance(1.99)
        replay.step()
        assert replay.unfinished == 0
        clock.advance(0.51)
        for _ in range(100):
            replay.step()
        assert replay.finished and replay.ended == 2
        assert replay.late_s == pytest.approx(0.5)


def test_run_replays_everything_and_reports_the_end(tmp_path: Path) -> None:
    with started(job(tmp_path, rounds(3, 3), small_config())) as replay:
        *_, last = replay.run()
        assert last.requests == 9
        assert (last.waiting, last.running, last.wrong_bytes) == (0, 0, 0)
        assert replay.series.samples[-1] == last
        assert tiers(replay).controller.idle


def test_an_abandoned_replay_frees_everything(tmp_path: Path) -> None:
    with started(job(tmp_path, rounds(20, 1), small_config(), prefill_tokens_max=64)) as replay:
        samples = replay.run()
        next(samples)
        assert replay.unfinished > 0
        samples.close()
    assert replay.unfinished == 0
    assert replay.cache.device.allocator.used_pages == tiers(replay).tree.device_evictable_pages


def test_a_bad_line_ends_the_replay_with_its_number(tmp_path: Path) -> None:
    one = job(tmp_path, rounds(2, 1), small_config(storage=None))
    assert one.trace is not None
    with one.trace.open("a") as lines:
        lines.write("no request\n")
    with started(one) as replay, pytest.raises(InvalidInput, match="line 3"):
        go(replay)


def test_a_failed_start_leaves_nothing_running(tmp_path: Path) -> None:
    config = small_config(storage=None)
    with pytest.raises(InvalidInput, match="unknown model"):
        start(ReplayJob(config=config, preset="gpt-9"))
    with pytest.raises(InvalidInput, match="cannot be read"):
        start(ReplayJob(config=config, trace=tmp_path / "missing"))
    with pytest.raises(ConfigError, match="not known"):
        start(ReplayJob(config=small_config(storage="nowhere")))


@pytest.mark.parametrize("device", ["banana", "meta", "mps", "cuda:", "cuda:-1", "CPU", "", "cpu\n"])
def test_an_unknown_device_is_rejected(device: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown device .*known: cpu, cuda, cuda:1"):
        ReplayJob(config=small_config(storage=None), device=device)


def test_a_replay_without_the_cache_or_with_other_keys_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="prefix_cache: a replay needs the prefix cache"):
        ReplayJob(config=small_config(storage=None, prefix_cache="false"))
    with pytest.raises(ConfigError, match="bigram_keys: a replay does not support them"):
        ReplayJob(config=small_config(storage=None, bigram_keys="true"))


def test_requests_account_for_all_time_of_the_scheduler(tmp_path: Path) -> None:
    with started(job(tmp_path, rounds(4, 3), small_config())) as replay:
        go(replay)
        total_ns = 1e9 * sum(total.cpu_s for total in replay.times.calls.values())
        assert replay.times.request_cpu.latency().total_us * 1000 == pytest.approx(total_ns, rel=1e-6)
        assert replay.times.calls[Call.FINISH].calls == 12 + replay.engine.statistics().preemptions


# Negative controls: each tier is made to lie, and the replay must say so.


@pytest.mark.parametrize("backend", ["FlippingBackend", "SwappingBackend"])
def test_wrong_bytes_from_storage_under_a_valid_seal_are_detected(tmp_path: Path, backend: str) -> None:
    config = small_config(storage=f"lab.tests.replay.lying:{backend}", device=2048, host=4096)
    with started(job(tmp_path, rounds(8, 2), config, **ONE_AT_A_TIME)) as replay:
        go(replay)
        assert hits(replay)[2] > 0
        assert replay.model.counts.wrong["storage"] > 0
        assert replay.model.counts.wrong["device"] == replay.model.counts.wrong["host"] == 0


def test_one_wrong_byte_on_l2_is_one_wrong_byte_in_the_report(tmp_path: Path) -> None:
    one = job(tmp_path, rounds(4, 2), small_config(storage=None, device=2048), **ONE_AT_A_TIME)
    with started(one) as replay:
        while replay.ended < 4:
            replay.step()
            assert replay.cache.drain(20)
        key = tiers(replay).tree  # every page of L2 that is in use now may come back
        assert key.host_pages == 4 * 16
        page = int(replay.cache.match_prefix(prompt_key(one)).node.host[0])  # type: ignore[index]
        tiers(replay).host.frame(page)[HEADER_BYTES + 5] ^= 1
        go(replay)
        assert replay.model.counts.wrong["host"] == 1
        # It is read once more when the request ends.
        assert replay.model.counts.wrong["own"] == 1


def prompt_key(one: ReplayJob) -> RadixKey:
    """Return the first prompt of a job's trace."""
    return RadixKey.of(TokenSource().take(next(one.requests_of_trace())).prompt)


def test_one_wrong_byte_on_l1_is_detected_at_the_next_hit_and_at_the_end(tmp_path: Path) -> None:
    one = job(tmp_path, rounds(1, 2), small_config(storage=None), **ONE_AT_A_TIME)
    with started(one) as replay:
        while replay.ended < 1:
            replay.step()
        page = int(replay.cache.match_prefix(prompt_key(one)).device_pages[3])
        replay.cache.device.blocks.layers[2][0][page, 9] ^= 1
        go(replay)
        assert replay.model.counts.wrong["device"] == 1
        assert replay.model.counts.wrong["own"] == 1
