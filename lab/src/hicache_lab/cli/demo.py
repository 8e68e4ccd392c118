"""`hicache demo`: a real transformer that reuses its KV through three tiers, compared with itself without a cache.

Each request is computed by an engine without reuse and served by an engine with the cache, directly after each other,
so that other load on the machine slows both times of a pair. Then a second process, which starts empty and finds the
pages in storage, does the same for every document and the last turns. Output tokens must be equal in all runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from tokenizers import Tokenizer

from hicache.cache import CacheStatistics
from hicache.cli.arguments import PATH
from hicache.cli.config import parse_settings
from hicache.cli.interrupts import interrupted_by_signals
from hicache.cli.log_options import LOG_OPTIONS, log_options, start_log
from hicache.cli.stores import print_json
from hicache.config import HiCacheConfig, load_config, read_tree
from hicache.config.publishing import LoggingConfig
from hicache.config.ready import ready_files
from hicache.errors import ConfigError, HiCacheError
from hicache.metrics import serve_configured

from ..devservers import KINDS, make_service
from ..engine import BUNDLED_MODEL, Checkpoint, Engine, Sampling, create_engine, load_checkpoint, load_tokenizer
from .arguments import Number
from .demo_report import LiveTable, differences, gain_line, gains, tier_table, time_table
from .demo_run import Answer, Pair, Runner
from .demo_workload import DemoRequest, Workload
from .reports import OutputConsole

STORAGES = ("file", *KINDS, "file+s3")
DEMO_CONFIG = ready_files()["demo"]
RESTART_TIMEOUT_S = 600
CONVERSATIONS = 3
DOCUMENT_TOKENS = 1200


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the command line."""

    config_file: Path
    overrides: tuple[str, ...]
    rounds: int
    max_new_tokens: int
    temperature: float
    verify: bool
    device: str

    def config(self) -> HiCacheConfig:
        """Return the effective configuration. Raises ConfigError without storage, which the restart needs."""
        config = load_config(self.config_file, environ=os.environ, overrides=parse_settings(self.overrides))
        if config.storage is None:
            raise ConfigError("storage: the demo needs a storage section; configs/demo.yaml has one")
        return config


@click.command()
@click.option("-c", "--config", "config_file", type=PATH, default=DEMO_CONFIG,
              help="Configuration.  [default: configs/demo.yaml]")
@click.option("--set", "overrides", multiple=True, metavar="ENTRY=VALUE", help="Such as host.tokens=4096.")
@click.option("--rounds", type=click.IntRange(1, 20), default=1, show_default=True, help="Times through all documents.")
@click.option("--max-new-tokens", type=click.IntRange(1, 256), default=24, show_default=True, help="Per answer.")
@click.option("--temperature", type=Number(0.0, 5.0), default=0.7, show_default=True,
              help="0 is greedy. Sampling depends only on the position, so texts must always be equal.")
@click.option("--device", default="cpu", show_default=True, help="Device of the model and L1: cpu, cuda, cuda:1, ...")
@click.option("--verify", is_flag=True, help="Also compare the KV bytes, and check all invariants at each step.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), help="Serve Prometheus metrics at this port; 0: a free port."
)
@click.option(
    "--storage", type=click.Choice(STORAGES),
    help="Start this storage for the demo instead of using the configured one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the gains as JSON; other output goes to standard error.")
@click.option("--restarted", is_flag=True, hidden=True)
@log_options
def demo(metrics_port: int | None, storage: str | None, restarted: bool, as_json: bool, **options: Any) -> None:
    """Serve a small model without and with the cache, then again in a new process, and compare.

    Exit code 1 if one output token differs. Pages stored in files stay, so a second demo starts with hits from storage;
    servers that --storage starts are empty, and end with the demo. They need the extra dev-servers of
    hicache-lab, or mooncake-cpu.
    """
    start_log(LoggingConfig(level="warning"), **{name: options.pop(name) for name in LOG_OPTIONS})
    settings = Settings(**options)
    if restarted:
        answer_again(settings)
    elif storage is None:
        run(settings, metrics_port, as_json)
    else:
        with interrupted_by_signals(), demo_storage(storage, settings.config_file) as config_file:
            run(replace(settings, config_file=config_file), metrics_port, as_json)


def run(settings: Settings, metrics_port: int | None, as_json: bool) -> None:
    """Run the demo and print the result. Exits with 1 if outputs differ."""
    console = OutputConsole(stderr=as_json)
    demo = Demo(settings, console, metrics_port)
    found = demo.run()
    if as_json:
        print_json({**demo.gains, "differences": found})
    console.print(gain_line(demo.gains), highlight=False)
    if found:
        for line in found[:20]:
            console.print(line, style="red", highlight=False)
        console.print(f"TOKENS DIFFER in {len(found)} requests", style="bold red")
        sys.exit(1)
    what = "tokens and KV bytes" if settings.verify else "tokens"
    console.print(
        f"{what} are identical with and without the cache, and after the restart", style="bold green", soft_wrap=True
    )


class Demo:
    """All runs. Owns the engine with the cache, whose metrics the server shows."""

    def __init__(self, settings: Settings, console: Console, metrics_port: int | None) -> None:
        self._settings = settings
        self._console = console
        self._config = settings.config()
        if metrics_port is not None:
            section = self._config.metrics.model_copy(update={"port": metrics_port})
            self._config = self._config.model_copy(update={"metrics": section})
        self._checkpoint = load_checkpoint(BUNDLED_MODEL)
        self._tokenizer = load_tokenizer(BUNDLED_MODEL)
        self.gains: dict[str, Any] = {}
        self._snapshot: CacheStatistics | None = None
        self._engine: Engine | None = None

    def run(self) -> list[str]:
        """Run in this process, then in a second one; return the differences in words."""
        with self._metrics():
            computed, cached = self._serve()
        self._show_answers(cached)
        again = [i for i, answer in enumerate(cached) if answer.document or i >= len(cached) - CONVERSATIONS]
        # One question per document: a second one would find its pages on L1.
        firsts = {cached[i].document or cached[i].label: i for i in again}
        restarted = self._restart([cached[i] for i in firsts.values()])
        self._console.print(time_table(cached, restarted), highlight=False)
        if not any(answer.document and answer.tier == "storage" for answer in restarted):
            self._console.print(
                "no prefix came from storage after the restart: the store did not keep any page; check that the disk "
                "is not full, that the daemon or server runs, and that this backend outlives its process",
                style="yellow",
            )
        self.gains = gains(cached, restarted)
        return differences(computed, cached) + differences([computed[i] for i in firsts.values()], restarted)

    def _serve(self) -> tuple[list[Answer], list[Answer]]:
        """Return the answers of the engine without reuse, and of the engine with the cache."""
        requests = sum(len(wave) for wave in load_workload(self._tokenizer, self._settings.rounds).waves())
        computed: list[Answer] = []
        cached: list[Answer] = []
        with (
            pair_of_engines(self._config, self._checkpoint, self._settings) as pair,
            LiveTable(self._console, "each computed and cached", pair.cached.engine, requests) as table,
        ):
            self._engine = pair.cached.engine
            for wave in load_workload(self._tokenizer, self._settings.rounds).waves():
                for one, other in pair.serve(wave):
                    computed.append(one)
                    cached.append(other)
                table.answered()
            state = self._engine.cache.statistics()
            self._snapshot, self._engine = state, None
        where = "" if self._settings.device == "cpu" else f" on {self._settings.device}"
        self._console.print(
            f"{len(cached)} requests{where}, {state.prompt_tokens:,} prompt tokens, each computed and cached in turns"
        )
        self._console.print(tier_table(state), highlight=False)
        return computed, cached

    def _show_answers(self, answers: list[Answer]) -> None:
        answer = max((a for a in answers if a.document), key=lambda a: sum(a.hit_tokens.values()))
        self._console.print(f"For example, {answer.label}: ... ", end="", highlight=False)
        self._console.print(self._tokenizer.decode(answer.prompt[-40:]), end="", highlight=False, markup=False)
        self._console.print(self._tokenizer.decode(answer.tokens), style="italic", highlight=False, markup=False)

    def _restart(self, answers: list[Answer]) -> list[Answer]:
        """Serve these requests again in a new process."""
        self._console.print(f"a new process starts with only the storage: {len(answers)} requests")
        settings = self._settings
        command = [sys.executable, "-m", "hicache", "demo", "--restarted", "-c", str(settings.config_file)]
        command += ["--max-new-tokens", str(settings.max_new_tokens), "--temperature", str(settings.temperature)]
        command += ["--device", settings.device]
        command += ["--verify"] if settings.verify else []
        for setting in settings.overrides:
            command += ["--set", setting]
        requests = [{"label": a.label, "document": a.document, "prompt": a.prompt} for a in answers]
        done = subprocess.run(
            command, input=json.dumps(requests), capture_output=True, text=True, timeout=RESTART_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise HiCacheError(
                f"demo: the second process failed with exit code {done.returncode}: {done.stderr.strip()}"
            )
        return [Answer(**answer) for answer in json.loads(done.stdout)]

    @contextmanager
    def _metrics(self) -> Iterator[None]:
        server = serve_configured(self._config, self._statistics)
        if server is None:
            yield
            return
        with server:
            self._console.print(f"metrics: http://{self._config.metrics.host}:{server.port}/metrics")
            yield

    def _statistics(self) -> CacheStatistics | None:
        engine = self._engine
        return self._snapshot if engine is None else engine.cache.statistics()


def load_workload(tokenizer: Tokenizer, rounds: int) -> Workload:
    """Return the demo's requests, as they are before the first answer."""
    return Workload.load(tokenizer, document_tokens=DOCUMENT_TOKENS, conversations=CONVERSATIONS, rounds=rounds)


@contextmanager
def pair_of_engines(
    config: HiCacheConfig, checkpoint: Checkpoint, settings: Settings, *, first_token_only: bool = False
) -> Iterator[Pair]:
    """Open an engine with the cache and one without reuse. With `first_token_only`, the latter computes one token."""
    sampling = Sampling(settings.temperature, top_k=40)
    with ExitStack() as stack:

        def runner(config: HiCacheConfig, tokens: int, *, reuse: bool) -> Runner:
            engine = stack.enter_context(create_engine(config, checkpoint, device=settings.device))
            return Runner(engine, reuse=reuse, verify=settings.verify, max_new_tokens=tokens, sampling=sampling)

        cached = runner(config, settings.max_new_tokens, reuse=True)
        tokens = 1 if first_token_only else settings.max_new_tokens
        yield Pair(runner(config.model_copy(update={"storage": None}), tokens, reuse=False), cached)


def answer_again(settings: Settings) -> None:
    """Run the second process: read requests as JSON from standard input, write answers as JSON to standard output."""
    requests = [DemoRequest(**request) for request in json.load(sys.stdin)]
    checkpoint: Checkpoint = load_checkpoint(BUNDLED_MODEL)
    with pair_of_engines(settings.config(), checkpoint, settings, first_token_only=True) as pair:
        answers = [cached.as_json() for request in requests for _, cached in pair.serve([request])]
    json.dump(answers, sys.stdout)


@contextmanager
def demo_storage(kind: str, config_file: Path) -> Iterator[Path]:
    """Start one of `STORAGES` with its servers, and yield a file with the configuration of `config_file` that uses it.

    Credentials are in this process's environment until the end. Raises ConfigError and BackendUnavailable as servers
    do.
    """
    config = read_tree(config_file)
    base = config.get("storage")
    if kind == "file":
        with _written({**config, "storage": _file_part(base)}) as path:
            yield path
        return
    above = [_file_part(base)] if kind == "file+s3" else []
    with make_service("s3" if above else kind) as service, _environment(service.environ()):
        name, options = service.storage()
        storage: dict[str, Any] = {"type": name, "options": options}
        if above:
            storage = {"type": "levels", "options": {"levels": [*above, storage]}}
        with _written({**config, "storage": storage}) as path:
            yield path


def _file_part(section: Any) -> Any:
    """Return the section of the configuration, which must be of type file: it sets the directory and the size."""
    if isinstance(section, dict) and section.get("type") == "file":
        return section
    raise ConfigError("demo: this --storage needs a configuration with storage.type: file; remove -c")


@contextmanager
def _written(config: dict[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as folder:
        path = Path(folder, "demo.yaml")
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        yield path


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
