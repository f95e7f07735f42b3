"""All pages as one HTML file: no server, nothing from elsewhere, and figures that answer to the pointer. It is made
from the pages' own markdown, of which it knows what they use."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.lab.show.figures.frame import NEXT

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1060px;padding:0 16px 60px;color:#202020}
nav{position:sticky;top:0;background:#fff;padding:8px 0;border-bottom:1px solid #ddd;z-index:1}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
td,th{border:1px solid #ddd;padding:4px 8px;text-align:left;vertical-align:top}th{background:#f4f4f4}
pre,code{background:#f4f4f4;font-size:13px}pre{padding:8px;overflow-x:auto}
blockquote{margin:8px 0;padding:4px 12px;border-left:4px solid #D55E00;background:#fff4ec}
svg{max-width:100%;height:auto}svg text{font-family:"DejaVu Sans",Verdana,sans-serif}
figure{margin:12px 0}summary{cursor:pointer;font-weight:600;margin:6px 0}
.js section{display:none}.js section.on{display:block}
#tip{position:fixed;pointer-events:none;background:#202020;color:#fff;padding:3px 8px;border-radius:4px;font-size:13px}
"""
SCRIPT = """
const tip=document.getElementById('tip'),known=new WeakMap(),NEAR=14;
function show(){const id=location.hash.slice(1)||'README';
 document.querySelectorAll('section').forEach(s=>s.classList.toggle('on',s.id===id));scrollTo(0,0)}
function marks(svg){if(!known.has(svg)){const found=[];
 for(const g of svg.querySelectorAll('[data-tip]')){const told=g.dataset.tip.split('NEXT');
  let own=[...g.querySelectorAll('use')];
  if(!own.length)own=[...g.querySelectorAll('path')].filter(p=>!p.closest('defs'));
  own.forEach((m,i)=>told[i]&&found.push([m,told[i]]))}
 known.set(svg,found)}return known.get(svg)}
addEventListener('pointermove',e=>{const svg=e.target.closest&&e.target.closest('svg');let best=null,least=NEAR;
 if(svg)for(const [m,text] of marks(svg)){const r=m.getBoundingClientRect();
  const away=Math.hypot(Math.max(r.left-e.clientX,0,e.clientX-r.right),Math.max(r.top-e.clientY,0,e.clientY-r.bottom));
  if(away<least){least=away;best=text}}
 tip.hidden=!best;if(best){tip.textContent=best;
  tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=e.clientY+16+'px'}});
addEventListener('hashchange',show);document.documentElement.classList.add('js');show();
""".replace("NEXT", NEXT)
_INLINE = (  # of text whose <, > and & are escaped
    (re.compile(r"!\[([^]]*)]\(([^)]+)\)"), r'<img alt="\1" src="\2">'),
    (re.compile(r"\[([^]]*)]\(([\w.,=+-]+)\.md\)"), r'<a href="#\2">\1</a>'),
    (re.compile(r"\[([^]]*)]\(([^)]+)\)"), r'<a href="\2">\1</a>'),
    (re.compile(r"\*\*(.+?)\*\*"), r"<b>\1</b>"),
    (re.compile(r"(?<![\w*])\*(?=\S)([^*\n]+)(?<=\S)\*(?![\w*])"), r"<i>\1</i>"),
    (re.compile(r"&lt;br&gt;"), "<br>"),
)
_PICTURE = re.compile(r"!\[([^]]*)]\(figures/([^)]+)\)")


@dataclass(frozen=True)
class _Shared:
    """What many figures have in common, once: hatches by their id, and styles with the class that stands for each."""

    hatches: dict[str, str]
    styles: dict[str, str]

    @property
    def classes(self) -> str:
        return "\n".join(f".{name}{{{style}}}" for style, name in self.styles.items())

    def without(self, svg: str, prefix: str) -> str:
        """The figure without them, and with ids that are no other figure's."""
        for name, text in re.findall(r'(?s)(?=<pattern id="(\w+)")(<pattern.*?</pattern>)', svg):
            self.hatches[name] = text
        svg = re.sub(r"(?s)<pattern.*?</pattern>", "", svg)
        svg = re.sub(r'<g id="\w+"', "<g", svg)
        svg = re.sub(r'style="([^"]*)"', lambda found: f'class="{self._class(found[1])}"', svg)
        return re.sub(r'(\bid="|url\(#|href="#)(\w+)', lambda found: self._renamed(found, prefix), svg)

    def _class(self, style: str) -> str:
        return self.styles.setdefault(style, f"s{len(self.styles)}")

    def _renamed(self, found: re.Match[str], prefix: str) -> str:
        return found[0] if found[2] in self.hatches else f"{found[1]}{prefix}{found[2]}"


def document(pages: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """The whole file.

    Args:
        pages: name -> markdown, the index first; a link to `name.md` leads there.
        figures: file name of a picture -> the <svg> that takes its place.
    """
    shared = _Shared({}, {})
    alone = {name: shared.without(svg, f"f{number}-") for number, (name, svg) in enumerate(sorted(figures.items()))}
    sections = "\n".join(
        f'<section id="{html.escape(name)}">\n{"".join(_blocks(text.splitlines(), alone))}</section>'
        for name, text in pages.items()
    )
    first = next(iter(pages))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>mini-infer: reports</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{shared.classes}</style></head>\n'
        f'<body><nav><a href="#{first}">All reports</a></nav>\n'
        f'<svg width="0" height="0" style="position:absolute"><defs>{"".join(shared.hatches.values())}</defs></svg>\n'
        f"{sections}\n"
        f'<div id="tip" hidden></div><script>{SCRIPT}</script></body></html>\n'
    )


def _blocks(lines: Sequence[str], figures: Mapping[str, str]) -> Iterator[str]:
    """A block of markdown after the other."""
    at = 0
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if line.startswith("```"):
            fence = re.match("`+", line).group()  # type: ignore[union-attr]
            while lines[end].strip() != fence:
                end += 1
            yield f"<pre>{html.escape(chr(10).join(lines[at + 1 : end]))}</pre>\n"
            end += 1
        elif line.startswith("|"):
            end = _end(lines, at, "|")
            yield _table(lines[at:end])
        elif line.lstrip().startswith("- "):
            while end < len(lines) and lines[end].strip() and not lines[end].startswith(("|", "#", "<")):
                end += 1
            yield _list(lines[at:end])
        elif line.startswith(("<details>", "</details>")):
            yield line + "\n"
        elif picture := _PICTURE.fullmatch(line):
            yield f"<figure>{figures.get(picture[2], html.escape(picture[1]))}</figure>\n"
        elif heading := re.match(r"(#+) (.*)", line):
            yield f"<h{len(heading[1])}>{_inline(heading[2])}</h{len(heading[1])}>\n"
        elif line.startswith("> "):
            yield f"<blockquote>{_inline(line[2:])}</blockquote>\n"
        elif line.strip() and not line.startswith("<!--"):
            while end < len(lines) and lines[end].strip() and not lines[end].startswith(("|", "```", "<", "#", "> ")):
                end += 1
            yield f"<p>{_inline(' '.join(lines[at:end]))}</p>\n"
        at = end


def _table(lines: Sequence[str]) -> str:
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in (lines[0], *lines[2:])]
    cells = [[_inline(cell.strip().replace("\\|", "|")) for cell in row] for row in rows]
    head, *body = ("".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in _tagged(cells))
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>\n"


def _tagged(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, Sequence[str]]]:
    for index, row in enumerate(rows):
        yield "td" if index else "th", row


def _list(lines: Sequence[str]) -> str:
    """Of one level, or two."""
    parts, deep = [], False
    for line in lines:
        bullet = re.match(r"( *)- (.*)", line)
        if bullet is None:  # the last item goes on
            parts.append(f" {_inline(line.strip())}")
            continue
        inner = len(bullet[1]) >= 2
        parts.append("<ul>" if inner and not deep else "</ul>" if deep and not inner else "")
        parts.append(f"<li>{_inline(bullet[2])}")
        deep = inner
    return f"<ul>{''.join(parts)}{'</ul>' if deep else ''}</ul>\n"


def _inline(text: str) -> str:
    """Code is left alone; everything else of a line."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"<code>{html.escape(p[1:-1])}</code>" if p.startswith("`") and len(p) > 1 else _marked(p) for p in pieces
    )


def _marked(text: str) -> str:
    text = html.escape(text, quote=False)
    for pattern, to in _INLINE:
        text = pattern.sub(to, text)
    return text


def _end(lines: Sequence[str], at: int, start: str) -> int:
    while at < len(lines) and lines[at].startswith(start):
        at += 1
    return at
