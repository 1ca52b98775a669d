"""Log lines: text for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from typing import TextIO

from radixshmem.config import ServerConfig

_LOGGER = "radixshmem"
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """``2025-01-31 12:00:00.123 INFO message key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{when}.{int(record.msecs):03d} {record.levelname} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """``{"time": ..., "level": ..., "logger": ..., "message": ..., <fields>}``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Logs:
    """The package's log as a server's configuration wants it."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises OSError when ``log_file`` cannot be opened."""
        self._level = config.log_level.upper()
        self._handler = WatchedFileHandler(config.log_file) if config.log_file else _StderrHandler()
        self._handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
        logger = logging.getLogger(_LOGGER)
        logger.handlers[:] = [self._handler]
        logger.propagate = False
        logger.setLevel(self._level)

    def renew(self) -> str:
        """What SIGHUP asks for: open the file anew or, without one, switch to debug and back."""
        if isinstance(self._handler, WatchedFileHandler):
            self._handler.close()  # the next line opens the path afresh
            return "log file opened anew"
        logger = logging.getLogger(_LOGGER)
        is_debug = logger.level == logging.DEBUG and self._level != "DEBUG"
        logger.setLevel(self._level if is_debug else logging.DEBUG)
        return f"log level is {logging.getLevelName(logger.level)} now"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks standard error up for each line: a progress bar puts its own in place while it is drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave as ``extra``."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
