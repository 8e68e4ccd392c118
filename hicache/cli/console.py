"""Where commands print what is more than a line."""

from __future__ import annotations

from rich.console import Console


class OutputConsole(Console):
    """A console whose reader may leave. Rich would end the process with exit code 1 then, which here means that bytes
    are wrong; the error is raised instead and told like that of any other command."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has just caught. REQUIRES: called by rich, while it handles that error."""
        raise  # noqa: PLE0704
