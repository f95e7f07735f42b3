"""All pages as one HTML file, made from their markdown: no server, and figures that answer to the pointer."""

import html
import re
from collections.abc import Mapping

from markdown_it import MarkdownIt

from experiments.lab.show.figures.frame import NEXT

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1060px;padding:0 16px 60px;color:#202020}
nav{position:sticky;top:0;background:#fff;padding:8px 0;border-bottom:1px solid #ddd;z-index:1}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
td,th{border:1px solid #ddd;padding:4px 8px;text-align:left;vertical-align:top}th{background:#f4f4f4}
pre,code{background:#f4f4f4;font-size:13px}pre{padding:8px;overflow-x:auto}
blockquote{margin:8px 0;padding:4px 12px;border-left:4px solid #D55E00;background:#fff4ec}
svg{max-width:100%;height:auto}svg text{font-family:"DejaVu Sans",Verdana,sans-serif;white-space:pre}
summary{cursor:pointer;font-weight:600;margin:6px 0}
section{scroll-margin-top:60px}.js section{display:none}.js section.on{display:block}
#tip{position:fixed;pointer-events:none;background:#202020;color:#fff;padding:3px 8px;border-radius:4px;font-size:13px}
"""
SCRIPT = """
const tip=document.getElementById('tip'),known=new WeakMap(),NEAR=14;
function show(){const all=[...document.querySelectorAll('section')];
 const wanted=all.find(s=>s.id===decodeURIComponent(location.hash.slice(1)))||all[0];
 all.forEach(s=>s.classList.toggle('on',s===wanted));scrollTo(0,0)}
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
_TAGS = re.compile(r"</?(details|summary)>|<br>|<!--")  # what pages use of HTML
_PAGE = re.compile(r"([\w.,=+-]+)\.md")  # beside the others
_MARKDOWN = MarkdownIt().enable("table")


def document(pages: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """The whole file.

    Args:
        pages: name -> markdown, the index first; a link to `name.md` leads there.
        figures: file name of a picture -> the <svg> that takes its place, whose ids are no other figure's.
    """
    styles: dict[str, str] = {}  # what many figures have in common, once: with the class that stands for each
    hatches: dict[str, str] = {}  # likewise, with their ids

    def shared(svg: str) -> str:
        for name, hatch in re.findall(r'(?s)<pattern id="(\w+)"(.*?</pattern>)', svg):
            svg = svg.replace(name, hatches.setdefault(hatch, f"hatch{len(hatches)}"))
        svg = re.sub(r"(?s)<pattern.*?</pattern>", "", svg)
        return re.sub(r'style="([^"]*)"', lambda x: f'class="{styles.setdefault(x[1], f"s{len(styles)}")}"', svg)

    alone = {name: shared(svg) for name, svg in sorted(figures.items())}
    made = {html.escape(name): _section(text, alone) for name, text in pages.items()}
    sections = "\n".join(f'<section id="{name}">\n{section}</section>' for name, section in made.items())
    classes = "\n".join(f".{name}{{{style}}}" for style, name in styles.items())
    patterns = "".join(f'<pattern id="{name}"{hatch}' for hatch, name in hatches.items())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>mini-infer: reports</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{classes}</style></head>\n'
        f'<body><nav><a href="#{next(iter(pages))}">All reports</a></nav>\n'
        f'<svg width="0" height="0" style="position:absolute"><defs>{patterns}</defs></svg>\n'
        f"{sections}\n"
        f'<div id="tip" hidden></div><script>{SCRIPT}</script></body></html>\n'
    )


def _section(text: str, figures: Mapping[str, str]) -> str:
    """A page, in which others are sections of the same file, a figure is its <svg>, and unknown tags are text."""
    tokens = _MARKDOWN.parse(text)
    for token in (each for block in tokens for each in (block, *(block.children or ()))):
        if token.type == "link_open" and _PAGE.fullmatch(href := str(token.attrs["href"])):
            token.attrs["href"] = _PAGE.sub(r"#\1", href)
        elif token.type == "image":
            name = str(token.attrs["src"]).rpartition("/")[2]
            token.type, token.content = "html_inline", figures.get(name, html.escape(token.content))
        elif token.type in ("html_inline", "html_block") and not _TAGS.match(token.content):
            token.content = html.escape(token.content)
    return str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))
