"""A fuzzer that draws requests from the OpenAPI document, valid ones and others, against a real daemon."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.devservers.ports import LOOPBACK
from tests.daemon.daemons import TOKEN, Daemon

# Not among them: that what the document allows is accepted. It cannot say that a body has the length of its keys.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,ignored_auth"
)


@pytest.mark.long
def test_the_daemon_keeps_to_its_document(start: Callable[..., Daemon], scratch: Path, soak_factor: int) -> None:
    token = scratch / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    daemon = start({"token_file": str(token)})
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"http://{LOOPBACK}:{daemon.port}/openapi.json",
        "--header", f"Authorization: Bearer {TOKEN}", "--max-examples", str(2 * soak_factor), "--seed", "1",
        "--phases", "coverage,fuzzing", "--checks", CHECKS, "--exclude-path-regex", "^/v1/admin", "--no-color",
    ]  # fmt: skip
    fuzzed = subprocess.run(
        command, cwd=scratch, capture_output=True, text=True, check=False, timeout=150 * soak_factor
    )
    assert fuzzed.returncode == 0, fuzzed.stdout[-5000:] + fuzzed.stderr
    cases = re.search(r"(\d+) generated", fuzzed.stdout)
    assert cases is not None and int(cases[1]) > 200
    assert daemon.is_ready()
    assert "Traceback" not in daemon.log and TOKEN not in daemon.log
