"""Errors at the start of a process.

ServiceError
├── SettingsError      a setting is unknown, malformed or out of range; the message names it and its source
├── CertificateError   certificate, key or client CA cannot be loaded
└── TaskEnded          a task that should run for ever has ended
"""

from __future__ import annotations


class ServiceError(Exception):
    """Base of every error that this package raises on purpose."""


class SettingsError(ServiceError):
    """The process cannot start with these settings."""


class CertificateError(ServiceError):
    """A TLS file cannot be used."""


class TaskEnded(ServiceError):
    """A critical task returned although it should run for ever."""
