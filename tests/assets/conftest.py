"""A small standard library on disk: every held-out module, training modules, and each kind of file that is dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from mini_infer.assets.corpus import HELD_OUT_MODULES

PASSAGE = "\n".join(f"    passage_line_{index} = compute_something_long({index}, 'text')" for index in range(6))


def module(name: str, functions: int = 6) -> str:
    return f'"""The {name} module."""\n\n' + "\n\n".join(
        f"def {name}_{index}(first, second):\n"
        f'    """Return the {name} of two numbers, number {index}."""\n'
        f"    total = first * second - len({name!r})\n"
        f"    return total\n"
        for index in range(functions)
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    files = {name: module(Path(name).stem) for name in HELD_OUT_MODULES}
    files["heapq.py"] += "\n\ndef passage():\n" + PASSAGE + "\n"
    files |= {f"pkg/part_{index}.py": module(f"part_{index}") for index in range(40)}
    files |= {
        "copied.py": "def other():\n" + PASSAGE + "\n",
        "test/test_heapq.py": module("check"),
        "test/test_csv/helper.py": module("helper"),
        "twin.py": module("part_3") + "\n\n",
        "table.py": "TABLE = [\n" + "    0x1f, 0x2e, 1234,\n" * 40 + "]\n",
        "broken.py": "def f(:\n",
        "blank.py": "\n",
        "site-packages/other.py": module("installed"),
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "latin.py").write_bytes(b"name = '\xe9'\n")
    (folder / "LICENSE.txt").write_text("A licence.\n")
    return folder
