"""Several engines on one store, in separate processes. No process remains, however the replay ends."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.config import HostConfig
from hicache.errors import ConfigError, HiCacheError
from hicache_lab.replay.job import ReplayJob
from hicache_lab.replay.processes import Children, InProcess, start_engines
from hicache_lab.speeds import ComputeSpeed, Speeds
from lab.tests.replay.world import job, request, rounds, small_config
from tests.waiting import is_running

pytestmark = pytest.mark.long

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _children_find_the_sources(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repository))


def file_job(directory: Path, *, prompts: int = 8, times: int = 2, **options: Any) -> ReplayJob:
    config = small_config(
        storage="file", device=2048, host=8192,
        **{"storage.options.path": str(directory / "pages"), "storage.options.free_space_floor": "0"},
    )
    # Slow enough that what one engine stores is there when another asks for it.
    return job(
        directory, rounds(prompts, times), config, running_max=1, waiting_max=1,
        speeds=Speeds(compute=ComputeSpeed(tokens_per_s=100_000)), **options,
    )


def test_several_processes_cannot_have_a_share_of_memory(tmp_path: Path) -> None:
    one = file_job(tmp_path, processes=2)
    config = one.config.model_copy(update={"host": HostConfig(size="12.5%")})
    with pytest.raises(ConfigError, match=r"replay: host\.size: .* with 2 processes write a size"):
        start_engines(replace(one, config=config))


def test_two_processes_share_a_store_and_their_results_are_one(tmp_path: Path) -> None:
    # An odd number of prompts, so that each prompt comes to both.
    with closing(start_engines(file_job(tmp_path, prompts=9, times=4, processes=2))) as engines:
        *_, last = engines.run()
        result = engines.result()
    assert isinstance(engines, Children)
    assert result.requests.ended == last.requests == 36
    assert result.wrong_bytes == 0
    assert result.complete
    assert result.setup.processes == 2
    assert result.tokens.hits["storage"] > 0
    assert result.scheduler is not None and result.scheduler.request_cpu.count == 36


def test_an_interrupted_replay_has_a_result_of_all_processes(tmp_path: Path) -> None:
    one = file_job(tmp_path, times=1000, processes=2, whole_trace_each=True)
    with closing(Children(one)) as engines:
        pids = [child.process.pid for child in engines._children]
        sample = next(sample for sample in engines.run() if sample.requests > 2)
        result = engines.result()
    assert not result.complete
    assert sample.requests <= result.requests.ended < 16_000
    assert result.wrong_bytes == 0
    assert not any(map(is_running, pids))


def test_an_error_of_a_process_is_raised_and_ends_the_others(tmp_path: Path) -> None:
    one = replace(file_job(tmp_path, processes=2), trace=tmp_path / "missing.jsonl")
    with (
        pytest.raises(HiCacheError, match=r"process [01]: trace .*missing\.jsonl: cannot be read"),
        closing(Children(one)) as engines,
    ):
        pids = [child.process.pid for child in engines._children]
        list(engines.run())
    assert not any(map(is_running, pids))


def test_a_process_that_is_killed_is_an_error_and_ends_the_others(tmp_path: Path) -> None:
    one = file_job(tmp_path, times=1000, processes=2, whole_trace_each=True)
    with pytest.raises(HiCacheError, match="process 0 ended early, exit code -9"), closing(Children(one)) as engines:
        pids = [child.process.pid for child in engines._children]
        os.kill(pids[0], signal.SIGKILL)
        list(engines.run())
    assert not any(map(is_running, pids))


def test_a_process_ends_when_its_parent_has_ended(tmp_path: Path) -> None:
    job_file = tmp_path / "job"
    job_file.write_bytes(pickle.dumps(file_job(tmp_path, times=1000)))
    parent = (
        "import pickle, sys; from pathlib import Path; from hicache_lab.replay.processes import Children\n"
        "engines = Children(pickle.loads(Path(sys.argv[1]).read_bytes())); next(engines.run())\n"
        "print(engines._children[0].process.pid, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, str(job_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        ended = os.pidfd_open(pid)
        try:
            assert is_running(pid)
            process.kill()
            assert select.select([ended], [], [], WAIT_S)[0], "it still runs"
        finally:
            os.close(ended)


def test_one_job_runs_in_this_process(tmp_path: Path) -> None:
    one = job(tmp_path, [request(0, [1])], small_config(storage=None))
    with closing(start_engines(one)) as engines:
        assert isinstance(engines, InProcess)
        list(engines.run())
        assert engines.result().requests.ended == 1
