"""The whole agent against a fake API server: what it publishes when, and that evidence never claims too much."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.evidence import KubeletReading
from agent.node_agent import Intervals, NodeAgent
from agent.observation import MachineObserver
from agent.simulated import SimulatedBackend, play
from atoll.api import names
from atoll.cluster.leases import lease_name
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.service.clock import SystemClock
from tests.agent.conftest import _patch_status
from tests.fakes.api_server import FakeApiServer, Object, answering
from tests.fakes.clock import until
from topology.profiles import profile

REPORT = paths.gpunodestatuses("n1")
NODE = paths.nodes("n1")
XID = {"kind": "xid", "code": 79, "firstTime": "2026-01-31T11:00:00Z", "lastTime": "2026-01-31T11:00:00Z"}
UID = "11111111-2222-3333-4444-555555555555"


@dataclass
class FakeKubelet:
    """Lists what the test says; None answers nothing. `before` runs in the middle of each look."""

    listed: set[str] | None = field(default_factory=set)
    before: Callable[[], None] | None = None
    reads: int = 0

    async def read(self) -> KubeletReading | None:
        self.reads += 1
        if self.before is not None:
            action, self.before = self.before, None
            action()
            for _ in range(50):
                await asyncio.sleep(0.001)
        return None if self.listed is None else KubeletReading(frozenset(self.listed), frozenset())


@dataclass
class World:
    """A node with its fake API server, cgroups and kubelet, and the agents that a test starts on it."""

    server: FakeApiServer
    client: ApiClient
    folder: Path
    kubelet: FakeKubelet = field(default_factory=FakeKubelet)

    @property
    def report(self) -> dict[str, Any]:
        return self.server.objects.get(REPORT, {}).get("status", {})

    @property
    def sequence(self) -> int:
        return self.report.get("evidence", {}).get("sequence", 0)

    @property
    def position(self) -> int:
        return int(self.report["evidence"].get("podResourceVersion") or 0)

    def pods(self) -> dict[str, bool]:
        return {pod["uid"]: pod["live"] for pod in self.report.get("pods", [])}

    def capacity(self) -> str | None:
        return self.server.objects[NODE]["status"]["capacity"].get(names.GPU_RESOURCE)

    def bind(self, name: str = "a", *, gpus: int = 1, phase: str = "Running") -> str:
        """Bind a GPU pod and start it: a process in its cgroup, an entry in the kubelet's list."""
        path = paths.pods("default", name)
        resources = {"requests": {names.GPU_RESOURCE: str(gpus)}}
        spec = {"nodeName": "n1", "containers": [{"name": "main", "resources": resources}]}
        self.server.put(path, {"metadata": {"uid": UID}, "spec": spec, "status": {"phase": phase}})
        self.processes("4711\n")
        if self.kubelet.listed is not None:
            self.kubelet.listed.add(UID)
        return path

    def processes(self, text: str) -> None:
        folder = self.folder / "cgroup/cpu/kubepods" / f"pod{UID}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text(text)

    def end(self) -> None:
        """The container ended and the kubelet removed the cgroup."""
        folder = self.folder / "cgroup/cpu/kubepods" / f"pod{UID}"
        (folder / "cgroup.procs").unlink()
        folder.rmdir()

    def state(self, **state: object) -> None:
        path = self.folder / "state.json"
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").replace(path)

    @asynccontextmanager
    async def agent(self, *, poll_seconds: float = 30.0, order: str = "") -> AsyncIterator[NodeAgent]:
        machine = play(profile("dgx1-v100"), seed="n1", order=order)
        agent = NodeAgent(
            "n1",
            client=self.client,
            observer=MachineObserver(
                SimulatedBackend(machine, state_path=self.folder / "state.json"),
                cgroup_mount=self.folder / "cgroup",
                timeout_seconds=5.0,
            ),
            kubelet=self.kubelet,
            intervals=Intervals(poll_seconds, 0.01, heartbeat_seconds=60.0, start_spread_seconds=0.0),
            agent_version="1",
            clock=SystemClock(),
            rng=random.Random(1),
        )
        work = (
            agent.follow_pods(),
            agent.follow_node(),
            agent.follow_report(),
            agent.keep_observing(),
            agent.keep_heartbeat(),
            agent.keep_capacity(),
        )
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            yield agent
        finally:
            ended = [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert not ended, f"a task of the agent ended: {ended}"


@pytest.fixture
def world(server: FakeApiServer, client: ApiClient, tmp_path: Path) -> World:
    for folder in ("cgroup/cpu", "cgroup/cpu/kubepods"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "cgroup.procs").write_text("")
    server.put(
        NODE, {"metadata": {"uid": "node-uid"}, "status": {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}}}
    )
    return World(server, client, tmp_path)


async def test_a_start_publishes_twice_and_then_only_news(world: World) -> None:
    """Two complete readings, a heartbeat and the capacity; a quiet machine causes no further write."""
    async with world.agent(poll_seconds=0.01) as agent:
        await until(lambda: world.sequence == 2 and world.capacity() == "8")
        looks = agent.observations_count
        await until(lambda: agent.observations_count >= looks + 10)

        assert agent.publications_count == 2
        assert world.sequence == 2
        assert world.server.count("PATCH " + NODE) == 1
        assert world.report["nodeUid"] == "node-uid"
        assert paths.leases(names.HEARTBEAT_NAMESPACE, "n1") in world.server.objects


async def test_a_labelled_node_has_its_driver_let_go_and_taken_up(world: World) -> None:
    """The label is acted on at once: devices are unknown meanwhile, and the condition says why; pods are still told."""
    world.bind()
    async with world.agent() as agent:
        await until(lambda: world.report.get("healthyCount") == 8)
        labelled = {"labels": {names.DRIVER_HOLD: names.DRIVER_RELEASED}}
        node = world.server.objects[NODE]
        world.server.put(NODE, {**node, "metadata": {**node["metadata"], **labelled}})
        await until(lambda: world.report["healthyCount"] == 0)

        told = next(one for one in world.report["conditions"] if one["type"] == names.CONDITION_DEVICES_READABLE)
        assert told["status"] == "False"
        assert told["message"] == "the driver was released: label gpu.scheduling/driver-hold"
        assert (world.pods(), world.report["deviceCount"], agent.driver_problem) == ({UID: True}, 8, "")

        node = world.server.objects[NODE]
        world.server.put(NODE, {**node, "metadata": {**node["metadata"], "labels": {}}})
        await until(lambda: world.report["healthyCount"] == 8)
        agent.release_driver("the driver was released: SIGUSR1")
        await until(lambda: world.report["healthyCount"] == 0)
        agent.release_driver("")
        await until(lambda: world.report["healthyCount"] == 8)


async def test_an_agent_reports_anew_after_the_api_server_was_restored(world: World) -> None:
    """The backup's report is old and its version lower than all that was seen: the whole of the present one is written,
    under a number past both."""
    async with world.agent() as agent:
        await until(lambda: world.sequence == 2 and agent.devices)
        server, before = world.server, world.report
        old = {**before, "evidence": {"sequence": 1}, "devices": before["devices"][:1], "agentVersion": "0.0.9"}
        server.sends_events = False
        server.version = 3
        server.put(REPORT, {"metadata": {"name": "n1"}, "status": old})
        server.sends_events = True
        for stream in server.open_streams:
            stream.break_connection()
        await until(lambda: world.sequence > 2 and len(world.report["devices"]) == 8 and world.position > 0)

        assert world.report["agentVersion"] == "1"
        assert world.position <= server.version


def restore(server: FakeApiServer, backup: dict[str, Object]) -> None:
    """Put back the objects of a backup, under versions that are ahead; the server is away for a while."""
    server.objects, server.version = backup, 9000
    server.fail(answering(503), times=12, containing="GET")
    for stream in server.open_streams:
        stream.break_connection()


@pytest.mark.parametrize("is_restored", [True, False], ids=["restored meanwhile", "started again in a moment"])
async def test_a_blind_agent_that_starts_after_a_restore_tells_of_it(world: World, *, is_restored: bool) -> None:
    """Its process has seen nothing of it; the heartbeat in the API server is that of the backup."""
    (world.folder / "cgroup").rename(world.folder / "away")
    beat = paths.leases(names.HEARTBEAT_NAMESPACE, "n1")
    async with world.agent(poll_seconds=0.05) as agent:
        await until(lambda: world.sequence >= 1 and agent.devices and beat in world.server.objects)
        if is_restored:
            old = world.server.objects[beat]
            world.server.put(beat, {**old, "spec": {**old["spec"], "renewTime": "2026-01-31T11:00:00.000000Z"}})
    async with world.agent(poll_seconds=0.05) as agent:
        await until(lambda: agent.observations_count >= 3)
        assert world.report["evidence"]["unreadSinceRestore"] is is_restored


async def test_a_blind_agent_tells_of_a_restore_until_it_can_read(world: World) -> None:
    """Its successor tells of it too. Who starts after the restore cannot know it from anything else."""
    cgroups, away = world.folder / "cgroup", world.folder / "away"
    cgroups.rename(away)
    is_told = lambda: world.report["evidence"]["unreadSinceRestore"]  # noqa: E731
    async with world.agent(poll_seconds=0.05) as agent:
        await until(lambda: world.sequence >= 1 and agent.devices)
        assert not is_told()
        server, backup = world.server, dict(world.server.objects)
        edited = json.loads(json.dumps(backup[REPORT]))
        edited["metadata"]["labels"] = {"team": "vision"}
        server.put(REPORT, edited)
        await until(lambda: agent.watches["report"].resource_version == str(server.version))
        restore(server, backup)
        await until(is_told)

    async with world.agent(poll_seconds=0.05) as agent:
        await until(lambda: agent.observations_count >= 2)
        assert is_told()
        away.rename(cgroups)
        await until(lambda: not is_told())


async def test_a_restore_changes_nothing_of_what_is_known_of_the_machine(world: World) -> None:
    """Open incidents and cards that left are facts of the machine, of which the backup may know nothing; and each
    report after a restore has a position, or it would prove nothing of the pods that left."""
    async with world.agent(poll_seconds=0.02) as agent:
        await until(lambda: world.sequence == 2 and agent.devices)
        server, backup = world.server, dict(world.server.objects)
        edited = json.loads(json.dumps(server.objects[REPORT]))
        edited["status"]["devices"][3]["incidents"] = [
            {
                "kind": "xid",
                "code": 79,
                "count": 1,
                "firstTime": "2026-01-31T11:00:00Z",
                "lastTime": "2026-01-31T11:00:00Z",
            }
        ]
        edited["status"]["departed"] = [{"id": 9, "uuid": "GPU-sold", "leftTime": "2026-01-01T00:00:00Z"}]
        server.put(REPORT, edited)
        await until(lambda: agent.devices[3].incidents)
        positions: set[str] = set()
        restore(server, backup)
        published = agent.publications_count

        def is_reported_twice() -> bool:
            positions.add(world.report["evidence"].get("podResourceVersion", ""))
            return agent.publications_count >= published + 2

        await until(is_reported_twice)

    assert [one["code"] for one in world.report["devices"][3]["incidents"]] == [79]
    assert [card["uuid"] for card in world.report["departed"]] == ["GPU-sold"]
    assert "" not in positions


async def test_a_look_that_began_before_a_restore_is_not_published(world: World) -> None:
    """The server is restored in the middle of a look: no report carries a position of the time before."""
    server = world.server
    server.version = 500
    async with world.agent(poll_seconds=0.05) as agent:
        await until(lambda: world.sequence == 2)
        old = {**world.report, "agentVersion": "0.0.9", "evidence": {"sequence": 1, "podResourceVersion": "2"}}
        positions: list[int] = []

        def restore() -> None:
            assert world.kubelet.listed is not None
            world.kubelet.listed.add(UID)
            server.sends_events = False
            server.version = 3
            server.put(NODE, server.objects[NODE])
            server.put(REPORT, {**server.objects[REPORT], "status": old})
            server.sends_events = True
            server.intercept(lambda *_: positions.append(world.position))
            for stream in server.open_streams:
                stream.break_connection()

        server.put(paths.pods("default", "plain"), {"spec": {"nodeName": "n1", "containers": []}})
        await until(lambda: agent.pods.resource_version == str(server.version))
        world.kubelet.before = restore
        await until(lambda: positions and world.report["agentVersion"] == "1" and world.position > 2)

        assert max((*positions, world.position)) < 500


async def test_a_deletion_is_followed_by_two_readings_past_it(world: World) -> None:
    """Although nothing else changed: both lie past the deletion, and neither shows the pod."""
    path = world.bind()
    async with world.agent():
        await until(lambda: world.sequence == 2)
        assert world.pods() == {UID: True}
        assert world.kubelet.listed is not None
        world.kubelet.listed.clear()
        world.end()

        deleted_at = int(world.server.remove(path)["metadata"]["resourceVersion"])
        await until(lambda: world.sequence == 4)

        assert world.position >= deleted_at
        assert world.pods() == {}


async def test_a_pod_that_runs_on_after_its_deletion_stays_in_the_report(world: World) -> None:
    """Force-deleted, the kubelet forgot it, the container runs: live until its cgroup is gone, told within a moment."""
    path = world.bind()
    async with world.agent():
        await until(lambda: world.sequence == 2)
        assert world.kubelet.listed is not None
        world.kubelet.listed.clear()
        world.server.remove(path)
        await until(lambda: world.sequence == 4)
        assert world.pods() == {UID: True}

        world.end()
        await until(lambda: world.pods() == {})

        assert world.sequence == 5


async def test_a_pod_that_ended_by_its_own_object_owes_nothing(world: World) -> None:
    """Terminal and every container terminated is proof enough; its deletion costs no report of its own."""
    path = world.bind()
    async with world.agent(poll_seconds=0.01) as agent:
        await until(lambda: world.sequence == 2)
        statuses = [{"name": "main", "state": {"terminated": {"exitCode": 0}}}]
        ended = {"phase": "Succeeded", "containerStatuses": statuses}
        world.server.put(path, {**world.server.objects[path], "status": ended})
        world.kubelet.listed = set()
        world.end()
        await until(lambda: world.pods() == {} and agent.publications_count == world.sequence)
        published = agent.publications_count

        deleted = world.server.remove(path)["metadata"]["resourceVersion"]
        await until(lambda: agent.pods.resource_version == deleted)
        looks = agent.observations_count
        await until(lambda: agent.observations_count >= looks + 5)

        assert agent.publications_count == published


async def test_a_deletion_during_a_look_is_not_paid_by_it(world: World) -> None:
    """A look that began before a deletion carries the older position; two more follow that begin after it."""
    path = world.bind()
    async with world.agent():
        await until(lambda: world.sequence == 2)
        deleted: list[int] = []
        world.kubelet.before = lambda: deleted.append(int(world.server.remove(path)["metadata"]["resourceVersion"]))
        world.server.put(REPORT, _asking(world, "look now"))
        await until(lambda: deleted)
        positions = set()

        def collect() -> bool:
            positions.add((world.sequence, world.position))
            return world.sequence >= 5

        await until(collect)

        past = {sequence for sequence, position in positions if position >= deleted[0]}
        before = {sequence for sequence, position in positions if position < deleted[0]}
        assert 5 in past
        assert before
        assert max(before) < min(past)


async def test_a_pod_set_failed_by_hand_is_watched(world: World) -> None:
    """A third party wrote the phase while the container runs: two readings past that, live until it really ended."""
    world.bind()
    async with world.agent():
        await until(lambda: world.sequence == 2)

        world.bind(phase="Failed")
        changed_at = world.server.version
        await until(lambda: world.sequence == 4 and world.position >= changed_at)
        assert world.pods() == {UID: True}

        world.end()
        await until(lambda: world.pods() == {UID: False})


async def test_evidence_on_request_lies_past_the_request(world: World) -> None:
    """Whoever lost sight of a deletion asks, and gets two readings from beyond the moment of asking."""
    async with world.agent():
        await until(lambda: world.sequence == 2)
        world.server.sends_events = False
        for _ in range(5):
            world.server.put("/api/v1/namespaces/other/pods/elsewhere", {"spec": {"nodeName": "n2"}})
        world.server.sends_events = True

        asked_at = int(world.server.put(REPORT, _asking(world, "1"))["metadata"]["resourceVersion"])
        await until(lambda: world.sequence == 4)

        assert world.position >= asked_at - 1


async def test_a_request_made_before_the_start_is_answered(world: World) -> None:
    """A request that came while no agent ran is answered by the first two readings, from beyond the request."""
    asked = {"metadata": {"annotations": {names.EVIDENCE_WANTED: "1"}}}
    world.server.put(REPORT, asked)
    asked_at = world.server.version

    async with world.agent():
        await until(lambda: world.sequence == 2)

        assert world.server.count("GET /api/v1/pods?fieldSelector") == 1
        assert world.position >= asked_at


async def test_without_the_kubelet_two_readings_say_so_and_no_more(world: World) -> None:
    """The kubelet does not answer: two reports say so; when it answers again both complete readings follow."""
    world.kubelet.listed = None
    async with world.agent(poll_seconds=0.05) as agent:
        await until(lambda: agent.observations_count >= 5)
        assert world.report["evidence"]["kubeletRead"] is False
        assert world.sequence == 2

        world.kubelet.listed = set()
        await until(lambda: world.sequence == 4)

        assert world.report["evidence"]["kubeletRead"] is True


async def test_ids_survive_a_restart_and_a_renumbering(world: World) -> None:
    """The next process, after a reboot that reversed the NVML order, reports the same ids and the new indices."""
    async with world.agent():
        await until(lambda: world.sequence == 2)
        before = {device["uuid"]: (device["id"], device["index"]) for device in world.report["devices"]}
    world.state(bootId="second")

    async with world.agent(order="reversed"):
        await until(lambda: world.report["bootId"] == "second")
        after = {device["uuid"]: (device["id"], device["index"]) for device in world.report["devices"]}

    assert {uuid: device_id for uuid, (device_id, _) in after.items()} == {
        uuid: device_id for uuid, (device_id, _) in before.items()
    }
    assert [index for _, (_, index) in sorted(after.items(), key=lambda item: item[1])] == list(range(7, -1, -1))


async def test_a_replaced_card_waits_for_the_lease_of_its_id(world: World) -> None:
    """While a Lease of the old card's id exists the new card gets another id, from one request per candidate."""
    async with world.agent(poll_seconds=0.01):
        await until(lambda: world.sequence == 2)
        lease = paths.leases(names.SYSTEM_NAMESPACE, lease_name("n1", 3))
        world.server.put(lease, {"metadata": {"annotations": {names.LEASE_DEVICE_UUID: "GPU-old"}}, "spec": {}})

        world.state(devices={"3": {"uuid": "GPU-new"}})
        await until(lambda: any(device["uuid"] == "GPU-new" for device in world.report["devices"]))

    assert {device["uuid"]: device["id"] for device in world.report["devices"]}["GPU-new"] == 8
    assert len(world.report["devices"]) == 8


async def test_a_deleted_report_is_written_again_with_its_open_incidents(world: World) -> None:
    """Somebody deleted the object: the agent notices by its watch and publishes at once. No driver tells an XID twice,
    so the card would count as healthy if the agent forgot it."""
    async with world.agent():
        await until(lambda: world.sequence == 2)
        edited = json.loads(json.dumps(world.server.objects[REPORT]))
        edited["status"]["devices"][3]["incidents"] = [XID]
        world.server.put(REPORT, edited)

        world.server.remove(REPORT)
        await until(lambda: world.sequence == 3)

    assert len(world.report["devices"]) == 8
    assert [incident["code"] for incident in world.report["devices"][3]["incidents"]] == [79]


async def test_two_devices_of_one_id_get_ids_of_their_own(world: World) -> None:
    """Somebody edited the report so that nothing is given out on the node: the Leases say which id is whose."""
    async with world.agent():
        await until(lambda: world.sequence == 2)
        before = {device["uuid"]: device["id"] for device in world.report["devices"]}
        edited = json.loads(json.dumps(world.server.objects[REPORT]))
        edited["status"]["devices"][5]["id"] = 2
        world.server.put(
            paths.leases(names.SYSTEM_NAMESPACE, "gpu-n1-5"),
            {"metadata": {"annotations": {names.LEASE_DEVICE_UUID: edited["status"]["devices"][5]["uuid"]}}},
        )
        world.server.put(REPORT, edited)
        world.state()
        world.server.put(REPORT, _asking(world, "1"))
        await until(lambda: {device["uuid"]: device["id"] for device in world.report["devices"]} == before)


async def test_an_agent_without_an_api_server_is_alive(world: World) -> None:
    """The server is away when a GPU falls ill, and later when the agent starts: it does not count as stuck, or the
    kubelet would end it again and again; once the server is back the report comes by itself."""
    async with world.agent(poll_seconds=0.01) as agent:
        await until(lambda: world.sequence == 2)
        world.server.faults.clear()
        world.server.fail(answering(503, "ServiceUnavailable"), times=100_000)
        world.state(devices={"3": {"fault": "XID 79"}})
        await until(lambda: agent.failures_count >= 2)
        assert agent.seconds_stuck() < agent.seconds_since_observation()
        async with world.agent() as other:
            await until(lambda: other.watches["pod"].last_error != "")
            assert other.seconds_stuck() == 0.0

        world.server.faults.clear()
        world.server.fail(_patch_status(world.server), times=100_000, containing="/status?")
        await until(lambda: world.report["devices"][3]["health"]["state"] == "unhealthy")


async def test_capacity_is_asserted_again(world: World) -> None:
    """The kubelet zeroed the resource, or the Node lost it: it comes back at once, in both places."""
    world.bind(gpus=5)
    async with world.agent():
        await until(lambda: world.capacity() == "8")
        for count in ("0", None):
            counts = {"cpu": "8"} if count is None else {"cpu": "8", names.GPU_RESOURCE: count}
            world.server.put(
                NODE, {"metadata": {"uid": "node-uid"}, "status": {"capacity": counts, "allocatable": counts}}
            )
            await until(lambda: world.capacity() == "8")
            assert world.server.objects[NODE]["status"]["allocatable"][names.GPU_RESOURCE] == "8"


def _asking(world: World, value: str) -> dict[str, Any]:
    """The stored report with the annotation that asks for evidence."""
    current = world.server.objects[REPORT]
    return {**current, "metadata": {**current["metadata"], "annotations": {names.EVIDENCE_WANTED: value}}}
