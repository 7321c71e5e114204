"""Atoll ignores Leases in other namespaces, whatever their writer and content."""

from pathlib import Path

from tests.builders import lease_json, make_allocation, pod_json
from tests.controllers.harness import LEASES, PODS, InMemoryServer, running_controllers, strip_version

STRANGERS = LEASES.replace("/atoll-system/", "/team/")


async def test_lease_in_ones_own_namespace_takes_and_frees_nothing(tmp_path: Path) -> None:
    """A user copies a GPU's Lease into his namespace, under his own name, and deletes it: the ledger does not move."""

    def setup(server: InMemoryServer) -> None:
        allocation = make_allocation("n1", 0)
        body = pod_json("p", node="n1", phase="Running", allocation=allocation)
        server.put(f"{PODS}/p", strip_version(body))
        server.put(f"{LEASES}/gpu-n1-0", strip_version(lease_json("n1", 0)))
        for number in (0, 1):
            copy = lease_json("n1", number)
            copy["metadata"]["namespace"] = "team"
            server.put(f"{STRANGERS}/gpu-n1-{number}", strip_version(copy))

    async with running_controllers(tmp_path, setup) as running:
        assert set(running.mirror.ledger.leases) == {"gpu-n1-0"}
        for number in (0, 1):
            running.server.remove(f"{STRANGERS}/gpu-n1-{number}")
        running.put_pod("witness", gpus=None)
        await running.settled(lambda: ("team", "witness") in running.mirror.pods.store)
        for loop in running.loops:
            await loop.run_once()
        assert running.held() == {"gpu-n1-0"}
        assert running.mirror.ledger.free("n1", now_seconds=0.0) == 0b11111110
