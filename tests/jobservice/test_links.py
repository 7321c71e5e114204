"""Connections to clusters: a kubeconfig is a file in one folder or a key of a Secret, and what is wrong is said."""

import base64
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.kube.client import ApiClient
from atoll.kube.errors import ConfigurationError, KubeError, Unanswered
from jobs.chooser import LiveSnapshots
from jobs.links import ClusterLinks, told
from jobs.records import RegisteredCluster
from tests.fakes.api_server import FakeApiServer, cut_connection
from tests.fakes.clock import ManualClock
from tests.fakes.listening import kubeconfig

SECRET = "/api/v1/namespaces/atoll-system/secrets/east"
REFERENCE = "secret:atoll-system/east/kubeconfig"


def cluster(reference: str) -> RegisteredCluster:
    """Return a registered cluster."""
    return RegisteredCluster(id="east", kubeconfig=reference)


@asynccontextmanager
async def links_of(server: FakeApiServer, folder: Path, *, has_folder: bool = True) -> AsyncIterator[ClusterLinks]:
    """Yield the links of a service whose own cluster is the server."""
    async with await ApiClient.connect(kubeconfig(folder, server.url)) as home:
        links = ClusterLinks(home, folder=folder if has_folder else None)
        yield links
        await links.close()


async def test_a_secret_and_a_file_lead_to_the_same_cluster(tmp_path: Path) -> None:
    """Both references connect; a Secret's content is in no file that others can read, and goes with the process."""
    async with FakeApiServer().running() as server, links_of(server, tmp_path) as links:
        path = kubeconfig(tmp_path, server.url)
        content = base64.b64encode(path.read_bytes()).decode()
        server.put(SECRET, {"kind": "Secret", "data": {"kubeconfig": content}})
        answers = []
        for reference in ("", f"file:{path.name}", REFERENCE):
            client = await links.client(cluster(reference))
            answers.append(await client.get(SECRET))
        file = Path(links._own_files.name) / "east"
        mode = stat.S_IMODE(file.stat().st_mode)
        await links.close()

        assert len(set(answers)) == 1
        assert mode == 0o600
        assert not file.exists()


@pytest.mark.parametrize(
    ("reference", "data", "problem"),
    [
        ("file:missing", None, "no such kubeconfig"),
        (REFERENCE, None, "not found"),
        (REFERENCE, {"other": ""}, "has no key kubeconfig"),
        (REFERENCE, {"kubeconfig": "?"}, "is no kubeconfig"),
        (REFERENCE, {"kubeconfig": base64.b64encode(b"[1]").decode()}, "is no kubeconfig"),
        (
            REFERENCE,
            {"kubeconfig": base64.b64encode(b"users: [{name: a, user: {exec: {command: rm}}}]").decode()},
            "runs a program for its token",
        ),
        ("/etc/passwd", None, "is no such reference"),
    ],
)
async def test_a_reference_that_does_not_work_says_why(
    tmp_path: Path, reference: str, data: dict[str, str] | None, problem: str
) -> None:
    """Whatever is wrong is one error of one kind; a Secret never makes the service run a program."""
    async with FakeApiServer().running() as server, links_of(server, tmp_path) as links:
        if data is not None:
            server.put(SECRET, {"kind": "Secret", "data": data})
        with pytest.raises(KubeError) as refused:
            await links.client(cluster(reference))

    assert problem in told(refused.value)


async def test_without_a_folder_no_file_is_read(tmp_path: Path) -> None:
    """An administrator who sets no folder allows no files."""
    async with FakeApiServer().running() as server, links_of(server, tmp_path, has_folder=False) as links:
        with pytest.raises(ConfigurationError, match="no setting kubeconfig_folder"):
            await links.client(cluster("file:east"))


async def test_what_was_read_before_the_connection_was_lost_does_not_count(tmp_path: Path) -> None:
    """One read serves several choices, until a request or the leader finds the cluster gone: then it is read anew."""
    async with FakeApiServer().running() as server, links_of(server, tmp_path) as links:
        source, east = LiveSnapshots(links, ManualClock()), cluster("")
        first = await source.snapshot(east)
        assert await source.snapshot(east) is first
        server.fail(cut_connection, times=200)
        assert await source.snapshot(east) is first  # nobody knows yet
        with pytest.raises(Unanswered):
            await (await links.client(east)).current_version(SECRET)
        with pytest.raises(ExceptionGroup) as lost:
            await source.snapshot(east)
        server.faults.clear()
        back = await source.snapshot(east)
        east.trouble = "connection refused"
        after_a_look = await source.snapshot(east)

        assert "failed" in told(lost.value)
        assert back is not first
        assert after_a_look is not back


async def test_what_was_read_of_one_cluster_is_not_that_of_another_of_its_name(tmp_path: Path) -> None:
    """A cluster may be registered anew with another kubeconfig."""
    async with FakeApiServer().running() as server, links_of(server, tmp_path) as links:
        source = LiveSnapshots(links, ManualClock())
        first = await source.snapshot(cluster(""))
        other = await source.snapshot(cluster(f"file:{kubeconfig(tmp_path, server.url).name}"))

        assert other is not first
