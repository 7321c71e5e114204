"""How clusters are found, recognized as dead or alive, and swept."""

from __future__ import annotations

from pathlib import Path

import pytest

from devcluster import cgroups, state
from devcluster.errors import ClusterStateError
from devcluster.node import DevNodeSpec
from devcluster.state import ClusterRecord


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state root of the test's own."""
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "s"))
    return tmp_path / "s"


def record(name: str) -> ClusterRecord:
    """A record of a cluster with one node."""
    node = DevNodeSpec("dgx1", profile="p", labels={"a": "b"}).numbered(0)
    return ClusterRecord(
        name=name, kubernetes="1.37.2", port=1, persistent=False, binaries={"etcd": "/etcd"}, nodes=(node,)
    )


def test_a_record_comes_back_as_it_was_written() -> None:
    """Whoever attaches sees the cluster that was started."""
    folder, lock = state.claim_folder("one")
    with lock:
        state.write_record(folder, record("one"))

        assert state.read_record(folder) == record("one")
        assert state.running_clusters() == [record("one")]


def test_a_name_cannot_be_claimed_twice() -> None:
    """Two starters of one name cannot mix their files."""
    _, lock = state.claim_folder("one")

    with lock, pytest.raises(ClusterStateError, match="'one' is running already"):
        state.claim_folder("one")


def test_a_cluster_lives_as_long_as_its_lock_is_held(root: Path) -> None:
    """No process id is trusted: the kernel frees the lock when its holder dies, however it dies."""
    folder, lock = state.claim_folder("one")
    with lock:
        assert state.is_alive(folder)
        assert state.sweep() == []
        assert folder.exists()

    assert not state.is_alive(folder)
    assert state.sweep() == ["one"]
    assert not folder.exists()
    assert list(root.iterdir()) == []


def test_sweeping_spares_the_living() -> None:
    """One killed cluster is removed, its running neighbour is not touched."""
    dead, dead_lock = state.claim_folder("dead")
    alive, lock = state.claim_folder("alive")
    dead_lock.close()

    with lock:
        assert state.sweep() == ["dead"]
        assert alive.exists()
        assert not dead.exists()


def test_sweeping_an_empty_machine_is_harmless() -> None:
    """The first command on a machine meets no state root."""
    assert state.sweep() == []
    assert state.running_clusters() == []


@pytest.mark.parametrize("name", ["", "Upper", "-dash", "dash-", "a/b", "..", "x" * 25, "ünicode"])
def test_names_that_could_escape_are_refused(name: str) -> None:
    """A name becomes part of paths, cgroups and objects."""
    with pytest.raises(ClusterStateError, match="is not 1 to 24 characters"):
        state.cluster_folder(name)


def test_a_state_root_too_deep_for_a_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's limit is told with the way out before anything starts."""
    monkeypatch.setenv("ATOLL_STATE", "/tmp/" + "d" * 100)

    with pytest.raises(ClusterStateError, match="set ATOLL_STATE to a shorter folder"):
        state.claim_folder("one")


def test_missing_clusters_are_told_with_what_to_do(root: Path) -> None:
    """Asking for a cluster that is not there says so."""
    with pytest.raises(ClusterStateError, match="no cluster 'none' is running"):
        state.read_record(root / "none")


def test_hierarchies_of_both_cgroup_versions_are_found_once() -> None:
    """Hybrid machines mount both; a bind mount of one elsewhere is another row of the same kind."""
    mounts = (
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"
    )

    assert cgroups.hierarchies(mounts) == [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/unified")]
