"""A process that imports vLLM once, and forks a process for each engine. `EngineProcess` runs it.

An engine runs the named steps and ends; the answers of the steps are returned.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.engines import vllm_engine
from tests.engines.process import serve, shared_memory_of
from tests.waiting import wait_for

Steps = list[tuple[str, dict[str, Any]]]
# An engine starts and answers in 3 s on an idle machine.
_ENGINE_TIMEOUT_S = 300.0


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    import vllm.v1.engine.core  # noqa: PLC0415
    import vllm.v1.worker.cpu_worker  # noqa: F401, PLC0415

    return {"play": play}


def play(engine: dict[str, Any], steps: Steps) -> list[object]:
    """Run an engine with these arguments of `vllm.LLM` in a forked process."""
    _zeros().unlink(missing_ok=True)
    _import_model(Path(engine["model"]))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run, args=(engine, steps, theirs))
    child.start()
    theirs.close()  # so that the end of the child ends the wait
    with ours:
        try:
            if not ours.poll(_ENGINE_TIMEOUT_S):
                raise TimeoutError(f"the engine has not answered within {_ENGINE_TIMEOUT_S:g} s")
            answers: list[object] = ours.recv()
            child.join(_ENGINE_TIMEOUT_S)
        except EOFError:
            raise RuntimeError("the engine ended with an error; see the log") from None
        finally:
            left = shared_memory_of(child.pid or 0)  # empty if it has ended
            child.kill()
            child.join()
            for path in left:
                path.unlink(missing_ok=True)
    return answers


def _import_model(folder: Path) -> None:
    """Import the class of the model here, for all its engines. vLLM would import itself in a process to inspect it."""
    from vllm import ModelRegistry  # noqa: PLC0415

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _run(engine: dict[str, Any], steps: Steps, answers: Connection) -> None:
    known = dict(vllm_engine.start(engine))
    reset = known["reset"]
    known["reset"] = lambda: wait_for(lambda: bool(reset()))
    known["zero"] = lambda: _zero(known["workers"])
    try:
        found = [known[name](**arguments) for name, arguments in steps]
    finally:
        known["close"]()  # removes the engine's shared memory
    answers.send(found)


def _zero(workers: Callable[..., object]) -> None:
    """Zero the KV in host memory: HiCache's frames, or the loads of vLLM's own offloading."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

    from hicache.integrations.vllm.connector import PageConnector  # noqa: PLC0415

    if isinstance(get_kv_transfer_group(), PageConnector):
        workers(method="hicache_zero_frames")
    else:
        _zeros().touch()


def _zeros() -> Path:
    return Path(os.environ["TEST_ZEROS_FILE"])


if __name__ == "__main__":
    serve(start)
