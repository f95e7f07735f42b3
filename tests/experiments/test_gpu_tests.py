from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import gpu_tests

LOG = """<testsuites><testsuite timestamp="2026-11-29T17:20:01.5+00:00">
<testcase file="tests/a.py" classname="a" name="one" time="1.5"/>
<testcase file="tests/a.py" classname="a" name="two" time="0.5"><failure message="wrong token&#10;more"/></testcase>
<testcase file="tests/b.py" classname="b" name="three" time="0"><skipped message="no flash_attn"/></testcase>
<testcase classname="c" name="c" time="0"><error message="collection failure">ImportError while importing
E   ModuleNotFoundError: No module named 'openai.types'</error></testcase>
<testcase file="tests/d.py" classname="d" name="d" time="0"><skipped message="collection skipped">('/tests/d.py', 2,
"Skipped: could not import 'nixl': No module named 'nixl'")</skipped></testcase>
<testcase file="tests/d.py" classname="d" name="e" time="0"><skipped message="no nixl">No module named 'nixl'</skipped>
</testcase>
<testcase file="tests/e.py" classname="e" name="e" time="0"><skipped message="collection skipped">('/tests/e.py', 2,
'Skipped: needs two GPUs')</skipped></testcase>
</testsuite></testsuites>"""


def test_summary_counts_by_file_and_names_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "_device", lambda: "A GPU")
    (tmp_path / "log.xml").write_text(LOG)
    page = gpu_tests.summary(tmp_path / "log.xml", "python -m experiments.gpu_tests")
    assert page.startswith(
        "# Tests on the GPU\n\n1 passed, **1 failed**, 3 skipped, 2 files not read; 2026-11-29.\n\nA GPU."
    )
    assert "| file | passed | failed | skipped | not read | seconds |" in page
    assert "| `tests/a.py` | 1 | 1 | 0 | 0 | 2.0 |" in page
    assert "| `tests/b.py` | 0 | 0 | 1 | 0 | 0.0 |" in page
    assert "| `tests/d.py` | 0 | 0 | 1 | 1 | 0.0 |" in page
    assert "| all | 1 | 1 | 3 | 2 | 2.0 |" in page
    failed, skipped, not_read = (
        page.partition(f"## {name}\n")[2].partition("\n## ")[0] for name in ("Failed", "Skipped", "Not read")
    )
    assert failed.count("- `") == 1
    assert "- `tests/e.py::e`: needs two GPUs\n" in skipped
    assert "- `c::c`: needs openai, which is not here\n" in not_read
    assert "- `tests/d.py::d`: needs nixl, which is not here\n" in not_read
    assert "- `tests/a.py::two`: wrong token\n" in page
    assert "- `tests/b.py::three`: no flash_attn\n" in page
    (tmp_path / "log.xml").write_text(re.sub("<failure.*/>", "", LOG))
    assert "\n2 passed, 0 failed, 3 skipped" in gpu_tests.summary(tmp_path / "log.xml", "")


def test_the_command_is_one_that_others_can_run() -> None:
    given = ["tests/kernels", "-p", "gpu_fail", "-n", "28", "-pmine", "-p", "no:cacheprovider", "-q"]
    assert gpu_tests.for_anybody(given) == ["tests/kernels", "-n", "28", "-p", "no:cacheprovider", "-q"]
    assert gpu_tests.for_anybody(["-p", "mine"]) == []


def test_tests_on_any_device_count_as_such_where_there_is_a_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    conftest: Any = request.config.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    marks: dict[str, list[str]] = {"fixture": [], "another fixture": [], "cuda": [], "cpu": [], "a setting": []}
    devices = {"cuda": torch.device("cuda"), "cpu": torch.device("cpu"), "a setting": "cuda"}
    items = [
        SimpleNamespace(
            fixturenames=["folder" if name == "another fixture" else "device"],
            callspec=SimpleNamespace(params={"device": devices[name]} if name in devices else {}),
            keywords=(),
            get_closest_marker=lambda mark: None,
            add_marker=found.append,
        )
        for name, found in marks.items()
    ]
    monkeypatch.setattr(conftest, "has_gpu", lambda: True)
    conftest.pytest_collection_modifyitems(request.config, items)
    assert [name for name, found in marks.items() if found == ["gpu"]] == ["fixture", "cuda"]
    assert sum(map(len, marks.values())) == 2
