"""Texts on objects: Atoll can read what it writes, and invalid text is a clear error, never a crash."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api import names
from atoll.cluster.allocations import (
    Allocation,
    ContainerDevices,
    allocation_annotations,
    bound_allocation,
    parse_allocation,
)
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import NAME_LENGTH_MAX, Holder, lease_name, parse_holder, parse_lease
from atoll.cluster.quantities import parse_bytes
from tests.builders import lease_json, make_allocation, make_lease, make_pod

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?", fullmatch=True)
node_names = st.lists(labels, min_size=1, max_size=8).map(".".join).filter(lambda name: len(name) <= NAME_LENGTH_MAX)
uuids = st.text(string.ascii_letters + string.digits + "-/", min_size=1, max_size=60)
allocations = st.dictionaries(st.integers(0, 65535), uuids, min_size=1, max_size=64).filter(
    lambda devices: len(set(devices.values())) == len(devices)
)


@given(node_names, allocations)
def test_allocation_is_read_as_written(node: str, devices: dict[int, str]) -> None:
    """What bind puts on a pod is what everybody reads, in the same order."""
    allocation = Allocation(node, tuple(devices), tuple(devices.values()))

    assert parse_allocation(allocation_annotations(allocation, ())) == allocation


def test_annotations_carry_the_literal_values_of_each_container() -> None:
    """Ids and uuids of the pod and both variables of each container stand under the documented keys."""
    written = allocation_annotations(
        make_allocation("n1", 3, 0), (ContainerDevices("a", "3", "GPU-x"), ContainerDevices("b", "", ""))
    )

    assert written == {
        "gpu.scheduling/allocated": "n1:3,0",
        "gpu.scheduling/uuids": "GPU-n1-0003,GPU-n1-0000",
        "devices.gpu.scheduling/a": "3",
        "uuids.gpu.scheduling/a": "GPU-x",
        "devices.gpu.scheduling/b": "",
        "uuids.gpu.scheduling/b": "",
    }


@pytest.mark.parametrize(
    ("allocated", "uuids"),
    [
        ("", ""),
        ("n1", "GPU-a"),
        (":0", "GPU-a"),
        ("n1:", ""),
        ("n1:0,", "GPU-a"),
        ("n1:0,,1", "GPU-a,GPU-b"),
        ("n1:-1", "GPU-a"),
        ("n1:0x1", "GPU-a"),
        ("n1:²", "GPU-a"),
        ("n1:0,0", "GPU-a,GPU-b"),
        ("n1:" + "9" * 5000, "GPU-a"),
        ("n1:0,1", "GPU-a"),
        ("n1:0,1", "GPU-a,GPU-a"),
        ("n1:0,1", "GPU-a,"),
        ("n1:0", "GPU-a,GPU-b"),
        ("n1:" + ",".join(map(str, range(65))), ",".join(f"GPU-{i}" for i in range(65))),
    ],
    ids=lambda text: text[:20] or "empty",
)
def test_forged_allocation_is_an_error_with_the_value(allocated: str, uuids: str) -> None:
    """Two annotations that do not describe one set are refused, and the message shows a bounded piece of them."""
    with pytest.raises(MalformedValue) as caught:
        parse_allocation({names.ALLOCATED: allocated, names.UUIDS: uuids})

    assert caught.value.value in {allocated[:200], uuids[:200]}
    assert len(str(caught.value)) < 500


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_is_an_allocation_or_malformed(allocated: str, uuids: str) -> None:
    """No text on a pod makes the reader fail in another way."""
    try:
        allocation = parse_allocation({names.ALLOCATED: allocated, names.UUIDS: uuids})
    except MalformedValue:
        return
    assert allocation is not None
    assert len(allocation.device_ids) == len(allocation.uuids) > 0


@pytest.mark.parametrize(
    ("node", "options"),
    [("", {}), ("n2", {}), ("n1", {"annotations": {names.MIRROR: "hash"}})],
    ids=["never bound", "annotation of another node", "mirror of a static pod"],
)
def test_annotation_alone_is_no_allocation(node: str, options: dict[str, dict[str, str]]) -> None:
    """Only a pod that is bound to the node of its annotation holds GPUs."""
    assert bound_allocation(make_pod(node=node, allocation=make_allocation("n1", 0), **options)) is None


@given(node_names, st.integers(0, 65535))
def test_lease_name_is_a_subdomain(node: str, device_id: int) -> None:
    """The API server accepts the name of every device of every node, and nobody meets another device's."""
    name = lease_name(node, device_id)

    assert len(name) <= NAME_LENGTH_MAX
    assert SUBDOMAIN.fullmatch(name)
    assert name != lease_name(node, device_id + 1)


LONG = ".".join(["a" * 62] * 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a.b", 0), ("a-b", 0)),
        (("a", 1), ("a-1", 1)),
        (("n-1", 2), ("n", 12)),
        ((LONG + "x", 0), (LONG + "y", 0)),
        ((LONG + "x", 1), (LONG + "x", 11)),
        ((LONG.replace(".", "-", 1), 0), (LONG, 0)),
    ],
    ids=["dot or dash", "number in the node", "split elsewhere", "cut tails", "cut ids", "cut, dot or dash"],
)
def test_similar_devices_have_leases_of_their_own(one: tuple[str, int], other: tuple[str, int]) -> None:
    """Names that differ in a character that a careless mapping loses, or behind the cut, stay apart."""
    assert lease_name(*one) != lease_name(*other)


@pytest.mark.parametrize("node", [LONG, LONG + "x", "a" * 240 + "." + "b" * 12, "n1"], ids=len)
def test_lease_of_a_long_node_name_is_read_back(node: str) -> None:
    """The hash in a cut name loses nothing: the annotations say the node, and the name is checked against them."""
    record = parse_lease(make_lease(node, 15, holder=Holder("ns", "pod", "uid")))

    assert (record.node, record.device_id, record.device_uuid) == (node, 15, f"GPU-{node}-0015")
    assert record.holder == Holder("ns", "pod", "uid")
    times = ("2026-01-31T12:00:00.000000Z", "2026-01-31T12:01:00.000000Z")
    assert (record.attempt, record.renewed, record.deadline) == ("token", *times)


def test_lease_has_no_owner() -> None:
    """Deleting a Node must not let the garbage collector free GPUs whose containers run on."""
    assert "ownerReferences" not in lease_json()["metadata"]


@pytest.mark.parametrize("text", ["", "a", "a/b", "a/b/", "/b/c", "a//c", "a/b/c/d", "nonsense"])
def test_odd_holder_is_an_error(text: str) -> None:
    """A holder identity is namespace, pod and uid; anything else is not guessed at."""
    with pytest.raises(MalformedValue):
        parse_holder(text)


def test_holder_is_read_as_written() -> None:
    """Namespaces of 63 and pods of 253 characters fit."""
    holder = Holder("n" * 63, "p" * 253, "6f1c2a9e-0000-4000-8000-000000000000")

    assert parse_holder(str(holder)) == holder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0", 0), ("512", 512), ("40Gi", 40 * 2**30), ("80G", 80 * 10**9)),
        *((f"1{suffix}", 1000**power) for power, suffix in enumerate("kMGT", start=1)),
        *((f"1{suffix}i", 1024**power) for power, suffix in enumerate("KMGT", start=1)),
    ],
)
def test_quantity_is_exact(text: str, expected: int) -> None:
    """A claim, a model and a report agree to the byte."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "1.5Gi", "1e3", "1gi", "1GiB", "1 Gi", "٣Gi", "9" * 19, "1KiMi"])
def test_odd_quantity_is_an_error(text: str) -> None:
    """What is no plain quantity of memory is refused, not rounded."""
    with pytest.raises(MalformedValue):
        parse_bytes(text)
