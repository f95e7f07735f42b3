"""The documents are true: fields, patches, links, tables, and README in both languages."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from experiments.lab.config.ablation_spec import AblationSpec
from experiments.lab.config.spec import VARIANT_KEYS, ClaimSpec, PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge.metrics import SLO
from experiments.lab.measure.rate_search import RateSearch
from mini_infer.core.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "mini_infer/assets/README.md"])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_each_field_of_an_experiment_is_described() -> None:
    text = (ROOT / "docs" / "experiment_yaml.md").read_text()
    sections = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))

    def described(section: str) -> set[str]:
        return set(re.findall(r"^\| `(\w+)` \|", sections[section], re.MULTILINE))

    assert described("experiment") == {"_target_"} | names(AblationSpec)
    assert described("Variants") == set(VARIANT_KEYS)
    assert described("Claims") == names(ClaimSpec)
    assert described("Plots") == names(PanelSpec)
    assert all(f"`{name}`" in sections["Plots"] for name in names(PlotSpec))
    (kinds,) = re.findall(r"^\| `kind` \| (.*) \|$", sections["Plots"], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", kinds)) == {kind.value for kind in PanelKind}
    assert described("SLO and search") == names(SLO) | names(RateSearch)


def test_each_page_stands_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    named = set(re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE))
    docs = ROOT / "docs"
    own = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert named == own | {"index.md", "contributing.md", "examples.md"}


QUOTE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
QUOTES = [(page.relative_to(ROOT).as_posix(), *quote) for page in PAGES for quote in QUOTE.findall(page.read_text())]


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _, _ in QUOTES))
def test_code_on_a_page_is_that_of_its_file(page: str) -> None:
    for _, file, code in (quote for quote in QUOTES if quote[0] == page):
        assert code in (ROOT / file).read_text(), f"{file} reads otherwise now:\n{code}"


def test_each_mechanism_shows_its_file_and_the_picture_of_its_report() -> None:
    for page in {*(ROOT / "docs" / "mechanisms").glob("*.md")} - {ROOT / "docs" / "mechanisms" / "index.md"}:
        text = page.read_text()
        assert QUOTE.search(text), page
        assert re.search(r"!\[[^]]+\]\(\.\./\.\./reports/figures/[^)]+\.png\)", text), page
        assert "experiment=" in text, page


def test_what_is_said_to_make_it_fast_can_be_set() -> None:
    """Settings of a line that stand together are meant together."""
    setting = r"\w+\.\w+=[^`\s]+"
    spans = re.findall(f"`({setting}(?: {setting})*)`", (ROOT / "docs" / "performance.md").read_text())
    assert len(spans) > 5
    for span in spans:
        tree: dict[str, dict[str, object]] = {}
        for section, key, value in re.findall(r"(\w+)\.(\w+)=(\S+)", span):
            tree.setdefault(section, {})[key] = yaml.safe_load(value)
        EngineConfig.from_dict(tree)


def exercises() -> list[tuple[str, str, str]]:
    """(title, patch, command) of each."""
    text = (ROOT / "docs" / "exercises.md").read_text()
    return re.findall(r"^## \d+\. ([^\n]+)\n.*?```diff\n(.*?)```\n\n```\n([^\n]+)\n```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("title", "patch", "command"), exercises(), ids=[title for title, _, _ in exercises()])
def test_an_exercise_can_be_done(title: str, patch: str, command: str) -> None:
    check = ["git", "apply", "--check", "-"]
    done = subprocess.run(check, cwd=ROOT, input=patch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{title}: {done.stderr}"
    for name in re.findall(r"experiment=(\w+)", command):
        assert (ROOT / "conf" / "experiment" / f"{name}.yaml").is_file()
    for path in re.findall(r"tests/\S+", command):
        assert (ROOT / path).exists()


def test_there_are_ten_exercises() -> None:
    assert len(exercises()) == 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_and_tables_are_whole(page: Path) -> None:
    text = re.sub(FENCE, "", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if ":" not in target:
            assert (page.parent / target).exists(), target
    blocks = text.split("\n\n")
    for block in blocks:
        rows = [line for line in block.splitlines() if line.startswith("|")]
        if rows:
            assert re.fullmatch(r"[|:\- ]+", rows[1] if len(rows) > 1 else ""), f"a table without a head: {rows[0]}"
            widths = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) for row in rows}
            assert len(widths) == 1, f"rows of unequal length below {rows[0]}"


def test_the_torch_that_readme_installs_is_the_one_that_make_wants() -> None:
    (named,) = set(re.findall(r"torch==[\d.]+", (ROOT / "README.md").read_text()))
    assert named in (ROOT / "constraints.txt").read_text().splitlines()


class TestReadmeInChinese:
    """Its words are a translator's; what can be counted is README's."""

    ENGLISH = (ROOT / "README.md").read_text()
    CHINESE = (ROOT / "README.zh.md").read_text()
    RESULTS = re.compile(r"<!-- results: begin.*?results: end -->", re.DOTALL)

    @staticmethod
    def headings(text: str) -> list[str]:
        return re.findall(r"^(#+) ", re.sub(FENCE, "", text), re.MULTILINE)

    @staticmethod
    def commands(text: str) -> list[list[str]]:
        blocks = [block.splitlines()[:-1] for block in FENCE.findall(text)]
        return [[re.sub(r"\s+#(?! @).*", "", line).rstrip() for line in block] for block in blocks]

    def sections(self, text: str) -> list[list[str]]:
        """Figures of each, and where its links lead."""
        plain = re.sub(FENCE, "", re.sub(self.RESULTS, "", text))
        parts = re.split(r"^#+ .*$", plain, flags=re.MULTILINE)
        return [self.figures(part) for part in parts]

    @staticmethod
    def figures(part: str) -> list[str]:
        links = [posixpath.normpath(target) for target in re.findall(r"\]\(([^)#]+)\)", part)]
        words = re.sub(r"\]\([^)]*\)", "]", part)
        code = re.findall(r"`[^`]+`", re.sub(r"\s+", " ", words))
        numbers = re.findall(r"(?<![\w.-])\d[\d.,]*(?<![.,])", re.sub(r"`[^`]+`", "", words))
        return sorted([*(link for link in links if "README" not in link), *numbers, *code])

    def test_headings(self) -> None:
        assert self.headings(self.CHINESE) == self.headings(self.ENGLISH)

    def test_commands(self) -> None:
        assert self.commands(self.CHINESE) == self.commands(self.ENGLISH)

    def test_figures_code_and_links(self) -> None:
        for number, (ours, theirs) in enumerate(
            zip(self.sections(self.CHINESE), self.sections(self.ENGLISH), strict=True)
        ):
            assert ours == theirs, f"section {number}"
