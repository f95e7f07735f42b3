"""All pages as one HTML file, made from their markdown: no server, and figures that answer to the pointer."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path

from markdown_it import MarkdownIt

from experiments.lab.show.figures.frame import NEXT

STYLE, SCRIPT = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
_TAGS = re.compile(r"</?(details|summary)>|<br>|<!--")  # what pages use of HTML
_PAGE = re.compile(r"([\w.,=+-]+)\.md")  # beside the others
_MARKDOWN = MarkdownIt().enable("table")


def document(pages: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """The whole file. `pages`: name -> markdown, the index first; a link to `name.md` leads there. `figures`: file name
    of a picture -> the <svg> that takes its place, whose ids are no other figure's."""
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
        f'<meta name="viewport" content="width=device-width"><style>\n{STYLE}{classes}</style></head>\n'
        f'<body><nav><a href="#{next(iter(pages))}">All reports</a></nav>\n'
        f'<svg width="0" height="0" style="position:absolute"><defs>{patterns}</defs></svg>\n'
        f"{sections}\n"
        f'<div id="tip" hidden></div><script>\n{SCRIPT.replace("NEXT", NEXT)}</script></body></html>\n'
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
