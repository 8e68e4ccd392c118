"""Two engine processes share a storage daemon, which is killed and restarted while they run.

    python examples/two_engines.py

The first engine computes the prompts. The second engine starts cold and finds their pages in the daemon. Then the
program kills the daemon with SIGKILL: both engines continue, compute missing pages, and use the daemon again after its
restart. The program compares all output tokens with those of an engine without a cache; it exits with code 1 if a token
differs or the second engine finds no pages in the daemon.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from hicache.config import HiCacheConfig
from hicache_lab.engine import BUNDLED_MODEL, Engine, create_engine, load_tokenizer

TEXTS = Path(BUNDLED_MODEL).parent / "texts"
PROMPT_TOKENS = 600
NEW_TOKENS = 16
WAIT_S = 60.0
READY_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one request, and how many tokens of its prompt came from the daemon."""

    tokens: tuple[int, ...]
    stored_tokens: int


def daemon_config(folder: Path) -> str:
    """Return the configuration of the daemon: a socket, a pool and a file store."""
    return f"""\
daemon:
  socket: {folder}/run/daemon.sock
  pool: 64MiB
storage:
  type: file
  options: {{path: {folder}/pages, capacity: 1GiB, free_space_floor: 64MiB}}
"""


def engine_config(folder: Path, name: str) -> HiCacheConfig:
    """Return the configuration of an engine whose storage is the daemon. The engine shares its L2 with the daemon, so
    the daemon reads pages directly into the engine's memory."""
    return HiCacheConfig.model_validate({
        "page_size": 16,
        "device": {"tokens": 4096},
        "host": {"tokens": 8192, "shared": {"name": f"two-engines-{os.getpid()}-{name}"}},
        "load_back_threshold_tokens": 16,
        "prefetch": {"threshold_tokens": 32},
        "break_even": {"mode": "always"},
        "storage": {"type": "remote", "options": {"socket": f"{folder}/run/daemon.sock"}},
    })


def run_engine(config: HiCacheConfig, connection: Connection) -> None:
    """Receive prompts over `connection` and send one Answer for each, until None arrives. Runs in its own process."""
    with create_engine(config) as engine:
        connection.send(None)  # it has started
        while (prompt := connection.recv()) is not None:
            connection.send(answer(engine, prompt))


def answer(engine: Engine, prompt: Sequence[int]) -> Answer:
    """Serve one prompt, and wait until its pages are stored or have failed."""
    rid = engine.submit(prompt, NEW_TOKENS, ignore_eos=True)
    while True:
        for update in engine.step():
            if update.rid == rid and update.record is not None:
                if update.record.error is not None:
                    raise update.record.error
                engine.cache.drain(WAIT_S)
                return Answer(update.record.output_tokens, update.record.storage_hit_tokens)
        engine.rest()


class EngineProcess:
    """An engine in its own process."""

    def __init__(self, config: HiCacheConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=run_engine, args=(config, other), daemon=True)
        self._process.start()
        other.close()
        self._receive()

    def serve(self, prompt: Sequence[int]) -> Answer:
        """Send a prompt to the engine and return its answer. Blocks."""
        self._connection.send(prompt)
        return cast(Answer, self._receive())

    def _receive(self) -> object:
        if not self._connection.poll(WAIT_S):
            raise SystemExit(f"an engine has not answered within {WAIT_S} s")
        return self._connection.recv()

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join(WAIT_S)


@contextmanager
def started(config: HiCacheConfig) -> Iterator[EngineProcess]:
    """Start an engine process; end it with the block."""
    engine = EngineProcess(config)
    try:
        yield engine
    finally:
        engine.close()


def start_daemon(config_file: Path, socket: Path) -> subprocess.Popen[bytes]:
    """Start `hicache serve` and wait until it listens."""
    socket.unlink(missing_ok=True)  # a killed daemon leaves its socket file
    daemon = subprocess.Popen([sys.executable, "-m", "hicache", "serve", "-c", str(config_file)])
    wait_for(socket.exists, READY_S, f"the daemon does not listen after {READY_S} s")
    return daemon


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until `condition` is true; exit with the message `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise SystemExit(what)
        time.sleep(0.05)


class Walk:
    """Serves prompts on engines, compares their tokens with those of `alone`, and prints a line for each."""

    def __init__(self, alone: Engine) -> None:
        self._alone = alone
        tokenizer = load_tokenizer(BUNDLED_MODEL)
        texts = [tokenizer.encode(path.read_text(encoding="utf-8")).ids for path in sorted(TEXTS.glob("*.txt"))]
        # All prompts differ in their first page.
        self._prompts = iter([text[at : at + PROMPT_TOKENS] for at in range(0, 320, 40) for text in texts])
        self.differing = 0

    def prompt(self) -> list[int]:
        """Return a prompt that no engine has seen."""
        return list(next(self._prompts))

    def serve(self, engine: EngineProcess, name: str, prompt: Sequence[int]) -> int:
        """Serve a prompt, compare its tokens, print a line; return how many of its tokens came from the daemon."""
        begin_s = time.monotonic()
        found = engine.serve(prompt)
        took_s = time.monotonic() - begin_s
        is_right = found.tokens == answer(self._alone, prompt).tokens
        self.differing += not is_right
        print(f"  {name:<7} {len(prompt)} tokens, {found.stored_tokens:>3} of them from the daemon, "
              f"{1000 * took_s:5.0f} ms, tokens {'equal' if is_right else 'DIFFER'}")
        return found.stored_tokens


def main() -> int:
    """Run all steps. Return the exit code."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-two-engines-")))
        config_file, socket = folder / "daemon.yaml", folder / "run" / "daemon.sock"
        config_file.write_text(daemon_config(folder), encoding="utf-8")
        walk = Walk(stack.enter_context(create_engine(HiCacheConfig.model_validate(
            {"page_size": 16, "prefix_cache": False, "device": {"tokens": 4096}}))))
        daemons = [start_daemon(config_file, socket)]
        stack.callback(lambda: stop(daemons[-1]))
        one = stack.enter_context(started(engine_config(folder, "one")))

        print("The first engine computes:")
        prompts = [walk.prompt() for _ in range(3)]
        for prompt in prompts:
            walk.serve(one, "first", prompt)

        print("The second engine starts cold and finds the pages in the daemon:")
        two = stack.enter_context(started(engine_config(folder, "two")))
        shared = [walk.serve(two, "second", prompt) for prompt in prompts]

        print("The daemon is killed with SIGKILL; both engines continue:")
        daemons[0].send_signal(signal.SIGKILL)
        daemons[0].wait()
        for _ in range(2):
            prompt = walk.prompt()
            walk.serve(one, "first", prompt)
            walk.serve(two, "second", prompt)

        print("The daemon is restarted; the engines use it again:")
        daemons.append(start_daemon(config_file, socket))
        deadline, again = time.monotonic() + WAIT_S, 0
        while not again and time.monotonic() < deadline:
            prompt = walk.prompt()
            walk.serve(one, "first", prompt)
            again = walk.serve(two, "second", prompt)
    if walk.differing or not all(shared) or not again:
        print(f"{walk.differing} requests with other tokens; from the daemon: {shared} tokens before, {again} after")
        return 1
    print("all tokens are equal to those of an engine without a cache")
    return 0


def stop(daemon: subprocess.Popen[bytes]) -> None:
    """End the daemon with SIGTERM, as an operator does."""
    daemon.terminate()
    with suppress(subprocess.TimeoutExpired):
        daemon.wait(WAIT_S)


if __name__ == "__main__":
    sys.exit(main())
