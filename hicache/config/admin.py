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
        description="Unix socket that serves `/v1/admin`, in a private directory, such as "
        "`/run/user/1000/hicache/engine.sock`; one per engine. Not set: no admin surface.",
    )
    token_file: FileSystemPath | None = Field(
        default=None,
        description="File with a token for the admin surface, mode 0600. Without a token, this user and root have "
        "access, as reported by the kernel.",
    )
    token_env: Annotated[str, Field(pattern=VARIABLE_PATTERN)] | None = Field(
        default=None, description="Name of the variable with that token, instead of a file."
    )

    @model_validator(mode="after")
    def _check(self) -> AdminConfig:
        if self.socket is None and (self.token_file is not None or self.token_env is not None):
            raise ValueError("a token needs a socket; set admin.socket too")
        return self
