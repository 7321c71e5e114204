"""The heartbeat: one Lease per node, and the first sign that the API server was restored from a backup."""

import pytest

from agent.heartbeat import HeartbeatWriter
from atoll.api import names
from atoll.kube import paths
from atoll.kube.client import ApiClient
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import ManualClock

HEARTBEAT = paths.leases(names.HEARTBEAT_NAMESPACE, "n1")


async def test_the_heartbeat_is_made_and_renewed(server: FakeApiServer, client: ApiClient) -> None:
    """One Lease, named like the node, with six digits in its time even at a whole second."""
    clock = ManualClock()
    heartbeat = HeartbeatWriter(client, "n1", clock=clock, period_seconds=60.0)

    assert await heartbeat.renew()
    assert server.objects[HEARTBEAT]["spec"] == {
        "holderIdentity": "n1",
        "leaseDurationSeconds": 180,
        "renewTime": "2026-01-31T12:00:00.000000Z",
    }

    await clock.advance(61)
    assert await heartbeat.renew()
    assert server.objects[HEARTBEAT]["spec"]["renewTime"] == "2026-01-31T12:01:01.000000Z"
    assert server.count("POST") == 1


@pytest.mark.parametrize("is_ahead", [False, True], ids=["versions behind", "versions ahead"])
async def test_a_restored_api_server_gets_no_renewal_at_first(
    server: FakeApiServer, client: ApiClient, is_ahead: bool
) -> None:
    """The Lease is in an older state than the one that we wrote, whatever the server's version is. The next call, after
    the agent has reported, renews it."""
    clock = ManualClock()
    heartbeat = HeartbeatWriter(client, "n1", clock=clock, period_seconds=60.0)
    await heartbeat.renew()
    backup = dict(server.objects)
    await clock.advance(60)
    await heartbeat.renew()
    server.objects, server.version = backup, 9000 if is_ahead else 101
    await clock.advance(60)

    assert not await heartbeat.renew()
    assert server.objects == backup
    assert await heartbeat.renew()
    assert server.objects[HEARTBEAT]["spec"]["renewTime"] == "2026-01-31T12:02:00.000000Z"


async def test_a_heartbeat_that_is_gone_may_be_missing_in_a_backup(server: FakeApiServer, client: ApiClient) -> None:
    """It was deleted with its Node when the backup was made, and the Node is back since: the report comes first. The
    next call makes the Lease anew."""
    heartbeat = HeartbeatWriter(client, "n1", clock=ManualClock(), period_seconds=60.0)
    backup = dict(server.objects)
    await heartbeat.renew()
    server.objects, server.version = backup, 9000

    assert not await heartbeat.renew()
    assert server.objects == backup
    assert await heartbeat.renew()
    assert await heartbeat.renew()
    assert server.count("POST") == 2


async def test_a_label_on_the_lease_is_no_restore(server: FakeApiServer, client: ApiClient) -> None:
    """Somebody else changes the Lease: the renewal goes on."""
    heartbeat = HeartbeatWriter(client, "n1", clock=ManualClock(), period_seconds=60.0)
    await heartbeat.renew()
    labelled = server.objects[HEARTBEAT]
    server.put(HEARTBEAT, {**labelled, "metadata": {**labelled["metadata"], "labels": {"team": "vision"}}})

    assert await heartbeat.renew()
