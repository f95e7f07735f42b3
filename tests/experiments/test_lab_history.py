"""How far the code has gone on since a result was measured, by git's own history."""

import json
import subprocess
from dataclasses import replace

import pytest
from made_up import result

from experiments.lab.config import axes
from experiments.lab.show import pages
from experiments.lab.show.pages import moved
from experiments.lab.store.runs import asked_differently, commits_since


def git(folder, *arguments):
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    commit(tmp_path, "code.py", "other.py")
    return tmp_path


def commit(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + "# more\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "A change")
    return git(folder, "rev-parse", "HEAD")


def measured(at, code=("code.py",)):
    info = result().info
    return replace(info, code=code, provenance=replace(info.provenance, commit=at))


def test_only_commits_that_touched_the_code_count(repository):
    info = measured(git(repository, "rev-parse", "HEAD"))
    assert commits_since(info, repository) == 0
    commit(repository, "other.py")
    assert commits_since(info, repository) == 0
    commit(repository, "code.py", "other.py")
    git(repository, "rm", "-q", "code.py")
    git(repository, "commit", "-qm", "It is gone")
    assert commits_since(info, repository) == 2
    assert commits_since(measured(info.provenance.commit, code=("code.py", "other.py")), repository) == 3


def test_a_change_that_was_taken_back_does_not_count(repository):
    info = measured(git(repository, "rev-parse", "HEAD"), code=("code.py", "other.py"))
    commit(repository, "code.py", "other.py")
    for name, left in (("code.py", 1), ("other.py", 0)):
        git(repository, "checkout", "-q", info.provenance.commit, "--", name)
        git(repository, "commit", "-qm", "As before")
        assert commits_since(info, repository) == left


def ask(folder, **files):
    (folder / "conf/experiment").mkdir(parents=True, exist_ok=True)
    for name, said in files.items():
        (folder / f"conf/experiment/{name}.yaml").write_text(json.dumps(said))
    axes.said.cache_clear()  # which knows what files said, as they do not change in the middle of a run
    return commit(folder, "other.py")


def test_a_question_that_was_put_otherwise_counts_as_code_does(repository):
    demo = {"defaults": ["_parent", {"override /scale": "x"}], "workload": {"count": 4}}
    info = measured(ask(repository, demo=demo, _parent={"engine": {"seed": 1}}, other={}))
    assert commits_since(info, repository) == 0
    ask(repository, other={"engine": {"seed": 2}})
    assert commits_since(info, repository) == 0
    ask(repository, _parent={"engine": {"seed": 2}})
    assert commits_since(info, repository) == 1
    ask(repository, demo={**demo, "workload": {"count": 5}})
    assert commits_since(info, repository) == 2


def test_what_is_asked_of_another_scale_does_not_count(repository):
    tiny, large = {"workload": {"count": 4}}, {"workload": {"count": 100}}
    info = replace(measured(ask(repository, demo={"scales": {"tiny": tiny, "7b": large}})), scale="tiny")
    ask(repository, demo={"scales": {"tiny": tiny, "7b": {"workload": {"count": 200}}}})
    assert commits_since(info, repository) == 0
    assert commits_since(replace(info, scale="7b"), repository) == 1
    ask(repository, demo={"workload": {"count": 4}, "scales": {"tiny": None, "7b": large}})
    assert commits_since(info, repository) == 0, "said in another place"
    prose = {"experiment": {"limits": ["It is slow."], "title": "How slow?"}}
    ask(repository, demo={"workload": {"count": 4}, **prose, "scales": {"tiny": None, "7b": large}})
    assert commits_since(info, repository) == 0, "said of the same numbers"
    (repository / "conf/scale").mkdir()
    (repository / "conf/scale/7b.yaml").write_text("engine: {seed: 2}")
    ask(repository)
    assert commits_since(replace(info, scale="7b"), repository) == 4, "a scale's file is part of what is asked"
    assert commits_since(info, repository) == 0
    ask(repository, demo={"scales": {"tiny": {"workload": {"count": 5}}}})
    assert commits_since(info, repository) == 4
    assert commits_since(replace(info, scale="my-model"), repository) == 4, "of which it says nothing"


TTFT, RATE = ({"metric": m, "variant": "new", "at_most": 9, "source": "x"} for m in ("ttft_p50_ms", "itl_p99_ms"))


@pytest.mark.parametrize(
    ("had", "asked", "changes", "differs"),
    [
        ([TTFT, RATE], [TTFT, RATE], {}, False),
        ([TTFT], [{**TTFT, "source": "another word for it"}], {}, False),
        ([TTFT], [{**TTFT, "at_most": 8}], {}, True),
        ([TTFT], [TTFT, RATE], {}, True),
        ([TTFT], [TTFT, RATE], {"changed": {"workload.hit_rate": "0"}}, False),  # at other points
        ([TTFT], [TTFT, RATE], {"notes": ("Measured on a CPU. Left out: 1 claim with bounds for a GPU.",)}, False),
        ([TTFT], [RATE], {"changed": {"workload.hit_rate": "0"}}, True),
        ([TTFT], [RATE], {"changed": {"experiment.claims.0.metric": "ttft_p50_ms"}}, False),  # as it was typed
        ([TTFT], [RATE], {"scale": "my-model"}, False),  # of which the experiment says nothing
    ],
)
def test_a_result_knows_that_other_claims_are_made_by_now(tmp_path, had, asked, changes, differs):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    text = json.dumps({"defaults": ["_parent"], "scales": {"tiny": {"experiment": {"claims": asked}}, "7b": None}})
    (tmp_path / "conf/experiment/demo.yaml").write_text(text)
    (tmp_path / "conf/experiment/_parent.yaml").write_text(json.dumps({"experiment": {"claims": had}}))
    for scale, expected in (("tiny", differs), ("7b", False)):  # which has its parent's
        info = replace(result(config={"experiment": {"claims": had}}).info, **{"scale": scale, **changes})
        assert asked_differently(info, tmp_path) is expected


def test_the_page_says_so(monkeypatch):
    monkeypatch.setattr(pages, "asked_differently", lambda info: True)
    changed = "its claims have changed since"
    assert pages.moved(result().info, lambda _: 2) == ["2 commits since", changed]
    assert f"| as measured, {changed} |" in pages.screen(result(), lambda _: 0)
    assert f"2 supported, {changed} |" in pages.index_page([result()], (), lambda _: 0)
    (row,) = pages.readme_with(f"{pages.BEGIN}\n{pages.END}", [result(hardware="h200")], lambda _: 2).splitlines()[3:-1]
    assert row.endswith(f"| 2026-01-01, h200, 2 commits since, {changed} |")


def test_where_git_cannot_tell_nobody_says_that_it_can(repository, tmp_path_factory):
    head = git(repository, "rev-parse", "HEAD")
    assert commits_since(measured("0" * 40), repository) is None  # of another clone
    assert commits_since(measured(None), repository) is None
    assert commits_since(measured(head, code=()), repository) is None
    assert commits_since(measured(head), tmp_path_factory.mktemp("empty")) is None


def test_the_words_for_it():
    info = result().info
    assert [moved(info, lambda _, n=n: n) for n in (None, 0, 1, 12)] == [
        [], [], ["1 commit since"], ["12 commits since"],
    ]  # fmt: skip
    dirty = replace(info, provenance=replace(info.provenance, clean=False))
    uncommitted = "measured with uncommitted changes"
    assert [moved(dirty, lambda _, n=n: n) for n in (0, 2)] == [[uncommitted], ["2 commits since", uncommitted]]
    assert "| no git history here |" in pages.screen(result(), lambda _: None)
