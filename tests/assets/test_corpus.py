from __future__ import annotations

from pathlib import Path

import pytest

from mini_infer.assets.corpus import (
    HELD_OUT_MODULES,
    TrainingTexts,
    copy_windows,
    load_corpus,
    report,
    table_share,
    write_heldout,
)
from mini_infer.core.errors import ConfigError


def test_splits_are_disjoint_and_drop_what_would_leak(library: Path) -> None:
    corpus = load_corpus(library)
    paths = [{source.path for source in part} for part in (corpus.train, corpus.validation, corpus.heldout)]
    assert paths[2] == set(HELD_OUT_MODULES)
    assert not paths[0] & paths[1]
    assert not paths[0] & paths[2]
    assert len(paths[0] | paths[1]) == 40  # the part_* modules, and nothing else
    assert corpus.dropped == {
        "duplicate": 1,
        "empty": 1,
        "not UTF-8 Python": 2,
        "shares a passage with a held-out module": 1,
        "table of literals": 1,
        "test of a held-out module": 2,
    }


def test_no_passage_of_a_held_out_module_is_learned(library: Path) -> None:
    corpus = load_corpus(library)
    heldout = set().union(*(copy_windows(source.text) for source in corpus.heldout))
    assert heldout
    assert all(heldout.isdisjoint(copy_windows(source.text)) for source in corpus.train + corpus.validation)


def test_texts_that_are_read_one_by_one_are_those_of_the_split(library: Path) -> None:
    corpus = load_corpus(library)
    texts = TrainingTexts(library, corpus.heldout)
    found = [texts[index] for index in range(len(texts))]
    train = {source.text for source in corpus.train}
    assert train < {*found}
    assert len({*found} - train - {""}) <= corpus.dropped["duplicate"]
    assert "" in found, "what is left out of the split"


def test_split_is_deterministic_and_its_hash_names_the_text(library: Path, tmp_path: Path) -> None:
    first = report(load_corpus(library))
    assert report(load_corpus(library)) == first
    for path in library.rglob("*.py"):
        copy = tmp_path / path.relative_to(library)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert report(load_corpus(tmp_path)) == first
    (tmp_path / "pkg/part_0.py").write_text("changed = True\n")
    assert report(load_corpus(tmp_path)).sha256 != first.sha256


def test_a_folder_that_is_no_standard_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks the held-out modules bisect\.py"):
        load_corpus(tmp_path)


def test_heldout_modules_are_copied_verbatim_with_their_licence(library: Path, tmp_path: Path) -> None:
    write_heldout(load_corpus(library), library, tmp_path)
    assert (tmp_path / "csv.py.txt").read_text() == (library / "csv.py").read_text()
    assert (tmp_path / "LICENSE.txt").read_text() == "A licence.\n"
    assert len(list(tmp_path.iterdir())) == len(HELD_OUT_MODULES) + 1


def test_table_share_counts_digits_and_escapes() -> None:
    assert table_share("ab12") == 0.5
    assert table_share(r"\x41\u00e9zz") == pytest.approx(10 / 12)
    assert table_share("") == 0.0
