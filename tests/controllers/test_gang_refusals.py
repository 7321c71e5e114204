"""Members that take no write: annotations that are full, or a policy of their namespace. Their GPUs come back."""

from pathlib import Path

import pytest
from aiohttp import web

from atoll.api import names
from atoll.cluster.leases import Holder
from tests.builders import lease_json, pod_json
from tests.controllers.gang_harness import cluster, settled, term
from tests.controllers.harness import LEASES, PODS, strip_version
from tests.fakes.api_server import Interceptor, status

pytestmark = pytest.mark.asyncio

PAST = "2026-01-01T00:00:00.000000Z"
RESERVED = 11
"""The write after which all Leases stand, the gang is admitted, and nobody was let go."""


def refusing(*paths: str, counted: list[str] | None = None) -> Interceptor:
    """Answer changes of these objects as an API server does when their annotations would become too large."""

    def answer(method: str, path: str, body: object) -> web.Response | None:
        if method != "PATCH" or path not in paths:
            return None
        if counted is not None:
            counted.append(path)
        return status(422, "Invalid", "metadata.annotations: Too long: may not be more than 262144 bytes")

    return answer


async def test_a_member_that_takes_no_annotation_gives_its_gpus_back(tmp_path: Path) -> None:
    """The fence is a condition in its status instead, which also says why the pod could not be annotated."""
    async with cluster() as made:
        made.add_gang("g", 2)
        for number in range(2):
            made.add_member("g", number)
        async with term(made, tmp_path, dies_at=RESERVED) as first:
            await settled(first, first.api.dead.is_set)
        assert made.held() == 8
        made.server.intercept(refusing(f"{PODS}/g-0"))
        made.delete("g-1")
        async with term(made, tmp_path) as second:
            await settled(second, lambda: not made.leases_of("g-0"))

    (condition,) = made.pod("g-0")["status"]["conditions"]
    assert (condition["type"], condition["reason"]) == (names.POD_TAKES_WRITES, names.REASON_WRITE_REFUSED)
    assert "262144 bytes" in condition["message"]
    assert made.is_gated("g-0")


async def test_a_gang_whose_member_takes_no_write_at_all_is_not_tried_without_a_pause(tmp_path: Path) -> None:
    """Its Leases stay, because nothing fences the pod; an event on the gang says so, and attempts are made ever more
    rarely, however often our own writes wake its reconciler."""
    counted: list[str] = []
    async with cluster("n1", "n2") as made:
        made.add_gang("g", 2)
        for number in range(2):
            made.add_member("g", number)
        async with term(made, tmp_path, dies_at=RESERVED) as first:
            await settled(first, first.api.dead.is_set)
        made.server.intercept(refusing(f"{PODS}/g-0", f"{PODS}/g-0/status", counted=counted))
        made.delete("g-1")
        async with term(made, tmp_path) as second:
            await settled(second, lambda: second.notes.notes_on(names.REASON_WRITE_REFUSED, "g"))
            made.add_gang("later", 1)
            made.add_member("later", 0)
            await settled(second, lambda: len(made.leases_of("later-0")) == 4 and not made.is_gated("later-0"))

        note, *_ = second.notes.notes_on(names.REASON_WRITE_REFUSED, "g")
        assert "262144 bytes" in note
        assert len(counted) <= 12
        assert len(made.leases_of("g-0")) == 4


async def test_an_expired_reservation_of_a_pod_that_takes_no_annotation_ends(tmp_path: Path) -> None:
    """The same for a pod without a gang, whose bind never came."""
    async with cluster() as made:
        made.server.put(f"{PODS}/p", strip_version(pod_json("p")))
        lease = lease_json(annotations={names.LEASE_DEADLINE: PAST}, holder=Holder("team", "p", "uid-of-p"))
        made.server.put(f"{LEASES}/gpu-n1-0", strip_version(lease))
        made.server.intercept(refusing(f"{PODS}/p"))
        async with term(made, tmp_path) as running:
            await settled(running, lambda: f"{LEASES}/gpu-n1-0" not in made.server.objects)

    assert made.pod("p")["status"]["conditions"][0]["type"] == names.POD_TAKES_WRITES
