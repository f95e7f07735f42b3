"""Compiled modules never stand for sources that have changed."""

import os
from pathlib import Path

import pytest

from mini_infer.core.compiled import LIST, require_current, sources


def test_modules_compiled_before_their_source_changed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.py").touch()
    require_current(tmp_path)
    assert sources(tmp_path) == []
    (tmp_path / LIST).write_text("plan.py\n")
    os.utime(tmp_path / "plan.py", (0, 0))
    require_current(tmp_path)
    assert sources(tmp_path) == ["plan.py"]
    os.utime(tmp_path / LIST, (1, 1))
    os.utime(tmp_path / "plan.py", (2, 2))
    with pytest.raises(
        ImportError, match=r"compiled before plan\.py changed: `make compiled` does it anew, and `make int"
    ):
        require_current(tmp_path)


def test_what_is_compiled_is_there() -> None:
    package = Path(__file__).parents[2]
    text = (package / "ops" / "compile.py").read_text()
    modules = text.partition('MODULES = """')[2].partition('"""')[0].split()
    assert len(modules) > 10
    assert all((package / "mini_infer" / f"{module}.py").is_file() for module in modules)
