"""Run engines and a daemon under a schedule of faults, and collect their log.

    python -m tests.soak_faults --minutes 60 --log faults.log --seed 1

Two engines share a daemon over a file store and a Valkey. The program injects one fault after the other, each followed
by a healthy phase, and compares the tokens of each answer with those of an engine without a cache. The log has the
lines of all processes in the order of their arrival, each with the name of its process, and a line of `soak` for each
phase. Read it as an operator would.

The exit code is 0 if all tokens were correct, each request ended, the last phase had hits in storage, and no process
and no shared memory remained.

Locking design: one thread per process copies its lines into the log, under a lock. The main thread does everything
else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from hicache.config import HiCacheConfig
from hicache_lab.devservers import ValkeyServer
from hicache_lab.engine import BUNDLED_MODEL, Engine, create_engine, load_tokenizer
from tests.daemon.daemons import Client
from tests.soak_engine import answer
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("one", "two")
TIERS = ("L1", "L2", "storage")
DOCUMENT_TOKENS = 320
QUESTION_TOKENS = 24
NEW_TOKENS = 8
# More documents than fit into the engines' memory, so that storage is read.
DOCUMENTS = 48
# The deadline of a request. An engine may wait for a hanging daemon, but no fault here lasts longer than a phase.
REQUEST_S = 120.0
READY_S = 60.0
# Log lines that differ only in such words are of one kind.
_VARIABLE = re.compile(r"\b(?=\w*\d)[0-9a-f]{6,}\b|[\d.,]*\d|\[request [^]]*\]|'[^']*'|/\S+")
_LINE = re.compile(r"\S+Z (?P<level>[A-Z]+) +(?P<logger>\S+): (?P<message>.*)")


class Log:
    """The log of all processes, one line at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self.kinds: Counter[tuple[str, str]] = Counter()  # by level and kind

    def write(self, name: str, line: str) -> None:
        """Add a line from a process."""
        with self._lock:
            found = _LINE.match(line)
            if found:
                self.kinds[found["level"], f"{found['logger']}: {_VARIABLE.sub('#', found['message'])}"] += 1
            elif name != "soak":
                self.kinds["not a record", _VARIABLE.sub("#", line)] += 1
            self._file.write(f"{name:<6} | {line}\n")
            self._file.flush()

    def say(self, message: str) -> None:
        """Add a line from this program."""
        now_s = time.time()
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
        self.write("soak", f"{when}.{int(now_s % 1 * 1000):03d}Z {message}")

    def follow(self, name: str, stream: IO[bytes]) -> None:
        """Copy the lines of a process until it ends."""

        def copy() -> None:
            with stream:
                for line in stream:
                    self.write(name, line.decode(errors="replace").rstrip("\n"))

        threading.Thread(target=copy, name=f"log-{name}", daemon=True).start()


class Program:
    """A process whose standard error goes to the log."""

    def __init__(self, log: Log, name: str, command: list[str]) -> None:
        self.name = name
        self._log = log
        self._command = command
        self.process: subprocess.Popen[bytes] = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        assert process.stderr is not None
        self._log.follow(self.name, process.stderr)
        return process

    def restart(self) -> None:
        """Start the process again. REQUIRES: it has ended."""
        self._close_pipes()
        self.process = self._start()

    def end(self, number: int) -> int:
        """End the process by a signal, and return its exit code."""
        self.process.send_signal(number)
        self.process.send_signal(signal.SIGCONT)
        return self.process.wait(READY_S)

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait(READY_S)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class EngineProgram(Program):
    """An engine process; see `soak_engine`."""

    def __init__(self, log: Log, name: str, config: Mapping[str, Any]) -> None:
        super().__init__(log, name, [sys.executable, "-m", "tests.soak_engine", json.dumps(config)])
        self.receive()

    def restart(self) -> None:
        super().restart()
        self.receive()

    def send(self, prompt: list[int]) -> None:
        """Send a prompt to the engine."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "new_tokens": NEW_TOKENS}).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next answer. Raises TimeoutError if it does not arrive in time or the engine has died."""
        assert self.process.stdout is not None
        if select.select([self.process.stdout], [], [], REQUEST_S)[0]:
            line = self.process.stdout.readline()
            if line:
                return dict(json.loads(line))
            raise TimeoutError(f"engine {self.name} has died with code {self.process.wait(READY_S)}")
        raise TimeoutError(f"engine {self.name} has not answered in {REQUEST_S:.0f} s")


class DaemonProgram(Program):
    """A process that runs `hicache serve`."""

    def __init__(self, log: Log, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self.configure(config)
        super().__init__(log, "daemon", [sys.executable, "-m", "hicache", "serve", "-c", str(folder / "daemon.yaml")])
        wait_for(self.is_ready, timeout_s=READY_S, pause_s=0.1)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the configuration for the next start or reload."""
        (self._folder / "daemon.yaml").write_text(yaml.safe_dump(dict(config)), encoding="utf-8")

    def is_ready(self) -> bool:
        """True if the daemon accepts requests."""
        client = Client(self._folder / "run" / "daemon.sock")
        try:
            return bool(client.call("GET", "/readyz")[0] == 200)
        except OSError:
            return False
        finally:
            client.close()


@dataclass(slots=True)
class Phase:
    """The results of the requests in all phases of one kind."""

    phases: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    def __str__(self) -> str:
        hits = ", ".join(f"{tier} {100 * self.hits[tier] / max(1, self.prompt_tokens):.0f} %" for tier in TIERS)
        return (f"{self.phases:>3} phases, {self.requests:>5} requests, prompt tokens from {hits}, "
                f"longest request {self.longest_s:.2f} s")


class Site:
    """The Valkey, the daemon and the engines, and the faults to inject. A context manager."""

    def __init__(self, log: Log, folder: Path, rng: random.Random) -> None:
        self.log = log
        self.folder = folder
        self._rng = rng
        self._undo = ExitStack()
        self._reloads = 0

    def __enter__(self) -> Site:
        with ExitStack() as undo:
            self.valkey = undo.enter_context(ValkeyServer())
            self.config = daemon_config(self.folder, self.valkey.port)
            self.daemon = DaemonProgram(self.log, self.folder, self.config)
            undo.callback(self.daemon.close)
            self.engines: dict[str, EngineProgram] = {}
            for name in ENGINES:
                self.engines[name] = EngineProgram(self.log, name, engine_config(self.folder, name))
                undo.callback(self.engines[name].close)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def faults(self, schedule: random.Random) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """Return the faults by name: the function that begins one, and the function that ends it after a phase."""
        victim = schedule.choice(ENGINES)
        return {
            "valkey hangs": (self.valkey.pause, self.valkey.resume),
            "valkey killed": (self.valkey.kill, self.valkey.restart),
            "valkey full": (lambda: self._set_valkey_memory("1mb"), lambda: self._set_valkey_memory("0")),
            "daemon killed": (lambda: self.daemon.end(signal.SIGKILL), self._restart_daemon),
            "daemon stopped": (lambda: self._end_well(self.daemon, signal.SIGTERM), self._restart_daemon),
            "pages damaged": (self._damage_pages, _nothing),
            "pages removed": (lambda: shutil.rmtree(self.folder / "pages", ignore_errors=True), self._stop_and_start),
            f"engine {victim} killed": (lambda: self.engines[victim].end(signal.SIGKILL), self.engines[victim].restart),
            "daemon reloads": (self._reload, _nothing),
            "daemon reloads an error": (self._reload_error, lambda: self.daemon.configure(self.config)),
        }

    def end(self) -> list[str]:
        """End all processes as an operator does. Return the problems found."""
        wrong = []
        for engine in self.engines.values():
            assert engine.process.stdin is not None
            engine.process.stdin.close()
            code = engine.process.wait(READY_S)
            if code:
                wrong.append(f"engine {engine.name} has ended with code {code}")
        self._end_well(self.daemon, signal.SIGTERM)
        memory = [path.name for path in Path("/dev/shm").glob("hicache.*") if f"soak-{os.getpid()}-" in path.name]
        if memory:
            wrong.append(f"shared memory remained: {', '.join(memory)}")
        return wrong

    def _end_well(self, program: Program, number: int) -> None:
        code = program.end(number)
        if code:
            raise RuntimeError(f"{program.name} has ended with code {code}")

    def _stop_and_start(self) -> None:
        """Restart the daemon, as its log recommends after the store's directory was removed."""
        self._end_well(self.daemon, signal.SIGTERM)
        self._restart_daemon()

    def _restart_daemon(self) -> None:
        self.daemon.restart()
        wait_for(self.daemon.is_ready, timeout_s=READY_S, pause_s=0.1)

    def _set_valkey_memory(self, bound: str) -> None:
        client = self.valkey.client()
        try:
            client.config_set("maxmemory", bound)
        finally:
            client.close()

    def _damage_pages(self) -> None:
        """Change a byte in a quarter of the files."""
        files = [path for path in (self.folder / "pages").rglob("*") if path.is_file() and path.stat().st_size > 4096]
        for path in self._rng.sample(files, len(files) // 4):
            try:
                with path.open("r+b") as file:
                    file.seek(self._rng.randrange(path.stat().st_size))
                    file.write(bytes([self._rng.randrange(256)]))
            except FileNotFoundError:
                pass  # the page was evicted in the meantime
        self.log.say(f"damaged {len(files) // 4} of {len(files)} page files")

    def _reload(self) -> None:
        self._reloads += 1
        self.config["daemon"]["connections_max"] = 1000 + self._reloads
        self.daemon.configure(self.config)
        self.daemon.process.send_signal(signal.SIGHUP)

    def _reload_error(self) -> None:
        self.daemon.configure({**self.config, "storage": {"type": "tape"}})
        self.daemon.process.send_signal(signal.SIGHUP)


def _nothing() -> None:
    """Do nothing: the fault ends by itself."""


def daemon_config(folder: Path, port: int) -> dict[str, Any]:
    """Return the configuration of the daemon: a small disk in front of a Valkey."""
    disk = {"name": "disk", "type": "file",
            "options": {"path": str(folder / "pages"), "capacity": "24MiB", "free_space_floor": "64MiB"}}
    shared = {"name": "valkey", "type": "redis", "options": {"url": f"redis://127.0.0.1:{port}", "timeout": "1s"}}
    return {
        "daemon": {"socket": str(folder / "run" / "daemon.sock"), "pool": "8MiB", "drain_timeout": "5s"},
        "storage": {"type": "levels", "options": {"levels": [disk, shared], "promote": True}},
    }


def engine_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the configuration of an engine with little memory, whose storage is the daemon."""
    return {
        "page_size": 16,
        "device": {"tokens": 1024},
        "host": {"tokens": 2048, "shared": {"name": f"soak-{os.getpid()}-{name}"}},
        "load_back_threshold_tokens": 16,
        "prefetch": {"threshold_tokens": 32},
        "break_even": {"mode": "always"},
        "storage": {"type": "remote", "options": {"socket": str(folder / "run" / "daemon.sock")}},
    }


class Soak:
    """Sends requests to both engines in phases, and compares them with an engine without a cache."""

    def __init__(self, site: Site, alone: Engine, rng: random.Random, rest_s: float) -> None:
        self._site = site
        self._alone = alone
        self._rng = rng
        self._rest_s = rest_s
        tokenizer = load_tokenizer(BUNDLED_MODEL)
        paths = sorted((Path(BUNDLED_MODEL).parent / "texts").glob("*.txt"))
        self._text = [token for path in paths for token in tokenizer.encode(path.read_text(encoding="utf-8")).ids]
        self._documents = [self._some(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        self.phases: dict[str, Phase] = {}
        self.wrong: list[str] = []

    def _some(self, tokens: int) -> list[int]:
        at = self._rng.randrange(len(self._text) - tokens)
        return self._text[at : at + tokens]

    def prompt(self) -> list[int]:
        """Return a question about a document. A few documents are popular; sometimes one is replaced."""
        number = min(int(self._rng.expovariate(4 / DOCUMENTS)), DOCUMENTS - 1)
        if self._rng.random() < 0.05:
            self._documents[number] = self._some(DOCUMENT_TOKENS)
        return self._documents[number] + self._some(QUESTION_TOKENS)

    def run(self, kind: str, seconds: float) -> Phase:
        """Serve requests for a time. Add the results to the phases of this kind, and return them."""
        phase = self.phases.setdefault(kind, Phase())
        phase.phases += 1
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            alive = [engine for engine in self._site.engines.values() if engine.process.poll() is None]
            prompts = [self.prompt() for _ in alive]
            for engine, prompt in zip(alive, prompts, strict=True):
                engine.send(prompt)
            for engine, prompt in zip(alive, prompts, strict=True):
                self._compare(engine, prompt, phase, kind)
            time.sleep(self._rest_s)
        return phase

    def _compare(self, engine: EngineProgram, prompt: list[int], phase: Phase, kind: str) -> None:
        found = engine.receive()
        wanted = answer(self._alone, prompt, NEW_TOKENS)
        if found["error"] or found["tokens"] != wanted["tokens"]:
            self.wrong.append(f"engine {engine.name}, while {kind}: {found['error'] or 'wrong tokens'}")
            self._site.log.say(self.wrong[-1])
        phase.requests += 1
        phase.prompt_tokens += len(prompt)
        phase.longest_s = max(phase.longest_s, found["took_s"])
        phase.hits.update(dict(zip(TIERS, found["hits"], strict=True)))


def soak(site: Site, work: Soak, seconds: float, schedule: random.Random) -> None:
    """Inject all faults in random order, repeatedly, each followed by a healthy phase."""
    deadline_s = time.monotonic() + seconds
    waiting: list[int] = []
    work.run("healthy", 5.0)
    while time.monotonic() < deadline_s:
        faults = site.faults(schedule)
        if not waiting:
            waiting = schedule.sample(range(len(faults)), len(faults))
        kind = list(faults)[waiting.pop()]
        begin, end = faults[kind]
        site.log.say(f"======== {kind}")
        begin()
        work.run(kind, schedule.uniform(4.0, 10.0))
        end()
        site.log.say("======== healthy")
        work.run("healthy", schedule.uniform(8.0, 14.0))


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def summary(work: Soak, log: Log, wrong: list[str]) -> None:
    """Print the results of all phases, the kinds of log lines and the problems."""
    for kind, phase in sorted(work.phases.items()):
        print(f"{kind:<24} {phase}")
    print("\nlines of the log, by level and kind:")
    for (level, kind), count in sorted(log.kinds.items(), key=lambda entry: (entry[0][0], -entry[1])):
        print(f"{count:>6}  {level:<8} {kind[:200]}")
    print()
    for line in wrong:
        print(f"WRONG: {line}")
    requests = sum(phase.requests for phase in work.phases.values())
    print(f"{requests} requests, {len(wrong)} failures" + ("" if wrong else "; no process or shared memory remained"))


def main() -> int:
    """Run the schedule. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--log", type=Path, default=Path("faults.log"), help="file for the log")
    parser.add_argument("--seed", type=int, default=1, help="seed of the schedule and of the prompts")
    parser.add_argument("--rest", type=float, default=0.5, metavar="S", help="pause between two rounds of requests")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    # Separate generators, so that the schedule of a seed does not depend on the number of requests.
    schedule, prompts, damage = (random.Random(f"{chosen.seed} {what}") for what in ("schedule", "prompts", "damage"))
    log = Log(chosen.log)
    alone_config = {"page_size": 16, "prefix_cache": False, "device": {"tokens": 1024}}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-soak-")))
        alone = stack.enter_context(create_engine(HiCacheConfig.model_validate(alone_config)))
        site = stack.enter_context(Site(log, folder, damage))
        work = Soak(site, alone, prompts, chosen.rest)
        log.say(f"seed {chosen.seed}, {chosen.minutes:g} minutes")
        try:
            soak(site, work, 60 * chosen.minutes, schedule)
            programs: list[Program] = [site.daemon, *site.engines.values()]
            log.say("resident: " + ", ".join(f"{one.name} {resident_mib(one.process.pid):.0f} MiB" for one in programs))
            log.say("======== end")
            if not work.run("last, healthy", 15.0).hits["storage"]:
                work.wrong.append("no hits in storage at the end")
            work.wrong += site.end()
        except (TimeoutError, RuntimeError, AssertionError, OSError, subprocess.TimeoutExpired) as error:
            work.wrong.append(f"{type(error).__name__}: {error}")
    summary(work, log, work.wrong)
    return 1 if work.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
