"""Reports: `reports/<page>.md` with its figures, and the index, from result files alone: again is byte for byte."""

from __future__ import annotations

import re
import textwrap
from itertools import chain, groupby
from pathlib import Path

from experiments.lab.show import sweeps, wording
from experiments.lab.show.answer import flags, sentence
from experiments.lab.show.figures import frame, gallery
from experiments.lab.show.grids import SCREEN, Sheet
from experiments.lab.show.html import document
from experiments.lab.show.older import in_todays_words
from experiments.lab.show.pages import MARK, index_page, readme_with, report_page
from experiments.lab.store import result as store
from experiments.lab.store.runs import Since, commits_since

INDEX = "README.md"
HTML = "index.html"  # a build output, ignored by git: some megabytes, new ones with every run
TESTS = "gpu_tests.md"  # which experiments/gpu_tests.py writes
SCREEN_ROWS = 24  # of tables on a terminal


def rebuild(results: Path, reports: Path, only: str | None = None, since: Since = commits_since) -> list[Path]:
    """Writes the report of every page with results (or of `only` one), the table in the README beside `reports`,
    and the index, which comes last; where all are made, also removes reports and figures that it made earlier and whose
    results are gone, and writes all pages as one HTML file.

    Raises StoreError where a result file (of `only`, if given) is damaged, after all that can be made is made."""
    damaged: dict[Path, store.StoreError] = {}
    found = store.read_all(results, damaged)
    if not found and not damaged:
        raise store.StoreError(f"{results} holds no results yet: run an experiment first")
    found = [in_todays_words(r) for r in store.without_beside(found)]
    page_of = lambda result: store.page_name(result.info)  # noqa: E731
    found = sweeps.with_beside([r for _, group in groupby(found, key=page_of) for r in sweeps.joined(list(group))])
    ages = {store.run_path(r.info): max(map(since, r.runs or (r.info,)), key=lambda age: age or 0) for r in found}
    known = lambda info: ages[store.run_path(info)]  # noqa: E731
    figures, index, readme = reports / gallery.FIGURES, reports / INDEX, reports.parent / INDEX
    figures.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}  # of pages, by their names
    drawn: dict[str, str] = {}  # figures as <svg>, by their names
    stale: set[str | None] = set()  # pages whose other figures, made earlier, go
    for page, group in groupby((r for r in found if only in (None, page_of(r))), key=page_of):
        own = list(group)
        for picture in (picture for r in own for picture in chain(*gallery.of(r))):
            figure = picture.draw()
            store.write_atomic({figures / picture.file: frame.png(figure, page)})
            drawn[picture.file] = frame.svg(figure, f"f{len(drawn)}") if only is None else ""
        missing = [path for path in damaged if path.parts[:2] == store.run_path(own[0].info).parts[:2]]
        stale |= set() if missing else {page}
        text = report_page(own, missing, known)
        if reports.parent.name == "trial":  # a folder deeper below the code and the docs that pages link to
            text = re.sub(r"\]\(\.\./(?!results/)", "](../../", text)
        texts[page] = text
        store.write_atomic({reports / f"{page}.md": text})
    tests = {path.stem: path.read_text(encoding="utf-8") for path in [reports / TESTS] if path.is_file()}
    came = "".join(f"[Tests on GPUs]({TESTS}): {text.splitlines()[2]}" for text in tests.values())
    contents = index_page(found, damaged, known, came)
    store.write_atomic({index: contents})
    # A page whose results cannot be read is known, too: which scale is the default one only the file itself would say.
    pages_of = {path: (path.parts[0], ".".join(path.parts[:2])) for path in damaged}
    if only is None:
        pages = set(map(page_of, found)).union(*pages_of.values())
        for path in reports.glob("*.md"):
            if path != index and path.stem not in pages and path.read_bytes().startswith(MARK.encode()):
                path.unlink()
        stale |= {frame.made_for(path) for path in figures.glob("*.png")} - {None, *pages}
        store.write_atomic({reports / HTML: document({index.stem: contents, **texts, **tests}, drawn)})
    for path in figures.glob("*.png"):
        if path.name not in drawn and frame.made_for(path) in stale:
            path.unlink()
    before = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if (made := readme_with(before, found, known)) != before:
        store.write_atomic({readme: made})
    errors = [str(error) for path, error in damaged.items() if only is None or only in pages_of[path]]
    if errors:
        raise store.StoreError("\n".join(["reports were made without these results:", *errors]))
    return [*(reports / f"{page}.md" for page in texts), index]


def figure_paths(reports: Path, result: store.Result) -> list[Path]:
    """The figures that the report of this run shows; none of a run in a sweep, whose figures are the sweep's."""
    paths = (reports / gallery.FIGURES / picture.file for picture in chain(*gallery.of(result)))
    return [path for path in paths if path.is_file()]


def summary(result: store.Result) -> str:
    """The answer, the verdicts and the tables they rest on, for the terminal."""
    info, faults = result.info, len(result.faults)
    said = [sentence(result)]
    if absent := dict.fromkeys(info.variants[row.variant] for row in result.rows if row.is_absent):
        said.append(f"Absent: {', '.join(absent)}.")
    if faults:
        said.append(f"INVALID: {faults:,} of {len(result.rows):,} values.")
    lines = [*(_wrapped(flag, "  ! ") for flag in flags(result)), _wrapped(" ".join(said), "  "), ""]
    named = list(dict.fromkeys(claim.metric for claim in info.claims)) or list(info.metrics)[:1]
    grids = Sheet(result).grids(named)
    shown = grids if sum(len(grid.rows) for grid in grids) <= SCREEN_ROWS else Sheet(result).grids(named[:1])
    lines += [textwrap.indent(grid.text(), "  ") + "\n" for grid in shown]
    for line in wording.verdicts(result):
        text = f"{line.claim}: measured {line.measured}" + (f" ({line.why})" if line.why else "")
        lines.append(_wrapped(text, f"  {line.verdict:>12}  ", 16))
    return "\n".join(lines)


def _wrapped(text: str, start: str, indent: int = 2) -> str:
    return textwrap.fill(text, SCREEN, initial_indent=start, subsequent_indent=" " * indent)
