"""Random clients, steps and faults for the vLLM connector. All used and saved bytes are compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hicache.integrations.vllm.scheduler import SchedulerSide
from tests.seeds import rng, seeds

from .test_vllm_connector import IgnoresFailures, NeverFlushes
from .vllm_driver import Engine, engine_on
from .vllm_parts import Request, Worker

pytestmark = pytest.mark.long

STEPS = 120


class DescribesPromptsOnly(SchedulerSide):
    """Does not describe the pages that it saves, only those that it reads from storage."""

    def _save(self, *arguments: Any) -> None:
        blocks_of, self._blocks_of = self._blocks_of, None
        super()._save(*arguments)
        self._blocks_of = blocks_of


class Walk:
    """One random run, with options drawn from the seed, except for `fixed`."""

    def __init__(self, seed: int, folder: Path, **fixed: int) -> None:
        self.random = rng(seed)
        self.folder = folder
        draw = self.random
        ranks = draw.choice([1, 1, 2])
        self.layerwise = draw.random() < 0.4
        batches = draw.choice([1, 2])
        self.options: dict[str, Any] = {
            "blocks": draw.choice([14, 16, 20, 64]),
            "pages": draw.choice([6, 16, 64]),
            "page_blocks": draw.choice([1, 2, 3]),
            "ranks": ranks,
            "replicas": draw.choice([1, ranks]),
            "layerwise": self.layerwise,
            "batches": batches,
            "drafts": draw.choice([0, 0, 2]) if batches == 1 else 0,
            "budget": draw.choice([5, 16, 64]),
            "caching": draw.random() < 0.8,
            "event_bytes": draw.choice([1 << 26, 1 << 13]),  # the small stream has gaps
            "chance": draw,
        } | fixed
        self.faults = draw.random() < 0.5
        # Only a forward with a layer-wise load can detect the failure during its run; it then computes garbage.
        self.garbage = self.layerwise and self.faults

    def run(self, kinds: tuple[type[SchedulerSide], type[Worker]] = (SchedulerSide, Worker)) -> None:
        for _ in range(2):  # the second engine finds the pages that the first one stored
            with engine_on(self.folder, f"vllm-walk-{os.getpid()}", kinds=kinds, **self.options) as engine:
                engine.garbage_allowed = self.garbage
                # Under faults and preemptions, a few of a thousand accounts differ from the driver's numbers.
                engine.compares_accounts = False
                for _ in range(STEPS):
                    self.action(engine)
                    if self.random.random() < 0.2:
                        engine.pages_on_host(self.new_request(engine))
                        engine.check_events()
                for worker in engine.workers:
                    worker.failing.clear()

    def action(self, engine: Engine) -> None:
        draw = self.random
        live = [one for one in engine.requests.values() if one.status != "finished"]
        action = draw.choices(
            ["step", "add", "abort", "hold", "release", "fault", "forget", "reset", "clear"],
            [60, 20, 4, 8, 6, 4 if self.faults else 0, 2, 1, 1],
        )[0]
        if action == "step":
            engine.step()
        elif action == "add" and len(live) < 6:
            engine.add(self.new_request(engine))
        elif action == "abort" and live:
            engine.abort(draw.choice(live))
        elif action == "hold":
            engine.hold(draw.choice(["load", "save"]))
        elif action == "release":
            engine.release(*draw.choice([("load",), ("save",), ("load", "save")]))
        elif action == "fault":
            draw.choice(engine.workers).failing = set(draw.choice([(), ("load",), ("save",)]))
        elif action == "forget" and not engine.running:
            engine.forget_device()
        elif action == "reset":
            engine.reset(weights=draw.random() < 0.3 and not engine.queue)
        elif action == "clear":
            engine.scheduler.new_weights()

    def new_request(self, engine: Engine) -> Request:
        draw = self.random
        common = draw.choice([0, 1, 2])
        tokens = [common] * draw.randint(1, 20) + [draw.randrange(3) for _ in range(draw.choice([0, 0, 1, 8]))]
        return engine.request(
            tokens, draw.choice([1, 5, 9, 18]), salt=draw.choice(["", "", "s"]),
            adapter=draw.choice([None, None, None, "one 1", "two 1"]),
            skip_reading_prefix_cache=draw.random() < 0.05,
        )


@pytest.mark.parametrize("seed", seeds(4))
def test_a_random_run_uses_no_wrong_byte_and_leaks_nothing(seed: int, tmp_path: Path) -> None:
    Walk(seed, tmp_path).run()


# With few blocks, requests are preempted often.
@pytest.mark.parametrize(
    ("kind", "fixed"),
    [(NeverFlushes, {"blocks": 14, "pages": 64}), (IgnoresFailures, {}), (DescribesPromptsOnly, {"page_blocks": 2})],
)
def test_random_runs_detect_a_broken_connector(
    kind: type[SchedulerSide], fixed: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"wrong"):
        for seed in range(100):  # one seed in four or five detects it
            Walk(seed, tmp_path / str(seed), **fixed).run((kind, Worker))
