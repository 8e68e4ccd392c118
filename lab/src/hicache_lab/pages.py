"""The frame of the reports as HTML pages: one file with inline figures, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { --ground: #fcfcfb; --card: #fff; --ink: #1d2129; --soft: #5d6673; --rule: #dfe3e8; --good: #12703c;
  --bad: #b3261e; --c0: #2f6fde; --c1: #0f9b8e; --c2: #d98a00; --c3: #b9c0ca; --c4: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1b1f26; --ink: #e6e9ee; --soft: #9aa4b2;
  --rule: #30363f; --good: #5fd08f; --bad: #ff8a80; --c0: #6ea0ff; --c1: #3cc7b8; --c2: #f0b03f; --c3: #4b5461;
  --c4: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 960px; padding: 32px 20px 64px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 4px; }
p, ul { margin: 4px 0 12px; max-width: 75ch; } ul { padding-left: 20px; } li { margin: 4px 0; }
 .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(136px, 1fr)); gap: 12px; margin: 20px 0 8px; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; } .good b { color: var(--good); } .bad b { color: var(--bad); }
figure { margin: 12px 0 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px; }
figcaption { font-weight: 600; margin-bottom: 6px; } svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .value { fill: var(--ink); }
.grid { stroke: var(--rule); } .tick { stroke: var(--soft); }
line.mark { stroke: var(--soft); stroke-dasharray: 2 3; } circle.mark { fill: var(--card); stroke: var(--ink); }
text.mark { paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); } .line.c4 { stroke: var(--c4); }
.area.c0 { fill: var(--c0); } .area.c1 { fill: var(--c1); } .area.c2 { fill: var(--c2); } .area.c3 { fill: var(--c3); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0; font-size: 13px; }
.key { display: inline-flex; align-items: center; gap: 6px; }
.swatch { width: 14px; height: 10px; border-radius: 2px; }
.swatch.c0 { background: var(--c0); } .swatch.c1 { background: var(--c1); } .swatch.c2 { background: var(--c2); }
.swatch.c3 { background: var(--c3); } .swatch.c4 { background: var(--c4); }
.swatch.dashed { height: 3px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: 12px 0 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; font-size: 13px; }
/* A phone shows figures at less than half of their size. */
@media (max-width: 600px) { body { padding: 20px 12px 48px; } figure { padding: 8px; }
  svg text { font-size: 20px; } svg text.axis { font-size: 15px; } td:nth-child(2):last-child { white-space: normal; } }
"""


def html_page(title: str, parts: Sequence[str]) -> str:
    """Return a whole page. `parts` are HTML."""
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
            f"<body>\n{chr(10).join(parts)}\n</body></html>\n")


def html_tiles(tiles: Sequence[tuple[str, str, str]]) -> str:
    """Return a row of tiles from a kind (`good`, `bad` or empty), a value and its label."""
    return '<div class="tiles">' + "".join(
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for kind, value, label in tiles
    ) + "</div>"


def captioned(caption: str, content: str) -> str:
    """Return a figure with its caption."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{content}</figure>"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls by itself on a narrow screen."""
    header = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines_ = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{lines_}</tbody></table></div>'
