"""Publishing: one writer, the smallest patch, only changes, and never onto a successor of the object."""

from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent.publishing import StatusWriter, json_merge_patch, says_something_new
from atoll.api import names
from atoll.api.node_status import Device, Evidence, GpuNodeStatusReport, Health, HealthState
from atoll.kube import paths
from atoll.kube.client import ApiClient
from tests.fakes.api_server import FakeApiServer, answering, merge
from tests.fakes.clock import ManualClock

PATH = paths.gpunodestatuses("n1")
HEARTBEAT = paths.leases(names.HEARTBEAT_NAMESPACE, "n1")
JSON = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2) | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=4)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), JSON, max_size=4)


def report(*, healthy: bool = True, sequence: int = 0, position: str = "7", boot_id: str = "b1") -> GpuNodeStatusReport:
    health = Health(state=HealthState.HEALTHY if healthy else HealthState.UNHEALTHY)
    return GpuNodeStatusReport(
        boot_id=boot_id,
        devices=(Device(id=0, uuid="GPU-a", model="nvidia-t4", index=0, health=health),),
        evidence=Evidence(sequence=sequence, pod_resource_version=position, live_read=True, kubelet_read=True),
    )


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_turns_one_object_into_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Applying the patch gives the target, and equal objects need no patch at all."""
    assert merge(before, json_merge_patch(before, after)) == after
    assert json_merge_patch(after, after) == {}


@pytest.mark.parametrize(
    ("stored", "new", "want"),
    [
        pytest.param(None, report(), True, id="nothing is stored"),
        pytest.param(report(sequence=4, position="9"), report(), False, id="only position and sequence differ"),
        pytest.param(report(), report(healthy=False), True, id="a device fell ill"),
        pytest.param(report(), report(boot_id="b2"), True, id="the machine was booted"),
    ],
)
def test_only_news_are_worth_a_write(stored: GpuNodeStatusReport | None, new: GpuNodeStatusReport, want: bool) -> None:
    """Position, sequence and time alone are no news."""
    assert says_something_new(new, stored) is want


async def test_the_object_is_made_and_then_patched(server: FakeApiServer, client: ApiClient) -> None:
    """Without an object one is made, without owner; from then on patches carry only what changed."""
    writer = StatusWriter(client, "n1", clock=ManualClock())

    await writer.publish(report())
    await writer.publish(report(healthy=False))

    stored = server.objects[PATH]
    assert "ownerReferences" not in stored["metadata"]
    assert stored["status"]["devices"][0]["health"]["state"] == "unhealthy"
    assert stored["status"]["evidence"]["sequence"] == 2
    assert set(server.bodies[-1]["status"]) == {"devices", "evidence"}
    assert server.count("POST") == 1


async def test_the_sequence_grows_over_restarts(server: FakeApiServer, client: ApiClient) -> None:
    """A new process goes on where the stored report stopped, and a deleted object does not reset a running one."""
    first = StatusWriter(client, "n1", clock=ManualClock())
    await first.publish(report())
    await first.publish(report())
    second = StatusWriter(client, "n1", clock=ManualClock())

    await second.publish(report())
    assert server.objects[PATH]["status"]["evidence"]["sequence"] == 3

    server.remove(PATH)
    await second.publish(report())
    assert server.objects[PATH]["status"]["evidence"]["sequence"] == 4


async def test_a_successor_of_the_object_gets_a_whole_report(server: FakeApiServer, client: ApiClient) -> None:
    """Somebody deleted the object and made another: the patch is fenced by the uid, and the report is written anew."""
    writer = StatusWriter(client, "n1", clock=ManualClock())
    await writer.publish(report())
    server.remove(PATH)
    server.put(PATH, {"spec": {"cordons": [{"uuid": "GPU-a"}]}})

    await writer.publish(report(boot_id="b2"))

    stored = server.objects[PATH]
    assert all("uid" in body["metadata"] for body in server.bodies if body and "status" in body)
    assert stored["spec"] == {"cordons": [{"uuid": "GPU-a"}]}
    assert stored["status"]["devices"][0]["uuid"] == "GPU-a"
    assert stored["status"]["bootId"] == "b2"


async def test_a_report_never_mixes_with_that_of_a_backup(server: FakeApiServer, client: ApiClient) -> None:
    """The API server was restored and the agent has not noticed: its changes alone, on top of the backup's report,
    would tell what nobody saw. Nothing is written, and the next report is whole."""
    server.version = 100
    writer = StatusWriter(client, "n1", clock=ManualClock())
    await writer.publish(report(position="7"))
    backup = server.objects[PATH]
    await writer.publish(report(healthy=False, position="120"))
    server.version = 50
    server.put(PATH, backup)

    assert not await writer.publish(report(healthy=False, boot_id="b2", position="130"))
    assert server.objects[PATH]["status"] == backup["status"]

    assert await writer.publish(report(healthy=False, boot_id="b2", position="51"))
    stored = server.objects[PATH]["status"]
    assert (stored["devices"][0]["health"]["state"], stored["bootId"]) == ("unhealthy", "b2")
    assert stored["evidence"]["sequence"] == 3


@pytest.mark.parametrize(
    "status", [{"devices": [{"id": "three"}]}, {"devices": [{"health": {"state": "wobbly"}}]}, {"links": 7}, "nonsense"]
)
async def test_a_report_that_cannot_be_read_is_written_anew(
    server: FakeApiServer, client: ApiClient, status: object
) -> None:
    """A newer agent or a hand wrote it: this one neither ends nor waits for somebody to delete it, and what an
    administrator wrote beside it stays."""
    spec = {"cordons": [{"uuid": "GPU-a"}]}
    server.put(PATH, {"spec": spec, "status": status if isinstance(status, dict) else {"bootId": [status]}})
    writer = StatusWriter(client, "n1", clock=ManualClock())
    await writer.publish(report())

    assert GpuNodeStatusReport.model_validate(server.objects[PATH]["status"]).devices == report().devices
    assert server.objects[PATH]["spec"] == spec


async def test_a_cut_connection_is_repeated(server: FakeApiServer, client: ApiClient) -> None:
    """A patch whose answer got lost is sent again; the same patch twice is harmless."""
    writer = StatusWriter(client, "n1", clock=ManualClock())
    await writer.publish(report())
    server.faults.appendleft(("/status?", answering(503, "ServiceUnavailable")))

    await writer.publish(report(healthy=False))

    assert server.objects[PATH]["status"]["devices"][0]["health"]["state"] == "unhealthy"


async def test_what_the_api_server_leaves_out_is_not_written_again_and_again(
    server: FakeApiServer, client: ApiClient
) -> None:
    """CRDs older than the agent: a field that they do not know is dropped. Two tries, then silence until something else
    is new, or somebody else changed the report."""
    writer = StatusWriter(client, "n1", clock=ManualClock())
    await writer.publish(report())
    plain = server.faults[-1][1]

    async def older(request: web.Request) -> web.StreamResponse:
        server.bodies[-1]["status"].pop("models", None)
        return await plain(request)

    server.faults.extendleft([("/status?", older)] * 100)
    told = report().model_copy(update={"models": "nvidia-h100"})
    writes = server.count("PATCH")

    assert writer.is_news(told)
    await writer.publish(told)
    assert server.count("PATCH") - writes == 2
    assert not writer.is_news(told)
    assert not writer.is_news(told.model_copy(update={"observed_time": "later"}))
    assert writer.is_news(told.model_copy(update={"boot_id": "b2"}))
