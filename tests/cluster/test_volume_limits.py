"""How many members a node takes by the volumes of a CSI driver, and where storage has room for new ones."""

from typing import Any

import msgspec
import pytest

from atoll.cluster.csi import CsiDriver, CsiNode, StorageCapacity, decode_csi_node
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.host_fit import excluded_nodes
from atoll.cluster.objects import Pod
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim, StorageClass
from atoll.cluster.volume_fit import Volumes
from atoll.cluster.volume_limits import UNLIMITED, VolumeUse, crowded_node, members_by_volumes
from tests.cluster.test_host_fit import ZONE, node, pod
from tests.cluster.test_volume_fit import ONLY_A, claim

DRIVER = "disks.example.com"
CLASS = {"metadata": {"name": "c"}, "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer"}


def using(*claims: str) -> Pod:
    """Return a pod that uses these claims."""
    return pod(volumes=[{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims])


def own(name: str, volume: str = "") -> tuple[tuple[str, str], PersistentVolumeClaim]:
    """Return a claim with its key, bound to a volume if it names one."""
    found = claim(volumeName=volume)
    return ("ml", name), msgspec.structs.replace(found, metadata=msgspec.structs.replace(found.metadata, name=name))


def attached(name: str, driver: str = DRIVER) -> PersistentVolume:
    """Return a volume of a driver."""
    body = {"metadata": {"name": name}, "spec": {"csi": {"driver": driver, "volumeHandle": name}}}
    return msgspec.convert(body, PersistentVolume)


def taking(count: int | None) -> CsiNode:
    """Return a node that takes so many volumes; any number for None."""
    driver = {"name": DRIVER, **({} if count is None else {"allocatable": {"count": count}})}
    return msgspec.convert({"metadata": {"name": "n"}, "spec": {"drivers": [driver]}}, CsiNode)


def test_a_node_without_drivers_has_no_limits() -> None:
    """The API server writes null for no drivers; a watch that cannot read it keeps an old state."""
    assert decode_csi_node(b'{"metadata": {"name": "n"}, "spec": {"drivers": null}}').limits() == {}


def known(limits: dict[str, int | None], **more: Any) -> Volumes:
    """Return claims a and d, not bound, b and c, bound to one volume, and `other`, of another driver."""
    claims = dict([own("a"), own("d"), own("b", "v"), own("c", "v"), own("other", "w")])
    volumes = {"v": attached("v"), "w": attached("w", "else.example.com")}
    classes = {"c": msgspec.convert(CLASS, StorageClass)}
    return Volumes(claims, volumes, classes, {name: taking(count) for name, count in limits.items()}, **more)


@pytest.mark.parametrize(
    ("asking", "shared", "want"),
    [
        pytest.param(using("a"), set(), {"n1": 3, "n2": 1, "n3": UNLIMITED, "n4": UNLIMITED}, id="one volume each"),
        pytest.param(using("a", "b"), set(), {"n1": 1, "n2": 1, "n3": UNLIMITED, "n4": UNLIMITED}, id="two each"),
        pytest.param(using("a", "b"), {"b"}, {"n1": 2, "n2": 1, "n3": UNLIMITED, "n4": UNLIMITED}, id="one of all"),
        pytest.param(using("b"), set(), {"n1": 3, "n2": 2, "n3": UNLIMITED, "n4": UNLIMITED}, id="in use there"),
        pytest.param(using("b"), {"b"}, dict.fromkeys(("n1", "n2", "n3", "n4"), UNLIMITED), id="only one of all"),
        pytest.param(
            using("a", "d"), {"a", "d"}, {**dict.fromkeys(("n1", "n3", "n4"), UNLIMITED), "n2": 0}, id="two of all"
        ),
        pytest.param(using("other"), set(), None, id="of a driver without limits"),
        pytest.param(using(), set(), None, id="none"),
    ],
)
def test_a_node_takes_as_many_members_as_it_takes_volumes(
    asking: Pod, shared: set[str], want: dict[str, int] | None
) -> None:
    """A volume in use counts once, whoever uses it; claims that all members share count once."""
    volumes = known({"n1": 3, "n2": 2, "n3": None})
    on = {"n2": [using("b"), using("c", "other")]}

    assert members_by_volumes(asking, ["n1", "n2", "n3", "n4"], on, VolumeUse(volumes), shared) == want


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ([(using("a"), "n1")], ""),
        ([(using("a"), "n1"), (using("b"), "n1")], "node n1 takes 1 volumes of disks.example.com"),
        ([(using("b"), "n1"), (using("c"), "n1")], ""),
        ([(using("a"), "n2"), (using("b"), "n2")], ""),
        ([(using("other"), "n3")], ""),
        ([(using("a"), "n3")], "need 3 with those in use"),
    ],
    ids=["fits", "too many", "one volume", "no limit", "of another driver", "beside others"],
)
def test_a_plan_that_needs_more_volumes_on_a_node_is_told(placed: list[tuple[Pod, str]], words: str) -> None:
    """Pod sets are weighed together; volumes that are in use already count, and trouble of others is none of ours."""
    on = {"n3": [using("b"), pod(volumes=[{"name": "x", "ephemeral": {}}])]}
    made = own("p-x")
    volumes = known({"n1": 1, "n3": 2})
    volumes = Volumes({**volumes.claims, made[0]: made[1]}, volumes.volumes, volumes.classes, volumes.csi_nodes)

    told = crowded_node(placed, on, VolumeUse(volumes))
    assert words in told
    assert bool(told) == bool(words)


def test_a_node_is_looked_at_once_on_one_snapshot_and_its_what_ifs() -> None:
    """Parts of a gang, and gangs, share what was found, and without any pod the node is another."""
    pods = {"n1": [using("a"), using("b")]}
    snapshot = PlacementSnapshot({"n1": node("n1")}, {}, {}, pods, {}, volumes=known({"n1": 3}))
    what_if = snapshot.without_positions({})
    found = snapshot.volume_use.on("n1", snapshot.pods_on["n1"])

    assert what_if.volume_use.on("n1", what_if.pods_on["n1"]) is found
    assert found.counts == {DRIVER: 2}
    emptied = snapshot.emptied()
    assert emptied.volume_use.on("n1", emptied.pods_on.get("n1", ())).counts == {}


def room(capacity: str, labels: dict[str, str] | None, **more: str) -> StorageCapacity:
    """Return storage for the nodes with these labels; for no node for None."""
    topology = {} if labels is None else {"nodeTopology": {"matchLabels": labels}}
    body = {"metadata": {"name": "s"}, "storageClassName": "c", "capacity": capacity, **topology, **more}
    return msgspec.convert(body, StorageCapacity)


ROOM: dict[str, tuple[list[StorageCapacity], list[Any], set[str]]] = {
    "no storage is known": ([], [], set()),
    "room in one zone": ([room("100Gi", {ZONE: "b"}), room("1Gi", {ZONE: "a"})], [], {"n2"}),
    "room everywhere": ([room("100Gi", {})], [], {"n1", "n2"}),
    "no single volume may be as large": ([room("100Gi", {}, maximumVolumeSize="1Gi")], [], set()),
    "of no node": ([room("100Gi", None)], [], set()),
    "of another class": ([room("100Gi", {}, storageClassName="other")], [], set()),
    "room in a zone that the class does not allow": ([room("100Gi", {ZONE: "b"})], ONLY_A, set()),
    "room in a zone that the class allows": ([room("100Gi", {})], ONLY_A, {"n1"}),
}


@pytest.mark.parametrize("case", ROOM)
def test_a_new_volume_is_made_where_storage_has_room_for_it(case: str) -> None:
    """A claim of ten gibibytes, as kube-scheduler weighs CSIStorageCapacity; a driver that publishes none has room."""
    capacities, allowed, want = ROOM[case]
    nodes = [node("n1", labels={ZONE: "a"}), node("n2", labels={ZONE: "b"})]
    kind = msgspec.convert({**CLASS, "allowedTopologies": allowed}, StorageClass)
    found = {("ml", f"s{number}"): one for number, one in enumerate(capacities)}
    told = {"metadata": {"name": DRIVER}, "spec": {"storageCapacity": True}}
    drivers = {DRIVER: msgspec.convert(told, CsiDriver)}
    volumes = Volumes(dict([own("a")]), {}, {"c": kind}, csi_drivers=drivers, capacities=found)
    silent = Volumes(dict([own("a")]), {}, {"c": kind}, capacities=found)

    refused = excluded_nodes(using("a"), nodes, {}, volumes=volumes)
    assert {"n1", "n2"} - refused.keys() == want
    reached = {"n1"} if allowed else {"n1", "n2"}
    assert {"n1", "n2"} - excluded_nodes(using("a"), nodes, {}, volumes=silent).keys() == reached
