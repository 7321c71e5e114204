"""Gangs on real nodes: all members start, or none holds a GPU; and back in the queue when they are not ready."""

from __future__ import annotations

import random
from typing import Any

import pytest

from atoll.api import names
from tests.e2e.world import World

pytestmark = pytest.mark.e2e

H100 = {"models": ["nvidia-h100"]}
GANGS = "/apis/gpu.scheduling/v1/namespaces/{}/gpugangs"
QUICK = {"backoffBaseSeconds": 2, "backoffMaxSeconds": 4}


class Yard:
    """Gangs of one namespace."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.api = world.cluster.api
        self.gangs = GANGS.format(world.namespace)

    def gang(self, name: str, *, count: int, **spec: Any) -> None:
        """Create a GpuGang with one pod set `workers`."""
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "GpuGang",
            "metadata": {"name": name},
            "spec": {"podSets": [{"name": "workers", "count": count}], **spec},
        }
        self.api.request("POST", self.gangs, body)

    def member_body(self, gang: str, name: str, claim: str, **options: Any) -> dict[str, Any]:
        """Return a pod of a gang."""
        body = self.world.pod_body(name, claim, **options)
        body["metadata"]["annotations"][names.GANG] = gang
        return body

    def member(self, gang: str, number: int, claim: str, **options: Any) -> dict[str, Any]:
        """Create a pod of a gang."""
        return self.world.create(self.member_body(gang, f"{gang}-{number}", claim, **options))

    def status(self, name: str) -> dict[str, Any]:
        """Return the gang's status."""
        found: dict[str, Any] = self.api.get(f"{self.gangs}/{name}").get("status", {})
        return found

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """Return a condition of the gang, empty while there is none."""
        conditions = self.status(name).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def reason(self, name: str, kind: str = names.CONDITION_ADMITTED) -> str:
        """Return the reason of a condition."""
        return str(self.condition(name, kind).get("reason", ""))

    def wait_reason(self, name: str, *reasons: str, kind: str = names.CONDITION_ADMITTED) -> None:
        """Wait until a condition has one of the reasons."""
        self.world.wait(
            lambda: self.reason(name, kind) in reasons, f"gang {name} to say {' or '.join(reasons)} in {kind}"
        )

    def phases(self, gang: str) -> list[str]:
        """Return the phases of a gang's pods."""
        found = [pod for pod in self.world.pods() if pod["metadata"].get("annotations", {}).get(names.GANG) == gang]
        return sorted(pod["status"]["phase"] for pod in found)

    def leases(self, gang: str) -> int:
        """Return how many GPUs the gang holds."""
        prefix = f"{self.world.namespace}/{gang}/"
        return sum(
            lease["metadata"]["annotations"].get(names.LEASE_GANG, "").startswith(prefix)
            for lease in self.world.leases()
        )

    def wait_running(self, gang: str, count: int) -> None:
        """Wait until so many members run."""
        self.world.wait(lambda: self.phases(gang).count("Running") == count, f"{count} members of {gang} to run")


@pytest.fixture
def yard(world: World) -> Yard:
    """Gangs of a namespace of its own."""
    return Yard(world)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 51))]
)  # fmt: skip
def test_of_two_gangs_that_fit_alone_one_runs_and_the_other_holds_nothing(yard: Yard, seed: int) -> None:
    """Members come interleaved. One gang runs whole, the other holds no Lease, and starts when the first ends."""
    yard.world.claim("two", 2, **H100)
    for gang in ("x", "y"):
        yard.gang(gang, count=4)
    members = [(gang, number) for gang in ("x", "y") for number in range(4)]
    random.Random(seed).shuffle(members)
    for gang, number in members:
        yard.member(gang, number, "two")

    yard.world.wait(
        lambda: sorted((yard.reason("x"), yard.reason("y"))) == ["Admitted", "WaitForRoom"], f"one to win (seed {seed})"
    )
    winner, loser = ("x", "y") if yard.reason("x") == "Admitted" else ("y", "x")
    yard.wait_running(winner, 4)
    assert yard.leases(winner) == 8
    assert yard.leases(loser) == 0
    assert yard.phases(loser) == ["Pending"] * 4
    seen = [yard.world.seen(f"{winner}-{number}") for number in range(4)]
    assert len({uuid for one in seen for uuid in one.nvidia}) == 8
    for number in range(4):
        yard.world.delete(f"{winner}-{number}")
    yard.wait_running(loser, 4)
