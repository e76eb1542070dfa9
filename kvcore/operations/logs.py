"""Logs to standard error, one line per event: plain text for people, JSON for machines.

Every line has a time (UTC, RFC 3339), a level, the component and a text; JSON has the fields of
`extra={"fields": {...}}` beside them. URLs are redacted where they are logged, not here: a formatter cannot know what
is a secret.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from kvcore.service.serve_config import LogConfig


def configure(config: LogConfig) -> None:
    """Send the process's logs to standard error in the configured form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO kvcore.server: text key=value`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": _time(record), "level": record.levelname.lower(), "component": record.name}
        entry |= {"text": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
