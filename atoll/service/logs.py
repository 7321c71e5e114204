"""Structured logs: one JSON object per line, or readable lines on a terminal.

Every structlog and standard logger of the process writes this form to standard error. This module masks secrets for
all.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import orjson
import structlog

MASK = "[redacted]"
TEXT_LENGTH_MAX = 8192
DEPTH_MAX = 6
_SECRET_KEY = re.compile(
    r"token|password|passwd|secret|authorization|credential|private.?key|cookie|(^|[._-])key.?data$", re.IGNORECASE
)
_SECRET_TEXT = re.compile(
    r"(?i:bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)

Facts = MutableMapping[str, Any]


def configure(level: str, component: str, *, as_json: bool | None = None) -> None:
    """Set up the whole process's logs. `level` is debug, info, warning or error; ValueError for another.

    `as_json` None means JSON unless standard error is a terminal.
    """
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise ValueError(f"unknown log level {level!r}; use debug, info, warning or error")
    structured = not sys.stderr.isatty() if as_json is None else as_json
    structlog.contextvars.bind_contextvars(component=component)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(serializer=_dump) if structured else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    _capture_standard_logging(max(threshold, logging.WARNING), shared, renderer)


def _capture_standard_logging(
    threshold: int, shared: list[structlog.typing.Processor], renderer: structlog.typing.Processor
) -> None:
    """Give the libraries' own records the same form; only their warnings and errors are kept."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(threshold)


def redact(_logger: object, _method: str, facts: Facts) -> Facts:
    """Mask values that look like secrets, by the key's name or by the text's form, and cut long text."""
    return {key: _clean(key, value, depth=0) for key, value in facts.items()}


def _clean(key: str, value: Any, *, depth: int) -> Any:  # noqa: ANN401 - any log value
    if _SECRET_KEY.search(key) and value is not None and not isinstance(value, bool | int | float):
        return MASK
    if isinstance(value, str):
        return _SECRET_TEXT.sub(MASK, value[:TEXT_LENGTH_MAX])
    if depth >= DEPTH_MAX:
        return "..."
    if isinstance(value, dict):
        return {str(inner): _clean(str(inner), item, depth=depth + 1) for inner, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean("", item, depth=depth + 1) for item in value]
    if isinstance(value, BaseException):
        return _clean(key, f"{type(value).__name__}: {value}", depth=depth)
    return value


def _dump(facts: Any, **_ignored: object) -> str:  # noqa: ANN401 - whatever structlog hands over
    return orjson.dumps(facts, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
