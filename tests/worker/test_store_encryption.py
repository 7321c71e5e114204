"""Encryption at rest: the client asks the store for what the container's variables say, with every object."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from worker.objects import connect

HEADER = "x-amz-server-side-encryption"
STARTED = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
DONE = b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>'
PART_BYTES = 5 * 1024 * 1024


@contextmanager
def recording_store() -> Iterator[tuple[str, list[tuple[str, str, dict[str, str]]]]]:
    """Take every write; yield the address, and of each request the method, the path and the headers of encryption."""
    seen: list[tuple[str, str, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def take(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = {name.lower(): value for name, value in self.headers.items() if name.lower().startswith(HEADER)}
            seen.append((self.command, self.path, asked))
            body = b"" if self.command == "PUT" else STARTED if "uploads" in self.path else DONE
            self.send_response(200)
            self.send_header("ETag", '"x"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST = take  # noqa: N815 - as http.server calls them

        def log_message(self, *_words: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


@pytest.mark.parametrize(
    ("variables", "headers"),
    [
        ({}, {}),
        ({"AWS_SERVER_SIDE_ENCRYPTION": "AES256"}, {HEADER: "AES256"}),
        (
            {"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms", "AWS_SSE_KMS_KEY_ID": "key-1"},
            {HEADER: "aws:kms", f"{HEADER}-aws-kms-key-id": "key-1"},
        ),
    ],
    ids=["not asked for", "the store's key", "a key of one's own"],
)
def test_every_object_is_written_with_the_encryption_that_the_variables_say(
    variables: dict[str, str], headers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record, which is created, and a part so large that it is uploaded in pieces."""
    with recording_store() as (address, seen):
        access = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        for name, value in {**access, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", **variables}.items():
            monkeypatch.setenv(name, value)
        large = tmp_path / "large"
        with large.open("wb") as file:
            file.truncate(2 * PART_BYTES + 1)
        store = connect("s3")
        store.pipe_file("bucket/run/record", b"{}", mode="create")
        store.put_file(str(large), "bucket/run/weights")

    begun = [(path.partition("?")[0], asked) for _, path, asked in seen if "uploadId" not in path]
    assert begun == [("/bucket/run/record", headers), ("/bucket/run/weights", headers)]


def test_an_encryption_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written in clear because of a misspelt word."""
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aes")
    with pytest.raises(Exception, match="aes"):
        connect("s3").pipe_file("bucket/run/record", b"{}", mode="create")
