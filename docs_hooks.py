"""What the documentation site has beyond docs/ (mkdocs.yml names this file): the pages at the root of the repository,
one page for each folder of files that pages link to, and links that lead to these.

A page is written for the viewer of a repository, with paths of the source tree; here each of its links becomes one of
the site, and MkDocs checks it. A source file that is not on the site stays as text without a link.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent
ROOT_PAGES = {"README.md": "readme.md", "DESIGN.md": "DESIGN.md", "CONTRIBUTING.md": "CONTRIBUTING.md",
              "CHANGELOG.md": "CHANGELOG.md"}  # fmt: skip
FOLDERS = {
    "configs": "Each file is a whole configuration with its reasons; `hicache config check FILE` checks a changed one.",
    "deploy": "What runs a daemon and watches it. [Deploying](../docs/deploy.md) says how to use each file.",
    "examples": "Programs that run as they are, without a GPU.",
}
# The languages of files that are shown whole. Others, like dashboards of a thousand lines, are only named.
LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".service": "ini", ".toml": "toml", ".md": "markdown",
             "": "docker"}  # fmt: skip
_CODE_OR_LINK = re.compile(
    r"```.*?^ *```|`[^`\n]*`|\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)", re.DOTALL | re.MULTILINE
)


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with the files of docs/."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for folder, about in FOLDERS.items():
        files.append(File.generated(config, f"{folder}/index.md", content="\n".join(_shown(folder, about))))
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
    """Return the anchor of the heading `name`, as the site's and the viewers' of repositories make it."""
    return re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")


def _place(path: str) -> str | None:
    """Return where the site has a path of the source tree, or None."""
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
