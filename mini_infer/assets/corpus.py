"""The training corpus: the sources of a Python standard library, filtered, de-duplicated and split by module.

Everything here is a pure function of the folder: no randomness, no clock. `CorpusReport.sha256` names the exact
set of files, so that two machines can tell whether they trained on the same text.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mini_infer.core.errors import ConfigError

# Whole modules that no training step ever sees. They ship in `heldout/` for prompts, perplexity and acceptance.
HELD_OUT_MODULES: tuple[str, ...] = (
    "bisect.py",
    "calendar.py",
    "cmd.py",
    "colorsys.py",
    "csv.py",
    "filecmp.py",
    "fnmatch.py",
    "fractions.py",
    "getopt.py",
    "glob.py",
    "graphlib.py",
    "heapq.py",
    "linecache.py",
    "netrc.py",
    "pprint.py",
    "queue.py",
    "reprlib.py",
    "sched.py",
    "secrets.py",
    "shelve.py",
    "shlex.py",
    "string.py",
    "textwrap.py",
    "timeit.py",
    "zipapp.py",
)

# Not library text: installed packages, build settings of one machine, one 750 kB table of help texts, and
# sources that are broken on purpose.
EXCLUDED_PARTS = frozenset({"site-packages", "pydoc_data", "__pycache__", "lib-dynload"})
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata", "lib2to3/tests/data/")

TABLE_LITERAL = re.compile(r"\\[xuU][0-9a-fA-F]+|0x[0-9a-fA-F]+|\d+")
MAX_TABLE_SHARE = 0.12  # codec maps reach 0.13-0.28, ordinary modules stay under 0.10
VALIDATION_ONE_IN = 50  # files
COPY_WINDOW_LINES = 4
COPY_WINDOW_CHARS = 110  # shorter windows are idioms (imports, `if __name__ ...`), not copies


@dataclass(frozen=True)
class Source:
    """One file: its POSIX path relative to the library folder, and its text with `\\n` line ends."""

    path: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """A split by file. `train` is learned from, `validation` chooses checkpoints, `heldout` is only reported."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    heldout: tuple[Source, ...]
    dropped: dict[str, int]  # reason -> number of files


@dataclass(frozen=True)
class SplitReport:
    files: int
    bytes: int


@dataclass(frozen=True)
class CorpusReport:
    train: SplitReport
    validation: SplitReport
    heldout: SplitReport
    dropped: dict[str, int]
    sha256: str  # over "split path sha256(text)" lines

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def stdlib_dir() -> Path:
    """The standard library of the Python that runs this."""
    return Path(sysconfig.get_path("stdlib"))


def load_corpus(folder: Path) -> Corpus:
    """Read, filter, de-duplicate and split the sources under `folder`.

    Raises:
        ConfigError: `folder` has no training text, or lacks a held-out module.
    """
    dropped: dict[str, int] = {}
    sources = list(_unique(_usable(folder, dropped), dropped))
    heldout = [source for source in sources if source.path in HELD_OUT_MODULES]
    missing = sorted(set(HELD_OUT_MODULES) - {source.path for source in heldout})
    if missing:
        raise ConfigError(
            f"{folder} lacks the held-out modules {', '.join(missing)}; "
            "--corpus-dir must be a standard library folder, such as sysconfig.get_path('stdlib')"
        )
    seen = _passages(heldout)
    train: list[Source] = []
    validation: list[Source] = []
    for source in sources:
        if source.path not in HELD_OUT_MODULES and not _is_near(source, seen, dropped):
            (validation if _validates(source.path) else train).append(source)
    if not train:
        raise ConfigError(f"{folder} holds no training text; --corpus-dir must be a standard library folder")
    return Corpus(tuple(train), tuple(validation), tuple(heldout), dict(sorted(dropped.items())))


class TrainingTexts(Sequence[str]):
    """The texts of `train` in a corpus whose held-out modules are `heldout`, each read when it is asked for: few are
    there in a moment. What is left out of a corpus is empty here, but duplicates are not known as such."""

    def __init__(self, folder: Path, heldout: Iterable[Source]) -> None:
        self._folder, self._seen = folder, _passages(heldout)
        self._paths = [p for p in _paths(folder) if p not in HELD_OUT_MODULES and not _validates(p)]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        dropped: dict[str, int] = {}
        source = _read(self._folder, self._paths[index], dropped)
        return "" if source is None or _is_near(source, self._seen, dropped) else source.text


def _passages(heldout: Iterable[Source]) -> set[int]:
    return set().union(*(copy_windows(source.text) for source in heldout))


def _is_near(source: Source, passages: set[int], dropped: dict[str, int]) -> bool:
    """Whether it says too much of a held-out module to be learned from."""
    if is_test_of_held_out(source.path):
        _count(dropped, "test of a held-out module")
    elif not passages.isdisjoint(copy_windows(source.text)):
        _count(dropped, "shares a passage with a held-out module")
    else:
        return False
    return True


def _validates(path: str) -> bool:
    return int(_sha256(path), 16) % VALIDATION_ONE_IN == 0


def report(corpus: Corpus) -> CorpusReport:
    splits = {"train": corpus.train, "validation": corpus.validation, "heldout": corpus.heldout}
    lines = [f"{name} {source.path} {_sha256(source.text)}" for name, part in splits.items() for source in part]
    return CorpusReport(
        **{name: SplitReport(len(part), sum(source.num_bytes for source in part)) for name, part in splits.items()},
        dropped=corpus.dropped,
        sha256=_sha256("\n".join(lines)),
    )


def write_heldout(corpus: Corpus, library: Path, folder: Path) -> None:
    """Copy the held-out modules, verbatim and named `.py.txt`, and the library's licence into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in corpus.heldout:
        (folder / f"{source.path}.txt").write_text(source.text, encoding="utf-8")
    if (library / "LICENSE.txt").is_file():
        shutil.copyfile(library / "LICENSE.txt", folder / "LICENSE.txt")


def is_test_of_held_out(path: str) -> bool:
    """True for `test_<module>.py`, and for anything in a folder `test_<module>/`, of a held-out module."""
    names = {f"test_{Path(module).stem}" for module in HELD_OUT_MODULES}
    return any(part.removesuffix(".py") in names for part in path.split("/"))


def copy_windows(text: str) -> set[int]:
    """Hashes of each run of COPY_WINDOW_LINES non-blank lines (indentation removed) that is long enough to tell."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    windows = set()
    for start in range(len(lines) - COPY_WINDOW_LINES + 1):
        window = "\n".join(lines[start : start + COPY_WINDOW_LINES])
        if len(window) >= COPY_WINDOW_CHARS:
            windows.add(int(_sha256(window)[:16], 16))
    return windows


def table_share(text: str) -> float:
    """Share of the characters that are digits or escapes: high in generated tables, which teach nothing."""
    return sum(len(match) for match in TABLE_LITERAL.findall(text)) / max(1, len(text))


def _usable(folder: Path, dropped: dict[str, int]) -> Iterator[Source]:
    for path in _paths(folder):
        source = _read(folder, path, dropped)
        if source is not None:
            yield source


def _paths(folder: Path) -> list[str]:
    """Of the library's files. What is left out here is not counted: how many packages are installed says nothing about
    the corpus."""
    found: list[str] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in EXCLUDED_PARTS]
        found += (Path(parent, name).relative_to(folder).as_posix() for name in files if name.endswith(".py"))
    return sorted(path for path in found if not path.startswith(EXCLUDED_PREFIXES))


def _read(folder: Path, path: str, dropped: dict[str, int]) -> Source | None:
    try:
        text = (folder / path).read_bytes().decode("utf-8").replace("\r\n", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # test files hold invalid escapes on purpose
            ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        _count(dropped, "not UTF-8 Python")
        return None
    if not text.strip():
        _count(dropped, "empty")
    elif table_share(text) > MAX_TABLE_SHARE:
        _count(dropped, "table of literals")
    else:
        return Source(path, text)
    return None


def _unique(sources: Iterable[Source], dropped: dict[str, int]) -> Iterator[Source]:
    seen: set[str] = set()
    for source in sources:
        key = " ".join(source.text.split())
        if key in seen:
            _count(dropped, "duplicate")
        else:
            seen.add(key)
            yield source


def _count(dropped: dict[str, int], reason: str) -> None:
    dropped[reason] = dropped.get(reason, 0) + 1


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
