"""Places of checkpoints: which are accepted or refused; no folder leads outside the allowed prefixes."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import Checkpoints, PlaceRefused
from worker.places import allowed_place, parse_place


@pytest.mark.parametrize(
    "uri",
    ["s3://bucket/run/", "s3://bucket/", "gs://my.bucket/a/b/c/", "az://container/run=1/", "file:///checkpoints/"],
)
def test_taken(uri: str) -> None:
    """A folder of a bucket, or of the machine, is a place; its URI is the same again."""
    assert parse_place(uri).uri == uri


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        pytest.param("s3://bucket/run", "end it in a slash", id="no slash behind"),
        pytest.param("http://bucket/run/", "is none of", id="another scheme"),
        pytest.param("S3://bucket/run/", "is none of", id="capital letters"),
        pytest.param("/checkpoints/", "is none of", id="a path"),
        pytest.param("", "is none of", id="nothing"),
        pytest.param("s3:///run/", "no valid bucket", id="no bucket"),
        pytest.param("s3://user@bucket/run/", "no valid bucket", id="a user"),
        pytest.param("s3://bucket:9000/run/", "no valid bucket", id="a port"),
        pytest.param("s3://169.254.169.254:80/run/", "no valid bucket", id="an address"),
        pytest.param("s3://bucket/a/../b/", "segment '..'", id="upwards"),
        pytest.param("s3://bucket/./b/", "segment '.'", id="a dot"),
        pytest.param("s3://bucket/.git/", "segment '.git'", id="a hidden folder"),
        pytest.param("s3://bucket/a//b/", "segment ''", id="two slashes"),
        pytest.param("s3://bucket/a/%2e%2e/b/", "segment '%2e%2e'", id="encoded"),
        pytest.param("s3://bucket/a\\b/", "segment", id="a backslash"),
        pytest.param("s3://bucket/a?x=y/", "segment", id="a query"),
        pytest.param("s3://bucket/a#b/", "segment", id="a fragment"),
        pytest.param("s3://bucket/a\n/", "segment", id="a line break"),
        pytest.param("s3://bucket/a\0/", "segment", id="a zero"),
        pytest.param("file://host/checkpoints/", "no folder of its own", id="a host for files"),
        pytest.param("file:///", "no folder of its own", id="the whole machine"),
        pytest.param("s3://bucket/" + "a" * 1024 + "/", "at most 1024", id="too long"),
    ],
)
def test_refused(uri: str, message: str) -> None:
    """Whatever could be read in two ways is refused, with what to write instead."""
    with pytest.raises(PlaceRefused, match=message):
        parse_place(uri)


@pytest.mark.parametrize(
    ("uri", "is_allowed"),
    [
        ("s3://bucket/team/", True),
        ("s3://bucket/team/run-1/", True),
        ("s3://bucket/team-b/", False),
        ("s3://bucket/", False),
        ("s3://bucket-2/team/", False),
        ("gs://bucket/team/", False),
        ("file:///checkpoints/run/", True),
    ],
)
def test_prefixes(uri: str, is_allowed: bool) -> None:
    """A prefix allows what lies below it, not its namesakes."""
    allowed = ["s3://bucket/team/", "file:///checkpoints/"]
    if is_allowed:
        assert allowed_place(uri, allowed).uri == uri
    else:
        with pytest.raises(PlaceRefused, match="allowed: s3://bucket/team/, file:///checkpoints/"):
            allowed_place(uri, allowed)


def test_no_prefix_allows_nothing() -> None:
    """An empty list is no permission."""
    with pytest.raises(PlaceRefused, match="allowed: none"):
        allowed_place("s3://bucket/run/", [])


@given(st.one_of(st.text(max_size=60), st.text(string.printable, max_size=60).map(lambda text: f"s3://bucket/{text}/")))
def test_nonsense_is_refused_and_crashes_nothing(text: str) -> None:
    """Any text is a place without a way upwards, or refused."""
    try:
        place = parse_place(text)
    except PlaceRefused:
        return
    assert place.uri == text
    assert not {"", ".", ".."} & set(place.path.split("/")[:-1])


def test_a_link_leads_nowhere(tmp_path: Path) -> None:
    """A folder that is a link out of the allowed prefix is refused, before and after checkpoints began."""
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    allowed.mkdir()
    outside.mkdir()
    (allowed / "run").symlink_to(outside)
    with pytest.raises(PlaceRefused, match="on no allowed prefix"):
        Checkpoints.open(f"file://{allowed}/run/", job_id="j", allowed=[f"file://{allowed}/"])

    checkpoints = Checkpoints.open(f"file://{allowed}/run-2/", job_id="j", allowed=[f"file://{allowed}/"])
    (allowed / "run-2/weights").symlink_to(outside)
    with pytest.raises(PlaceRefused, match="reached through a link"):
        checkpoints.save(1, {"model": b"w"})
    assert list(outside.iterdir()) == []


def test_a_volume_may_itself_be_a_link(tmp_path: Path) -> None:
    """What the administrator allowed may be reached through a link of theirs."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    uri = f"file://{tmp_path}/checkpoints/"
    Checkpoints.open(uri, job_id="j", allowed=[uri]).save(1, {"model": b"w"})
    with Checkpoints.open(uri, job_id="j", allowed=[uri]).restore() as restored:
        assert restored is not None
