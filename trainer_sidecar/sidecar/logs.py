"""JSON lines on stderr, one object per event, so that a cluster's log search can filter by pod, epoch or save."""

import json
import logging
import sys

_STANDARD = set(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object; `extra` fields become members."""

    def __init__(self, pod: str) -> None:
        super().__init__()
        self._pod = pod

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pod": self._pod,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in vars(record).items() if k not in _STANDARD})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup(pod: str, level: str = "INFO") -> None:
    """Send all logs of the process to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(pod))
    logging.basicConfig(level=level, handlers=[handler], force=True)
