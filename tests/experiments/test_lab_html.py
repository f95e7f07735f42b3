"""All reports as one HTML file that needs nothing else."""

import re
from html.parser import HTMLParser

import pytest
from made_up import engine_steps, requests, result

from experiments.lab.show import report
from experiments.lab.show.html import document
from experiments.lab.store import result as store

VOID = {"meta", "br", "img", "path", "use", "rect"}


class Checked(HTMLParser):
    """Every element that is opened is closed, in the order of a tree."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.seen = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.seen.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, tag


def of(text, figures=None):
    return document({"README": text}, figures or {})


@pytest.mark.parametrize(
    ("markdown", "markup"),
    [
        ("# A `b` title", "<h1>A <code>b</code> title</h1>"),
        ("one **two** *three*\nfour", "<p>one <strong>two</strong> <em>three</em>\nfour</p>"),
        ("2 * 3 * 4 and a_b_c", "<p>2 * 3 * 4 and a_b_c</p>"),
        ("a < b & `<c>`", "<p>a &lt; b &amp; <code>&lt;c&gt;</code></p>"),
        ("see [it](other.md)", '<p>see <a href="#other">it</a></p>'),
        ("see [it](../docs/metrics.md)", '<a href="../docs/metrics.md">it</a>'),
        ("see [csv](../results/x.csv)", '<p>see <a href="../results/x.csv">csv</a></p>'),
        ("> **BAD**, on cpu", "<blockquote>\n<p><strong>BAD</strong>, on cpu</p>\n</blockquote>"),
        ("- a\n- b\n  - c\n- d", "<li>b\n<ul>\n<li>c</li>\n</ul>\n</li>\n<li>d</li>\n</ul>"),
        ("````python\nx = `1` # ```\n````\nafter", "x = `1` # ```\n</code></pre>\n<p>after</p>"),
        ("| a | b |\n| --- | --- |\n| 1<br>2 | x \\| y |", "<td>1<br>2</td>\n<td>x | y</td>"),
        ("<details><summary>a</summary>\n\n- b\n\n</details>", "<details><summary>a</summary>\n<ul>\n<li>b</li>"),
        ("a `b` of <name>", "of &lt;name&gt;"),
        ("<!-- a mark -->", ""),
    ],
)
def test_what_pages_use_of_markdown(markdown, markup):
    (section,) = re.findall(r"(?s)<section id=\"README\">\n(.*?)</section>", of(markdown))
    assert markup in section
    Checked(of(markdown))


def test_figures_share_their_hatches_and_styles():
    figure = '<svg><use href="#{0}" style="fill:url(#{0}h)"/><pattern id="{0}h"><path/></pattern></svg>'
    pages = "![A](figures/a.png)\n\n![B](figures/b.png)"
    text = of(pages, {"a.png": figure.format("f0"), "b.png": figure.format("f1")})
    assert text.count("<pattern") == 1
    assert text.count(".s0{fill:url(#hatch0)}") == 1
    assert text.count('class="s0"') == 2
    assert 'href="#f0"' in text
    assert 'href="#f1"' in text


def test_a_picture_that_is_not_there_leaves_its_name():
    assert "<p>A &lt;b&gt;</p>" in of("![A <b>](figures/none.png)")


@pytest.mark.slow
def test_the_file_has_every_page_and_picture_and_nothing_from_elsewhere(tmp_path):
    names = {"base": 'a "quoted" <name>', "new": "on"}
    steps = engine_steps("base", 30) + engine_steps("new", 30)
    store.write(tmp_path / "results", result(steps=steps, requests=requests(), variants=names))
    store.write(tmp_path / "results", result("other"))
    report.rebuild(tmp_path / "results", tmp_path / "reports")
    text = (tmp_path / "reports/index.html").read_text()
    found = Checked(text)
    assert found.open == []
    assert {"README", "demo", "other"} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids)), "ids are the document's"
    shown = re.findall(r"]\(figures/", (tmp_path / "reports/demo.md").read_text())
    assert len(shown) == 4
    assert found.seen.count("svg") == 4 + 2 + 1, "and one for the hatches of all"
    assert "img" not in found.seen
    inside = {link[1:] for link in found.links if link.startswith("#")}
    assert inside <= set(found.ids)
    assert not [link for link in found.links if "://" in link]
    assert "request-" not in text
    assert "base-0: prefill" in text  # what the pointer is told
    before = text
    report.rebuild(tmp_path / "results", tmp_path / "reports", only="demo")  # a run makes its own page alone
    assert (tmp_path / "reports/index.html").read_text() == before
