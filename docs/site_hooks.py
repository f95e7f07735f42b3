"""What mkdocs is told beside mkdocs.yml: README and CONTRIBUTING are pages, examples/ is one, and links from docs/ into
the repository lead to pages with the files, so that the site is whole without a network."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}  # page -> file of the repository
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]+)(#[^)]*)?\)")  # an interval in its text is no end
PICTURE = ".png"
EXAMPLES = "examples.md"  # a page of these notebooks, which are scripts
NOTEBOOKS = ("first_tokens", "scheduler_policy", "workload", "read_results", "server_and_clients")
CELL = re.compile(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", re.DOTALL | re.MULTILINE)
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"  # code, which would hide the pages that explain it
SHOWN = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.append(File.generated(config, EXAMPLES, content=_examples()))
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_placed((ROOT / source).read_text("utf-8"), source, page)))
    wanted: set[str] = set()
    for file in list(files):
        if file.is_documentation_page() and file.src_uri != EXAMPLES:
            source = PAGES.get(file.src_uri, f"docs/{file.src_uri}")
            wanted |= _targets((ROOT / source).read_text("utf-8"), source)
    reports = [target for target in wanted if target.endswith(".md")]
    for target in reports:  # with their pictures
        wanted |= {t for t in _targets((ROOT / target).read_text("utf-8"), target) if t.endswith(PICTURE)}
    for target in sorted(wanted):
        path = ROOT / target
        if path.suffix == PICTURE:
            files.append(File.generated(config, f"files/{target}", abs_src_path=str(path)))
            continue
        if path.is_dir():
            text = "\n".join(f"- {entry.name}" for entry in sorted(path.iterdir()) if entry.name[0] not in "._")
        elif path.suffix == ".md":
            text = _placed(path.read_text("utf-8"), target, _page_of(target), known=wanted)
        elif path.suffix in SHOWN:
            text = f"```{SHOWN[path.suffix]}\n{path.read_text('utf-8')}\n```"
        else:
            continue
        head = "" if path.suffix == ".md" else UNSEARCHED
        files.append(File.generated(config, _page_of(target), content=f"{head}# {target}\n\n{text}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in (*PAGES, EXAMPLES) or page.file.src_uri.startswith("files/"):
        return markdown
    return _placed(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def _examples() -> str:
    """Prose and code of the notebooks' cells."""
    parts = [
        "# Examples\n",
        "Scripts whose cells (`# %%`) are those of a notebook: run `python examples/NAME.py`, or open it in an editor "
        "that knows them (VS Code, PyCharm, or Jupyter with jupytext). Tests run all of them.\n",
    ]
    for name in NOTEBOOKS:
        for prose, cell in CELL.findall((ROOT / "examples" / f"{name}.py").read_text("utf-8")):
            if prose:
                text = re.sub(r"^# ?", "", cell, flags=re.MULTILINE)
                parts.append(re.sub(r"^#", "##", text, flags=re.MULTILINE))
            else:
                parts.append(f"```python\n{cell.strip()}\n```\n")
    return "\n".join(parts)


def _placed(text: str, source: str, page: str, known: set[str] | None = None) -> str:
    """The text of a file of the repository, with its links as they are from that page. What is none of `known`
    (default: whatever there is) is no link."""

    def moved(link: re.Match[str]) -> str:
        target = _target(link, source)
        if target is None:
            return link[0]
        suffix = Path(target).suffix
        shown = (ROOT / target).is_dir() or suffix in (".md", PICTURE, *SHOWN)
        own = {file: name for name, file in PAGES.items()}
        inside = target.removeprefix("docs/") if target.startswith("docs/") else own.get(target)
        if inside and (ROOT / target).is_dir():
            inside += "/index.md"
        if not shown or not (inside or known is None or target in known):
            return link[1].lstrip("!")[1:-1]
        to = inside or (f"files/{target}" if suffix == PICTURE else _page_of(target))
        anchor = "" if known is not None else link[3] or ""
        return f"{link[1]}({posixpath.relpath(to, posixpath.dirname(page) or '.')}{anchor})"

    return re.sub(LINK, moved, text)


def _targets(text: str, source: str) -> set[str]:
    """Files of the repository outside docs/ that a text leads to."""
    found = {target for link in re.finditer(LINK, text) if (target := _target(link, source)) is not None}
    return {target for target in found if not target.startswith("docs/") and target not in PAGES.values()}


def _target(link: re.Match[str], source: str) -> str | None:
    """The file of the repository that a link leads to; None for one that leads elsewhere."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
    return path if ":" not in link[2] and (ROOT / path).exists() else None


def _page_of(target: str) -> str:
    return f"files/{target}" if target.endswith(".md") else f"files/{target}.md"
