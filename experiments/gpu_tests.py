"""Runs the tests that need a GPU and writes what came of them into reports/gpu_tests.md.

python -m experiments.gpu_tests            # any further arguments go to pytest

Those are marked `gpu`. Where there is a GPU, tests/conftest.py so marks what takes the fixture `device`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.lab.store import provenance

ROOT = Path(__file__).resolve().parents[1]
OUTCOMES = ("passed", "failed", "skipped", "not read")  # the last: files whose packages are not here


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA device here, and these are the tests that need one")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.xml"
        # Of all files, of which one that cannot be read must not end the run.
        chosen = ["-m", "gpu", "--continue-on-collection-errors"]
        command = ["pytest", *chosen, f"--junitxml={log}", "-o", "junit_family=xunit1", *arguments]
        environment = {**os.environ, "TEST_GPUS": str(torch.cuda.device_count())}
        with subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment) as tests:
            try:
                status = tests.wait()
            except KeyboardInterrupt:  # which pytest has seen, too: it says what has failed until now
                return tests.wait()
        text = summary(log, shlex.join(["python", "-m", "experiments.gpu_tests", *for_anybody(arguments)]))
    (ROOT / "reports" / "gpu_tests.md").write_text(text)
    return status


def for_anybody(arguments: Sequence[str]) -> list[str]:
    """Without the plugins of whoever ran them, `-p name`, which others do not have; `-p no:name` stays."""
    found = re.sub(r"(^|\0)-p\0?(?!no:)[^\0]+", "", "\0".join(arguments))
    return found.strip("\0").split("\0") if found else []


def summary(log: Path, command: str) -> str:
    """The page made from a junit log."""
    root = ET.parse(log).getroot()
    cases, day = list(root.iter("testcase")), next(root.iter("testsuite")).get("timestamp", "")[:10]
    by_file = defaultdict[str, list[ET.Element]](list)
    for case in cases:
        by_file[str(case.get("file") or case.get("classname"))].append(case)
    versions = ", ".join(f"{name} {version}" for name, version in provenance.versions().items())
    commit, clean = provenance.commit(ROOT), provenance.is_clean(ROOT)
    counts = Counter(map(_outcome, cases))
    told = [f"{counts[o]:,} {'files ' * (o == 'not read')}{o}" for o in OUTCOMES if counts[o] or o == "failed"]
    told = [f"**{text}**" if text.endswith("failed") and counts["failed"] else text for text in told]
    lines = [
        "# Tests on the GPU",
        "",
        f"{', '.join(told)}; {day}.",
        "",
        f"{_device()}. {versions}. Commit {(commit or 'unknown')[:12]}{'' if clean else ', with changes'}.",
        "",
        "All tests that run on a GPU where there is one. Kernels and attention backends are held against plain",
        "torch, over odd shapes; captured and overlapped steps against eager ones one after the other; the engine",
        "against a reference in fp32, and in batch-invariant numerics to the bit against each request alone; two",
        "GPUs, and two engines between which requests are handed over, against one; the gate of tokens against",
        "planted faults. Run them again:",
        f"`{command}`.",
        "",
        "| file | " + " | ".join(OUTCOMES) + " | seconds |",
        "|---|" + "---:|" * (len(OUTCOMES) + 1),
    ]
    every = sorted(by_file.items())
    for name, found in [*((f"`{name}`", found) for name, found in every), ("all", cases)]:
        counts = Counter(map(_outcome, found))
        seconds = sum(float(case.get("time", 0)) for case in found)
        lines.append(f"| {name} | " + " | ".join(str(counts[o]) for o in OUTCOMES) + f" | {seconds:.1f} |")
    for outcome in OUTCOMES[1:]:
        rest = [(case, name) for name, found in every for case in found if _outcome(case) == outcome]
        lines += ["", f"## {outcome.capitalize()}", ""] if rest else []
        for case, name in rest:
            lines.append(f"- `{name}::{case.get('name')}`: {_why(case)}")
    return "\n".join(lines) + "\n"


def _outcome(case: ET.Element) -> str:
    if _absent(case):
        return "not read"
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def _absent(case: ET.Element) -> str:
    """What a file that could not be read needs, where a package is not there; else empty. A test that needs one is
    skipped by itself."""
    of_file = [found for tag in ("error", "skipped") if (found := case.find(tag)) is not None]
    text = next((found.text or "" for found in of_file if (found.get("message") or "").startswith("collection")), "")
    absent = re.search("No module named '([^']+)'", text)
    return f"needs {absent[1].partition('.')[0]}, which is not here" if absent else ""


def _why(case: ET.Element) -> str:
    """In a line; of a whole file it stands behind the place."""
    told = next(child for child in case if child.tag in ("failure", "error", "skipped"))
    skipped = re.search(r"Skipped: (.*)['\"]\)$", told.text or "")
    return _absent(case) or (skipped[1] if skipped else (told.get("message") or "").strip().partition("\n")[0])


def _device() -> str:
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    count = torch.cuda.device_count()
    name = torch.cuda.get_device_name() if count == 1 else f"{count} x {torch.cuda.get_device_name()}"
    return f"{name} (compute capability {capability}), CUDA {torch.version.cuda}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
