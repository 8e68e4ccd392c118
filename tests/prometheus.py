"""A real Prometheus on a free port, and its answers to queries."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.errors import MissingPackage
from hicache_lab.devservers.launcher import launch
from hicache_lab.devservers.packages import prometheus_program
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.waiting import wait_for

START_S = 60.0
_ANSWER_S = 60.0


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; skip the test if it is not installed."""
    try:
        return str(prometheus_program(name))
    except MissingPackage as error:
        pytest.skip(str(error))


def checked(text: str) -> str:
    """Return the output of promtool for a scrape: empty if the scrape is valid."""
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout + done.stderr


class Prometheus:
    """A Prometheus that scrapes `targets`, pairs of a job and `host:port`, and `jobs`, whole entries of its
    configuration, and evaluates `rules` every `interval_s` seconds. A context manager: it is ready inside the block.
    """

    def __init__(
        self, folder: Path, targets: Sequence[tuple[str, str]] = (), rules: Sequence[Path] = (), interval_s: int = 1,
        jobs: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._folder = folder
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        every = f"{interval_s}s"
        self._config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                *({"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets), *jobs,
            ],
        }

    def __enter__(self) -> Prometheus:
        config = self._folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(self._config))
        arguments = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={self._folder / 'tsdb'}",
                     f"--web.listen-address={LOOPBACK}:{self.port}", "--log.level=warn"]
        self._process = launch(arguments, environ={}, directory=self._folder, log=self._folder / "log")
        wait_for(self._is_ready, timeout_s=START_S, pause_s=0.05)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def values(self, expression: str) -> list[float]:
        """Return the values of an instant query, without NaN."""
        found = self._ask("query", query=expression)["result"]
        return [value for sample in found if not math.isnan(value := float(sample["value"][1]))]

    def rules(self) -> list[dict[str, Any]]:
        """Return the loaded rules, with the health of their last evaluation."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, what: str, **query: str) -> Any:
        url = f"http://{LOOPBACK}:{self.port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {json.load(error)['error']}") from error

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}/-/ready", timeout=_ANSWER_S):
                return True
        except OSError:
            return False
