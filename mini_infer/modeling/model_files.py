"""Where a model lies and whether its files are whole, told without torch, so that what is wrong is said at once."""

from __future__ import annotations

import difflib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from mini_infer.assets import SHIPPED, shipped_path
from mini_infer.core.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_LFS_POINTER = b"version https://git-lfs"
_HUB_ANSWERS_S = 1.5  # else it cannot be reached; its own client would try again for a minute
_HUB_PATIENCE = "HF_HUB_ETAG_TIMEOUT"  # of its own client: seconds to wait for such an answer
_INSTEAD = (
    "Give a folder with config.json and safetensors, a hub name that can be reached or is in its cache, or tiny-target"
)
_CUT_SHORT = "The file may be cut short: fetch or copy it again"


def resolve_folder(path: str, *, weights: bool = True) -> Path:
    """The folder of a shipped model, of a path, or of a hub name, which is downloaded unless it is in the hub's cache.

    weights: a hub's safetensors are wanted too, not just config and tokenizer. Raises ModelError.
    """
    return local_folder(path) or _from_hub(path, weights)


def local_folder(path: str) -> Path | None:
    """The folder of a shipped model or of a path; None for what may be a hub name. Raises ModelError for what is none
    of them."""
    shipped = shipped_path(path)
    if shipped is not None:
        if not (shipped / "config.json").is_file():
            raise ModelError(f"the shipped model {path} is not there; make it with python -m mini_infer.assets.train")
        return shipped
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists():
        beside = [str(other) for other in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ModelError(f"model.path={path}: there is no such folder{_meant(str(folder), beside)}")
    if "/" not in path and _meant(path, SHIPPED):
        raise ModelError(f"model.path={path}: there is no such model{_meant(path, SHIPPED)}")
    return None


def require_on_hub(path: str) -> bool:
    """Asks the hub for the model of that name, once and briefly. Returns whether it answers; where it does not, its
    cache has the model. Raises ModelError where neither has."""
    from huggingface_hub import constants, snapshot_download

    cached = Path(constants.HF_HUB_CACHE).glob("models--*")
    known = [folder.name.removeprefix("models--").replace("--", "/") for folder in cached]
    refusal = "it was told not to ask (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else _asked(path)
    if refusal == "":
        return True
    try:
        snapshot_download(path, local_files_only=True)
    except Exception as error:  # the hub's own errors, and the file system's
        raise ModelError(
            f"model.path={path}: no folder of that name here, and the hub does not give it either: {refusal}"
            f"{_meant(path, (*known, *SHIPPED))}. {_INSTEAD}"
        ) from error
    return False


def _asked(path: str) -> str:
    """Why the hub does not give the model; "" where it does, or may."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    try:
        patience = float(os.environ[_HUB_PATIENCE])
    except (KeyError, ValueError):
        patience = _HUB_ANSWERS_S
    answer = [f"it does not answer within {patience:g} s ({_HUB_PATIENCE}=30 waits for longer)"]

    def ask() -> None:
        try:
            request = urllib.request.Request(hf_hub_url(path, "config.json"), method="HEAD", headers=build_hf_headers())
            urllib.request.urlopen(request, timeout=patience).close()
            answer[0] = ""
        except urllib.error.HTTPError as error:
            missing = f"it has no such model, or none that you may read ({error.code})"
            answer[0] = missing if error.code in (401, 403, 404) else ""
        except (OSError, ValueError) as error:  # a name that cannot be one, too
            answer[0] = f"{type(error).__name__}: {getattr(error, 'reason', error)}".partition("\n")[0]

    # In a thread, since looking up a host's name takes as long as it likes.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)
    return answer[0]


def _from_hub(path: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    answers = require_on_hub(path)
    # model*.safetensors: some repositories hold the weights a second time, under another name.
    patterns = [*_SMALL_FILES, "model*.safetensors"] if weights else list(_SMALL_FILES)
    try:
        return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=not answers))
    except Exception as error:  # the hub's own errors, its HTTP client's, and the file system's
        reason = str(error).strip().split("\n")[0]
        problem = f"the hub does not give it ({type(error).__name__}: {reason})"
        raise ModelError(f"model.path={path}: {problem}. {_INSTEAD}") from error


def _meant(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def read_json(file: Path) -> dict[str, Any]:
    """Raises ModelError where the file is missing or is not a JSON object."""
    try:
        _require_fetched(file)
        values = json.loads(file.read_text(encoding="utf-8"))
    except ModelError:
        raise
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds no JSON object")
    return values


def safetensors_files(folder: Path) -> list[Path]:
    """The shards that the index names, or the single file. Raises ModelError where one is missing or not whole."""
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / _INDEX} has no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / _SINGLE]
    for file in files:
        if not file.is_file():
            hint = "; convert pytorch_model.bin to safetensors" if list(folder.glob("*.bin")) else ""
            raise ModelError(
                f"{folder} has no {file.name}{hint}. Without weights, model.load_format=dummy runs the shape"
            )
        require_whole(file)
    return files


def _require_fetched(file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelError(
                f"{file} is a Git-LFS pointer, which stands for a file that was not fetched: run `git lfs pull` in "
                f"{file.parent}"
            )


def require_whole(file: Path) -> None:
    """By its header: eight bytes with the length of the JSON behind them, which says where each tensor's bytes end."""
    try:
        _require_fetched(file)
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, size)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"cannot read {file}: {error}. {_CUT_SHORT}") from error
    if size != (wanted := 8 + length + max(ends, default=0)):
        raise ModelError(f"cannot read {file}: it has {size:,} bytes, and its header says {wanted:,}. {_CUT_SHORT}")
