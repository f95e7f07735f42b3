"""How far the code has gone on since a result was measured, by git's own history."""

import subprocess
from dataclasses import replace

import pytest
from made_up import result

from experiments.lab.show.pages import moved
from experiments.lab.store.runs import commits_since


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
        path.write_text((path.read_text() if path.exists() else "") + "more\n")
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


def test_where_git_cannot_tell_nobody_says_that_it_can(repository, tmp_path_factory):
    head = git(repository, "rev-parse", "HEAD")
    assert commits_since(measured("0" * 40), repository) is None  # of another clone
    assert commits_since(measured(None), repository) is None
    assert commits_since(measured(head, code=()), repository) is None
    assert commits_since(measured(head), tmp_path_factory.mktemp("empty")) is None


def test_the_words_for_it():
    info = result().info
    assert [moved(info, lambda _, n=n: n) for n in (None, 0, 1, 12)] == [
        "no git history here", "as measured", "1 commit since", "12 commits since",
    ]  # fmt: skip
