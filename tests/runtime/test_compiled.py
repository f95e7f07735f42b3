"""Compiled modules never stand for sources that have changed."""

from pathlib import Path

import pytest

from mini_infer.core.compiled import LIST, PACKAGE, in_use, record, require_current


def test_modules_compiled_before_their_source_changed_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "plan.py"
    source.write_text("a = 1")
    require_current(tmp_path)
    (tmp_path / LIST).write_text(record(["plan.py"], tmp_path))
    source.touch()
    require_current(tmp_path)
    for change in (lambda: source.write_text("a = 2"), source.unlink):
        change()
        with pytest.raises(
            ImportError, match=r"before plan\.py changed: `make compiled` does it anew, and `make interp"
        ):
            require_current(tmp_path)


def test_a_source_that_is_not_compiled_is_what_runs() -> None:
    assert in_use() == (PACKAGE / LIST).exists()


def test_what_is_compiled_is_there() -> None:
    package = Path(__file__).parents[2]
    text = (package / "ops" / "compile.py").read_text()
    modules = text.partition('MODULES = """')[2].partition('"""')[0].split()
    assert len(modules) > 10
    assert all((package / "mini_infer" / f"{module}.py").is_file() for module in modules)
