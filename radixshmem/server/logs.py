"""Log lines on standard error: text for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

LOGGER = "radixshmem"
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


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


def set_up_logging(log_format: str, log_level: str) -> logging.Handler:
    """Send the package's log to standard error; returns the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.propagate = False
    set_level(log_level)
    return handler


def set_level(log_level: str) -> None:
    logging.getLogger(LOGGER).setLevel(log_level.upper())


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave as ``extra``."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
