"""Log lines of a server's processes, as Python and uvicorn write them, or for programs: one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import time
from enum import Enum

VARIABLE = "MINI_INFER_LOG_FORMAT"
COMPLAINT_S = 10.0  # between two lines that complain about the same
ACCESS = ("client", "method", "path", "http_version", "status")  # the arguments of uvicorn's access log


class LogFormat(str, Enum):
    text = "text"  # for people
    json = "json"  # an object a line


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "pid", "message"}, with the fields of an access or the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            line.update(zip(ACCESS, record.args, strict=False))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Complaint:
    """About something that can happen thousands of times a second: a line of the log once in COMPLAINT_S."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said = -COMPLAINT_S

    def say(self, message: str, *arguments: object) -> None:
        if time.monotonic() - self._said > COMPLAINT_S:
            self._said = time.monotonic()
            self._logger.error(message, *arguments)


def install(wanted: LogFormat | None = None) -> bool:
    """Sets up this process's logs, and those of the processes that it starts.

    Args:
        wanted: None: as the process that started this one was told.

    Returns:
        Whether they are JSON; then uvicorn shall leave them as they are.
    """
    if wanted is not None:
        os.environ[VARIABLE] = wanted.value
    is_json = os.environ.get(VARIABLE) == LogFormat.json.value
    if is_json:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.root.handlers = [handler]
    return is_json
