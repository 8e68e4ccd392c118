"""Hooks of MkDocs that complete the documentation site (mkdocs.yml names this file).

They add the pages at the root of the repository, one page for each folder of files that pages link to, and a reference
of the commands. They also rewrite links. Pages are written for the viewer of a repository, with paths of the source
tree; each link becomes a link of the site, which MkDocs checks. A link to a source file that is not on the site becomes
plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File

from hicache.cli.main import main

ROOT = Path(__file__).resolve().parent
ROOT_PAGES = {"README.md": "readme.md", "DESIGN.md": "DESIGN.md", "CONTRIBUTING.md": "CONTRIBUTING.md",
              "CHANGELOG.md": "CHANGELOG.md"}
FOLDERS = {
    "configs": "Complete configurations with the reasons for their values. `hicache config check FILE` checks a copy.",
    "deploy": "Files that run and monitor a daemon. [Deploying](../docs/deploy.md) explains how to use each of them.",
    "examples": "Programs that run without changes and without a GPU.",
}
# The languages of files that are shown in full. Of other files, such as long dashboards, only the name is shown.
LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".service": "ini", ".toml": "toml", ".md": "markdown",
             "": "docker"}
_CODE_OR_LINK = re.compile(
    r"```.*?^ *```|`[^`\n]*`|\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)", re.DOTALL | re.MULTILINE
)


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with the files of docs/."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for folder, about in FOLDERS.items():
        files.append(File.generated(config, f"{folder}/index.md", content="\n".join(_shown(folder, about))))
    context = click.Context(main, info_name="hicache", terminal_width=80)
    files.append(File.generated(config, "commands.md", content="# Commands\n\n" + "\n".join(_help(main, context))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    uri = page.file.src_uri
    sources = {site: source for source, site in ROOT_PAGES.items()}
    source = sources.get(uri, uri if uri.split("/")[0] in FOLDERS else f"docs/{uri}")

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if target is None or re.match(r"[a-z]+:|#", target):
            return match[0]
        place = _place(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        return text if place is None else f"[{text}]({posixpath.relpath(place, posixpath.dirname(uri) or '.')})"

    return _CODE_OR_LINK.sub(replaced, markdown)


def anchor(name: str) -> str:
    """Return the anchor that the site and the viewers of repositories make of the heading `name`."""
    return re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")


def _place(path: str) -> str | None:
    """Return the location on the site of a path of the source tree, or None if it is not on the site."""
    file, hash_, fragment = path.partition("#")
    folder, _, rest = file.partition("/")
    if folder in FOLDERS:
        return f"{folder}/index.md" + (f"#{anchor(rest)}" if rest else "")
    if file in ROOT_PAGES:
        return ROOT_PAGES[file] + hash_ + fragment
    if folder == "docs" and rest:
        return rest + hash_ + fragment
    return None


def _shown(folder: str, about: str) -> Iterator[str]:
    yield f"# {folder}/\n\n{about}\n"
    for path in sorted((ROOT / folder).rglob("*")):
        if not path.is_file() or path.name.startswith(".") or "__pycache__" in path.parts:
            continue
        yield f"## {path.relative_to(ROOT / folder).as_posix()}\n"
        if path.suffix in LANGUAGES:
            # Four backquotes: a file may have a block of its own.
            yield f"````{LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def _help(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            part = command.get_command(context, name)
            assert part is not None
            yield from _help(part, click.Context(part, context, name))
