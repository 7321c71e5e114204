"""The archive of logs: on disk and in a real S3 server; bounded, and silent about credentials."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from jobs.log_archive import PAUSE_SECONDS, ArchiveUnavailable, LogArchive, LogMissing, LogTail, last_lines
from jobs.settings import JobServiceSettings
from tests.fakes.clock import ManualClock
from tests.worker.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, s3_server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the variables of an S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as variables:
        yield variables


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.e2e)])
def template(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a prefix on disk, then one in a real bucket."""
    if request.param == "file":
        return f"file://{tmp_path}/logs/{{tenant}}/"
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/logs/{{tenant}}/"


async def printed(*chunks: bytes) -> AsyncIterator[bytes]:
    """Yield what a container printed."""
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], b""),
        ([b"one\n", b"two\n"], b"one\ntwo\n"),
        ([b"0123456789", b"abcdef"], b"0123456789abcdef"),
        (
            [b"0123456\n", b"abcdef\n", b"xyz\n"],
            b"[the first 8 bytes of this log are not in the archive]\nabcdef\nxyz\n",
        ),
        ([b"x" * 40 + b"\nend\n"], b"[the first 41 bytes of this log are not in the archive]\nend\n"),
        ([b"x" * 40], b"[the first 24 bytes of this log are not in the archive]\n" + b"x" * 16),
    ],
)
def test_the_end_of_a_long_log_is_kept_in_whole_lines(chunks: list[bytes], expected: bytes) -> None:
    """What is left out is counted in the first line, however the chunks fall."""
    tail = LogTail(16)
    for chunk in chunks:
        tail.add(chunk)
    one_by_one = LogTail(16)
    for byte in b"".join(chunks):
        one_by_one.add(bytes([byte]))

    assert tail.text() == one_by_one.text() == expected


def test_last_lines_are_counted_from_the_end() -> None:
    """As `tail -n` does."""
    text = b"a\nb\nc"

    assert [last_lines(text, count) for count in (0, 1, 2, 9)] == [b"", b"c", b"b\nc", text]


async def test_a_log_is_read_as_it_was_saved_below_the_prefix_of_its_tenant(template: str) -> None:
    """Saved again it replaces the earlier one; one that is gone is told as missing."""
    archive = LogArchive(template, bytes_max=1024, clock=ManualClock())
    place = archive.place_of("acme", "id", "1", "tune-0")
    await archive.save(place, printed(b"first"))
    await archive.save(place, printed(b"step 1\n", b"step 2\n"))

    assert place == template.replace("{tenant}", "acme") + "id/1/tune-0.log"
    assert await archive.read(place) == b"step 1\nstep 2\n"
    with pytest.raises(LogMissing, match="is not there any more"):
        await archive.read(archive.place_of("globex", "id", "1", "tune-0"))


@pytest.mark.e2e
@pytest.mark.parametrize(("key_id", "status"), [(ACCESS_KEY, "403"), ("somebodys-key-id", "404")])
async def test_a_store_that_refuses_is_told_without_a_credential(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key_id: str, status: str
) -> None:
    """A real server refuses another key; neither key is in the message, its causes, or the log."""
    for name, value in (s3 | {"AWS_ACCESS_KEY_ID": key_id, "AWS_SECRET_ACCESS_KEY": "another-secret"}).items():
        monkeypatch.setenv(name, value)
    archive = LogArchive(f"s3://{BUCKET}/{{tenant}}/", bytes_max=1024, clock=ManualClock())
    with pytest.raises(ArchiveUnavailable, match="cannot write s3://checkpoints/acme/") as refused:
        await archive.save(archive.place_of("acme", "id", "1", "p"), printed(b"x"))

    told = f"{refused.value!r} {refused.value.__cause__!r} {capsys.readouterr()}"
    assert status in str(refused.value)
    assert "another-secret" not in told
    assert "somebodys-key-id" not in told
    assert SECRET_KEY not in told


async def test_a_silent_store_is_left_alone_for_a_while(tmp_path: Path) -> None:
    """The next log is not even read: jobs that end one after the other do not wait for it one after the other."""
    (tmp_path / "file").write_text("no folder")
    clock = ManualClock()
    archive = LogArchive(f"file://{tmp_path}/{{tenant}}/", bytes_max=1024, clock=clock)
    bad, good = archive.place_of("file", "id", "1", "p"), archive.place_of("acme", "id", "1", "p")
    with pytest.raises(ArchiveUnavailable, match="cannot write"):
        await archive.save(bad, printed(b"x"))
    with pytest.raises(ArchiveUnavailable, match="did not answer lately"):
        await archive.save(good, printed(b"x"))
    await clock.advance(PAUSE_SECONDS)
    await archive.save(good, printed(b"x"))

    assert await archive.read(good) == b"x"
    assert archive.failures_count == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("s3://logs/", "must have {tenant} in it once"),
        ("s3://{tenant}/{tenant}/", "must have {tenant} in it once"),
        ("s3://logs/{tenant}", "must end in a slash"),
        ("https://logs/{tenant}/", "must begin with s3://"),
        ("s3://logs/../{tenant}/", "log_archive s3://logs/../{tenant}/"),
    ],
)
def test_a_place_that_is_none_or_that_tenants_would_share_is_refused(given: str, told: str) -> None:
    """When the service starts, before anything is written."""
    with pytest.raises(ValidationError) as refused:
        JobServiceSettings.model_validate({"access": "/nowhere", "log_archive": given})

    assert told in str(refused.value)


@pytest.mark.parametrize("given", ["", "s3://logs/{tenant}/", "gs://logs-{tenant}/", "file:///var/logs/{tenant}/"])
def test_a_place_of_each_tenant_is_accepted(given: str) -> None:
    """In every store; none by default."""
    assert JobServiceSettings.model_validate({"access": "/nowhere", "log_archive": given}).log_archive == given
