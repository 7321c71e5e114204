"""Places of checkpoints: parses a URI and checks it against the allowed prefixes.

Pure and strict: no percent signs, no dots, nothing ambiguous, because the same text later names objects that are loaded
into the training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from worker.errors import PlaceRefused

LENGTH_MAX: Final = 1024
SCHEMES: Final = ("s3", "gs", "az", "file")

_URI: Final = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[^/]*)/(?P<path>.*)", re.DOTALL)
BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
SEGMENT: Final = re.compile(r"[A-Za-z0-9_=+@~,-][A-Za-z0-9._=+@~,-]*")


@dataclass(frozen=True, slots=True)
class Place:
    """scheme: one of SCHEMES. bucket: empty for files. path: no leading slash, one trailing slash unless it is
    empty."""

    scheme: str
    bucket: str
    path: str

    @property
    def uri(self) -> str:
        """The URI of the place."""
        return f"{self.scheme}://{self.bucket}/{self.path}"

    def holds(self, other: Place) -> bool:
        """True if the other place is this one or below it."""
        is_same_bucket = (self.scheme, self.bucket) == (other.scheme, other.bucket)
        return is_same_bucket and other.path.startswith(self.path)


def shown(url: str) -> str:
    """Return a URL as errors may show it: a user, a query and a fragment can be credentials."""
    scheme, separator, rest = url.partition("?")[0].partition("#")[0].partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"[:200]


def parse_place(uri: str) -> Place:
    """Return the place of a URI: `s3://bucket/run/`, `file:///checkpoints/`. Raises PlaceRefused."""
    if len(uri) > LENGTH_MAX:
        raise PlaceRefused(f"checkpoint URI of {len(uri)} characters: at most {LENGTH_MAX} are taken; shorten the path")
    found = _URI.fullmatch(uri)
    if found is None or found["scheme"] not in SCHEMES:
        raise PlaceRefused(f"checkpoint URI {shown(uri)!r} is none of {', '.join(f'{one}://' for one in SCHEMES)}")
    if not uri.endswith("/"):
        raise PlaceRefused(f"checkpoint URI {shown(uri)!r} names no folder: end it in a slash")
    scheme, bucket, path = found["scheme"], found["bucket"], found["path"]
    if scheme == "file" and (bucket or not path):
        raise PlaceRefused(f"checkpoint URI {shown(uri)!r} names no folder of its own: write file:///FOLDER/")
    if scheme != "file" and not BUCKET.fullmatch(bucket):
        raise PlaceRefused(
            f"checkpoint URI {shown(uri)!r} has no valid bucket or container: write {scheme}://BUCKET/FOLDER/"
        )
    segments = path.split("/")[:-1]
    wrong = [segment for segment in segments if not SEGMENT.fullmatch(segment)]
    if wrong:
        raise PlaceRefused(
            f"checkpoint URI {shown(uri)!r} has a segment {shown(wrong[0])!r}: "
            "letters, digits and . _ = + @ ~ , - are taken, and no dot in front"
        )
    return Place(scheme, bucket, path)


def allowed_place(uri: str, allowed: Iterable[str]) -> Place:
    """Return the place of a URI below one of the allowed prefixes. Raises PlaceRefused."""
    place = parse_place(uri)
    prefixes = [parse_place(prefix) for prefix in allowed]
    if not any(prefix.holds(place) for prefix in prefixes):
        named = ", ".join(prefix.uri for prefix in prefixes) or "none"
        raise PlaceRefused(f"checkpoint URI {shown(uri)!r} is on no allowed prefix; allowed: {named}")
    return place
