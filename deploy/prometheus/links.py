"""Write the links of the alerts to their runbooks into the rule files: `python3 deploy/prometheus/links.py [URL]`.

URL is the address of the documentation's site (`make docs` builds it); without it, `documentation` in pyproject.toml.
Each alert then has the annotation `runbook_url`, which Alertmanager and Grafana open. Without an address it is
`runbook`: file and section in the source package, as text instead of a dead link.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_LINK = re.compile(r"^( +)runbook(?:_url)?: \S*#(\w+)$", re.MULTILINE)


def linked(text: str, site: str) -> str:
    """Return the text of a rule file with its links to `site`; empty: without links."""
    entry = f"runbook_url: {site.rstrip('/')}/runbooks.html" if site else "runbook: docs/runbooks.md"
    return _LINK.sub(rf"\g<1>{entry}#\g<2>", text)


def main() -> None:
    """Rewrite the rule files."""
    if len(sys.argv) > 1:
        site = sys.argv[1]
    else:
        project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        site = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["documentation"]
    if site and not re.fullmatch(r"https?://[^\s#\"'\\]+", site):
        sys.exit(f"{site!r} is not the address of a site; write it as https://host/path")
    for path in sorted(FOLDER.glob("*.rules.yml")):
        path.write_text(linked(path.read_text(encoding="utf-8"), site), encoding="utf-8")


if __name__ == "__main__":
    main()
