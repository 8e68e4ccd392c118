"""A Unix socket that only its owner can open, and the identity of its peer."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from hicache.admin.access import AdminAccess, peer_of
from hicache.admin.sockets import PrivateSocket
from hicache.config.addresses import SOCKET_PATH_BYTES_MAX
from hicache.errors import ConfigError


def test_the_socket_and_its_directory_are_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "admin.sock"
    with PrivateSocket(path, "admin.socket") as private, socket.socket(socket.AF_UNIX) as client:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        client.connect(str(path))
        connection, _ = private.socket.accept()
        with connection:
            assert peer_of(connection) == os.geteuid()
    assert not path.exists()


def test_a_socket_in_use_is_rejected_and_one_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "own" / "admin.sock"
    with PrivateSocket(path, "admin.socket"):
        with pytest.raises(ConfigError, match="another process holds"):
            PrivateSocket(path, "admin.socket")
        assert path.exists()
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(path))
    left_over.close()
    with PrivateSocket(path, "admin.socket"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_directory_that_others_can_enter_or_a_link_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=f"chmod 700, or use a new directory in it, such as '{folder}/private'"):
        PrivateSocket(folder / "admin.sock", "admin.socket")
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    with pytest.raises(ConfigError, match="not a directory"):
        PrivateSocket(link / "admin.sock", "admin.socket")


def test_another_file_at_the_path_of_the_socket_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    (folder / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        PrivateSocket(folder / "notes", "admin.socket")
    assert (folder / "notes").read_text() == "mine"


def test_a_path_that_is_too_long_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a shorter path"):
        PrivateSocket(tmp_path / ("x" * SOCKET_PATH_BYTES_MAX), "admin.socket")


OWN, STRANGER = os.geteuid(), 4_000_000
SENT = {"authorization": "Bearer right"}


@pytest.mark.parametrize(
    ("token", "peer", "headers", "who"),
    [
        (None, OWN, {}, f"uid {os.geteuid()}"),
        (None, 0, {}, "uid 0"),
        (None, STRANGER, {}, None),
        (None, None, {}, None),  # TCP
        (None, None, SENT, None),
        ("right", None, SENT, "token"),
        ("right", STRANGER, SENT, "token"),
        ("right", OWN, {}, None),  # with an admin token, the user of the engine needs it too
        ("right", None, {"authorization": "Bearer wrong"}, None),
        ("right", None, {"authorization": "Basic right"}, None),
        ("right", None, {"authorization": "Bearer "}, None),
        ("right", None, {"authorization": "Bearer r\xefght"}, None),
    ],
)
def test_access_is_by_user_without_a_token_and_by_token_with_one(
    token: str | None, peer: int | None, headers: dict[str, str], who: str | None
) -> None:
    assert AdminAccess(lambda: token).who(peer, headers) == who
