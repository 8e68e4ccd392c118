"""The section `admin`: the admin surface of a cache inside an engine. A daemon has its own, see `daemon`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from .section import VARIABLE_PATTERN, FileSystemPath, Section


class AdminConfig(Section):
    """The admin surface of an embedded cache, for `hicache ctl`."""

    alternatives = (("token_file", "token_env"),)

    socket: FileSystemPath | None = Field(
        default=None,
        description="Unix socket to serve `/v1/admin` on, in a directory that is yours alone, such as "
        "`/run/user/1000/hicache/engine.sock`. Each engine needs its own. Without it there is no admin surface.",
    )
    token_file: FileSystemPath | None = Field(
        default=None,
        description="File with a token that is needed to use it, mode 0600. Without one it opens to this user and "
        "root, as the kernel names them.",
    )
    token_env: Annotated[str, Field(pattern=VARIABLE_PATTERN)] | None = Field(
        default=None, description="Environment variable with that token, instead of a file."
    )

    @model_validator(mode="after")
    def _check(self) -> AdminConfig:
        if self.socket is None and (self.token_file is not None or self.token_env is not None):
            raise ValueError("a token without a socket: give admin.socket too")
        return self
