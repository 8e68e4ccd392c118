"""An engine's HTTP server, in its own process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hicache_lab.devservers.ports import LOOPBACK
from tests.listening import held_ports
from tests.waiting import wait_for

from .process import CALL_TIMEOUT_S, START_TIMEOUT_S, EngineFailed, ProcessTree, engine_environ


class EngineServer(ProcessTree):
    """A process that runs `command` with `--host` and `--port`. The constructor returns when /health answers.

    A failed request raises EngineFailed with the end of the log.
    """

    def __init__(self, command: Sequence[str], *, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        with held_ports() as self.port:
            super().__init__(
                [*command, "--host", LOOPBACK, "--port", str(self.port)], folder=folder, environ=engine_environ(environ)
            )
            try:
                wait_for(lambda: self.healthy() or not self.running(), timeout_s=START_TIMEOUT_S, pause_s=0.1)
                if not self.running():
                    raise EngineFailed(f"the server did not start\n{self.tail()}")
            except BaseException:
                self.kill()
                raise

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}/health", timeout=CALL_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        """Return the answer to a GET, for example of /metrics."""
        return self._request(path, None)

    def post(self, path: str, **body: object) -> Any:
        """Return the decoded answer to a POST of JSON."""
        return json.loads(self._request(path, json.dumps(body).encode()))

    def close(self) -> None:
        """End the server with SIGTERM, and kill its remaining processes."""
        self.end(self.terminate)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, path: str, body: bytes | None) -> str:
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self.port}{path}", data=body, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
                return bytes(answer.read()).decode()
        except OSError as error:
            reply = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            raise EngineFailed(f"{path}: {error} {reply}\n{self.tail()}") from error
