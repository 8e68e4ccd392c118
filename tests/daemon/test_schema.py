"""A fuzzer sends requests made from the OpenAPI document of a running daemon. Answers match the document, requests that
it forbids are rejected, and none causes a server error. SOAK_FACTOR multiplies the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeds import fuzz_seed

from .process import Daemon

pytestmark = pytest.mark.long

DATA_TOKEN, ADMIN_TOKEN = "d" * 32, "a" * 32
# For each operation. A limit of time could end before the first request on a busy machine.
EXAMPLES = 10 * int(os.environ.get("SOAK_FACTOR", "1"))
# Without the check that allowed requests are accepted: the document cannot relate the length of a body to its keys.
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
          "response_schema_conformance", "negative_data_rejection", "ignored_auth")
# The document allows 500 for admin calls. These texts in the log show an error that only a bug can cause.
BUG = re.compile("Traceback|InvariantError|Internal Server Error")


@pytest.mark.parametrize(("token", "paths"), [
    (DATA_TOKEN, ("--exclude-path-regex", "^/v1/admin")), (ADMIN_TOKEN, ("--include-path-regex", "^/v1/admin")),
], ids=["data", "admin"])
def test_answers_match_the_document(tmp_path: Path, token: str, paths: tuple[str, str]) -> None:
    made = Daemon(tmp_path / "daemon")
    made.configure({"token_file": made.secret("token", DATA_TOKEN),
                    "admin_token_file": made.secret("admin", ADMIN_TOKEN)})
    with made as daemon:
        before = daemon.resources()
        done = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"), "run", f"http://127.0.0.1:{daemon.port}/openapi.json",
                "-H", f"Authorization: Bearer {token}", "--checks", ",".join(CHECKS), "--max-examples", str(EXAMPLES),
                "--phases", "coverage,fuzzing", "--seed", str(fuzz_seed()), "--no-color", "--warnings", "off",
                "--request-timeout", "30", *paths,
            ],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50 * EXAMPLES,
        )
        assert done.returncode == 0, done.stdout
        generated = re.search(r"(\d+) generated", done.stdout)
        assert generated and int(generated[1]) > 0, done.stdout
        print(f"{generated[1]} requests; {before} before, {daemon.resources()} after")
        assert not BUG.search(daemon.log)
        assert DATA_TOKEN not in daemon.log and ADMIN_TOKEN not in daemon.log
        assert daemon.end()[0] == 0
