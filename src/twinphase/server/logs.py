"""The log on stderr: dated lines for people, or one JSON object per line for programs.

Structured values of a message are passed in `extra={"fields": {...}}`, which only the JSON format
shows.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from twinphase.phases.record import RequestRecord


class JsonFormatter(logging.Formatter):
    """One object per line: time (ISO 8601, UTC), level, logger, message, the fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        found: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def start_logging(level: str, log_format: str) -> None:
    """Send this process's log to stderr.

    Args:
        level: lowest level to show, as in `--log-level`.
        log_format: "text" or "json".
    """
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("twinphase").setLevel(level.upper())


def fields_of(record: RequestRecord) -> dict[str, Any]:
    """A generation's fields in the log: state, counts, and times in ms."""
    counts = record.counts
    return {
        "event": "generation",
        "request_id": record.request_id,
        "state": record.state,
        "tenant": record.tenant,
        "finish_reason": record.finish_reason,
        "num_prompt_tokens": counts.num_prompt_tokens,
        "num_cached_tokens": counts.num_cached_tokens,
        "num_output_tokens": counts.num_output_tokens,
        "num_preemptions": counts.num_preemptions,
        "error": counts.error,
        "ttft_ms": _ms(record.timeline.ttft),
        "tpot_ms": _ms(record.timeline.tpot),
        "ledger_ms": {kind: _ms(spent) for kind, spent in record.timeline.totals().items()},
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
