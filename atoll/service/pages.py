"""What the web pages of Atoll share: security headers, the style, the stream of events, and the picture of islands.

The files hold no data and are open to everybody who can connect. The headers tell browsers to load nothing from
elsewhere.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
PAGE_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
STREAM_SECONDS_MAX: Final = 600.0
"""A stream ends after this and is asked for anew, so that a token that counts no more is of no use."""
PageFiles = Mapping[str, tuple[Path, str]]
"""By path of the URL: the file and its media type."""

_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files(own: Path, page: str) -> PageFiles:
    """Return the files of a page: those of its folder, of which `page` is served at /, and those that pages share."""
    return files_of(Path(__file__).parent / "static") | files_of(own, {page: "/"})


def files_of(folder: Path, paths: Mapping[str, str] = MappingProxyType({})) -> dict[str, tuple[Path, str]]:
    """Return the files of a folder. `paths`: by file, where it is served instead of at its own name."""
    found = sorted(path for path in folder.iterdir() if path.suffix in _KINDS)
    return {paths.get(path.name, f"/{path.name}"): (path, _KINDS[path.suffix]) for path in found}


def event(kind: str, data: bytes) -> bytes:
    """Return one event of a stream; the data holds no line break."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
