"""Values of files that are replaced while they are in use."""

from __future__ import annotations

import logging
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.rotated import Rotated, client_tls
from hicache.config.secret import read_secret
from hicache.errors import ConfigError
from tests.certificates import Certificates, make_certificates
from tests.log_records import records_of
from tests.mounted import MountedSecret

OLD, NEW = "the-old-password", "the-new-password"


def secret(path: Path) -> Rotated[str | None]:
    return Rotated("password", [path], lambda: read_secret("password", None, path, {}))


@pytest.fixture
def mounted(tmp_path: Path) -> MountedSecret:
    return MountedSecret(tmp_path / "secret", {"password": OLD})


def test_a_moved_link_a_renamed_file_and_a_rewritten_one_are_noticed(mounted: MountedSecret, tmp_path: Path) -> None:
    """The control: what was read before does not change."""
    link, file = secret(mounted["password"]), tmp_path / "file"
    file.touch(0o600)
    file.write_text(OLD)
    plain = secret(file)
    before = link.get(), plain.get()
    mounted.replace({"password": NEW})
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text(NEW)
    os.replace(other, file)
    assert (link.get(), plain.get()) == (NEW, NEW)
    file.write_text(f"{NEW}-rewritten")
    assert plain.get() == f"{NEW}-rewritten"
    assert before == (OLD, OLD)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(lambda path: path.unlink(), "No such file"), (lambda path: path.write_text(""), "is empty"),
     (lambda path: path.chmod(0o644), "chmod 600"), (lambda path: path.write_bytes(b"\n" * 9000), "is empty")],
    ids=["missing", "empty", "readable by others", "without a first line"],
)
def test_an_unusable_file_keeps_the_last_value_and_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object], why: str
) -> None:
    caplog.set_level(logging.INFO, "hicache")
    path = tmp_path / "password"
    path.touch(0o600)
    path.write_text(OLD)
    found = secret(path)
    spoil(path)
    assert [found.get() for _ in range(3)] == [OLD] * 3
    (warning,) = records_of(caplog, "backends.rotated")
    assert warning.levelname == "WARNING" and why in warning.message
    path.touch()
    path.chmod(0o600)
    path.write_text(NEW)
    assert found.get() == NEW
    assert [one.levelname for one in records_of(caplog, "backends.rotated")] == ["WARNING", "INFO"]
    assert OLD not in caplog.text and NEW not in caplog.text
    spoil(path)
    assert found.get() == NEW and len(records_of(caplog, "backends.rotated")) == 3, "the next trouble is a new warning"


def rejecting(*wrong: str) -> Callable[[str | None], str]:
    def log_in(password: str | None) -> str:
        if password in wrong:
            raise StoreError(ErrorKind.WRONG_CREDENTIALS)
        return f"in with {password}"

    return log_in


def test_a_rejected_value_is_read_again_even_if_the_state_of_the_file_is_unchanged(tmp_path: Path) -> None:
    """The state of a file on a network may be some seconds old. The control: an unchanged value is not repeated."""
    contents, calls = [OLD, OLD, NEW], []
    path = tmp_path / "never-changes"
    path.touch()
    found = Rotated("password", [path], lambda: contents.pop(0))

    def log_in(password: str) -> str:
        calls.append(password)
        return rejecting(OLD)(password)

    with pytest.raises(StoreError, match="wrong_credentials"):
        found.run(log_in)
    assert calls == [OLD]
    assert found.run(log_in) == f"in with {NEW}"
    assert calls == [OLD, OLD, NEW]


def test_only_a_rejection_reads_the_files_again_and_a_constant_is_never_read_again() -> None:
    def lost(_: str) -> None:
        raise StoreError(ErrorKind.CONNECTION_LOST)

    contents = [OLD, NEW]
    found = Rotated("password", [Path("/nowhere")], lambda: contents.pop(0))
    with pytest.raises(StoreError, match="connection_lost"):
        found.run(lost)
    constant = Rotated("password", [], lambda: contents.pop(0))
    with pytest.raises(StoreError, match="wrong_credentials"):
        constant.run(rejecting(NEW))
    assert (found.get(), constant.get(), contents) == (OLD, NEW, [])


# Reads a secret as user and group 12345, and prints it or the error.
_AS_OTHER = """
import os, sys
from pathlib import Path
from hicache.config.secret import read_secret
from hicache.errors import ConfigError
os.setgroups([]); os.setgid(12345); os.setuid(12345)
try:
    print(read_secret("password", None, Path(sys.argv[1]), {}))
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a secret for another user")
@pytest.mark.parametrize(
    ("mode", "owner", "shown"),
    [(0o440, 0, OLD), (0o400, 12345, OLD), (0o440, 12345, "mode 0440 gives other users access"),
     (0o444, 0, "defaultMode: 0440"), (0o400, 54321, "Permission denied")],
)
def test_a_file_of_root_may_be_readable_by_its_group_as_kubernetes_mounts_it(
    mode: int, owner: int, shown: str
) -> None:
    """With `fsGroup`, the kubelet mounts a Secret as files of root and that group, with mode 0440."""
    with tempfile.TemporaryDirectory(prefix="hicache-test-") as folder:  # other users may not enter pytest's
        os.chmod(folder, 0o755)
        path = MountedSecret(Path(folder), {"password": OLD})["password"]
        os.chown(path, owner, 12345)
        path.chmod(mode)
        done = subprocess.run([sys.executable, "-c", _AS_OTHER, str(path)], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert shown in done.stdout


def pair(made: Certificates) -> dict[str, str | bytes]:
    return {"ca": made.ca_file.read_bytes(), "cert": made.client_cert_file.read_bytes(),
            "key": made.client_key_file.read_bytes()}


def test_half_replaced_certificates_keep_the_last_context(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = (pair(make_certificates(tmp_path_factory.mktemp(name))) for name in ("old", "new"))
    mounted = MountedSecret(tmp_path / "tls", old)
    tls = client_tls("store", {name: mounted[name] for name in ("ca", "cert", "key")})
    first = tls.get()
    assert tls.get() is first
    mounted.replace({**old, "cert": new["cert"]})
    assert tls.get() is first and "KEY_VALUES_MISMATCH" in caplog.text
    mounted.replace({**new, "ca": b"not a certificate"})
    assert tls.get() is first
    mounted.replace(new)
    second = tls.get()
    assert second is not first
    assert _subjects_of(second) != _subjects_of(first)
    with pytest.raises(ConfigError, match="cert, key: not usable for TLS"):
        client_tls("store", {"ca": None, "cert": mounted["cert"], "key": tmp_path / "tls" / "ca"})


def _subjects_of(context: ssl.SSLContext) -> set[str]:
    return {str(authority["serialNumber"]) for authority in context.get_ca_certs()}
