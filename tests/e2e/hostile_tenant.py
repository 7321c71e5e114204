"""A tenant who means harm: he has `edit` in a namespace of his own and knows Atoll's code.

He fills it with the largest pods and claims that the API server takes, asks for what no tenant may have, and holds the
webhook's connections. Whatever is refused to him must be refused every time.
"""

import http.client
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from atoll.api import names
from devcluster.installation import ADDRESS, WEBHOOK_PORT
from tests.deploy.api_server import ApiAnswer, RealApi
from tests.e2e.world import RealCluster
from tests.worst_inputs import ANTI, LABELS, NOTES, NUMBERS, many

NAME: Final = "mallory"
OBJECTS_MAX: Final = 24
MANY_LABELS: Final = {"labels": dict(list(LABELS["labels"].items())[:15_000])}
"""Fewer than etcd takes, because managed fields name each of them once more."""
CONNECTIONS: Final = 256
FLOOD: Final = f"""
import socket, ssl, sys, time
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
held = []
while True:
    try:
        plain = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)
        one = context.wrap_socket(plain)
        one.send(b"POST /mutate HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 8000000\\r\\n\\r\\n" + b" " * 60_000)
        held.append(one)
    except OSError:
        time.sleep(0.2)
    if len(held) > {CONNECTIONS}:
        held.pop(0).close()
    time.sleep(0.005)
"""
"""Requests that never end, from inside of the cluster's network, for as long as the test lasts."""


class HostileTenant:
    """`act` does the next harm of a shuffled deck; `let_through` has what should have been refused."""

    def __init__(self, world: RealCluster, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._api = RealApi(world.cluster.kubeconfig, timeout_seconds=4.0)
        self._home = f"{world.namespace}-{NAME}"
        self._ours = f"/apis/{names.API_VERSION}/namespaces/{self._home}"
        self._deck: list[Callable[[HostileTenant], None]] = []
        self._made: list[str] = []
        self._number = 0
        self.counts: Counter[str] = Counter()
        self.let_through: list[str] = []

    def move_in(self) -> None:
        """Make the namespace and the rights of an ordinary tenant, and begin the flood."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self._home}}
        self._world.cluster.api.request("POST", "/api/v1/namespaces", body)
        role = ("--clusterrole=edit", f"--user={NAME}")
        assert self._world.cluster.kubectl("-n", self._home, "create", "rolebinding", NAME, *role).returncode == 0
        self._world.cluster.spawn("flood", [sys.executable, "-c", FLOOD, ADDRESS, str(WEBHOOK_PORT)])

    def act(self) -> None:
        """Do the next harm, if anybody answers."""
        if not self._deck:
            self._deck = self._rng.sample(self.HARMS, len(self.HARMS))
        harm = self._deck.pop()
        with suppress(OSError, http.client.HTTPException):
            harm(self)
            self.counts[harm.__name__] += 1
            while len(self._made) > OBJECTS_MAX:
                self._send("DELETE", self._made.pop(self._rng.randrange(len(self._made))))

    def move_out(self) -> None:
        """Take everything away."""
        self._world.cluster.api.request("DELETE", f"/api/v1/namespaces/{self._home}")

    # Harms

    def large_pod(self) -> None:
        """A pod without GPUs, as large as etcd takes, in one of several ways."""
        spec, metadata = self._rng.choice(
            [
                ({}, MANY_LABELS),
                ({}, NOTES),
                ({}, NUMBERS),
                ({"affinity": ANTI}, {}),
                ({"tolerations": many(20_000, {"operator": "Exists"})}, {}),
                ({"nodeSelector": dict(list(MANY_LABELS["labels"].items())[:7_000])}, {}),
            ]
        )
        self._create_pod(metadata=metadata, **spec)

    def large_claim(self) -> None:
        """A claim with as many labels."""
        self._number += 1
        metadata = {"name": f"claim-{self._number}", **MANY_LABELS}
        body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": metadata}
        self._create(f"{self._ours}/gpuclaims", {**body, "spec": {"devices": {"count": 1}}})

    def gang_that_never_comes(self) -> None:
        """A gang that lacks its members and asks for more time than anybody may have."""
        self._number += 1
        ready = {"enable": True, "timeout": "8760h", "recoveryTimeout": "8760h"}
        spec = {"podSets": [{"name": "w", "count": 64}], "waitForPodsReady": ready}
        metadata = {"name": f"gang-{self._number}"}
        body = {"apiVersion": names.API_VERSION, "kind": "GpuGang", "metadata": metadata, "spec": spec}
        self._create(f"{self._ours}/gpugangs", body)

    def costly_gpu_pod(self) -> None:
        """A pod with GPUs that is expensive to place."""
        spec = self._rng.choice([{"tolerations": many(5_000, {"operator": "Exists"})}, {"affinity": ANTI}])
        self._refused(self._create_pod(gpus=1, **spec), "a costly pod with GPUs")

    def everybodys_gpus(self) -> None:
        """A pod that asks for one GPU and sets the variables itself."""
        name = self._rng.choice([*names.VISIBLE_DEVICES_VARIABLES, *names.DRIVER_DEVICE_VARIABLES])
        self._refused(self._create_pod(gpus=1, env=[{"name": name, "value": "all"}]), f"a pod that sets {name}")

    def past_the_scheduler(self) -> None:
        """A pod with GPUs on a node that he names."""
        self._refused(self._create_pod(gpus=1, nodeName="hopper"), "a pod that names its node")

    def forged_allocation(self) -> None:
        """GPUs by annotation, on a new pod (stripped) and on a pod that exists (refused)."""
        forged = {names.ALLOCATED: "hopper:0", names.UUIDS: "GPU-0"}
        answer = self._create_pod(metadata={"annotations": forged})
        if answer.is_accepted:
            path = self._made[-1]
            self._refused(self._patch(path, {"metadata": {"annotations": forged}}), "an allocation by annotation")

    def node_by_hand(self) -> None:
        """GPUs of a node kept from others by pods/status."""
        answer = self._create_pod(gpus=1)
        if answer.is_accepted:
            body = {"status": {"nominatedNodeName": "hopper"}}
            self._refused(self._patch(f"{self._made[-1]}/status", body), "a node named by hand")

    def leases_by_hand(self) -> None:
        """The ledger itself."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases"
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "gpu-hopper-0"}}
        self._refused(self._send("POST", path, lease), "a Lease by hand")
        self._refused(self._send("DELETE", f"{path}/gpu-hopper-0"), "the end of a Lease")

    HARMS = (
        large_pod, large_pod, large_claim, gang_that_never_comes, costly_gpu_pod, everybodys_gpus, past_the_scheduler,
        forged_allocation, node_by_hand, leases_by_hand,
    )  # fmt: skip

    # Requests

    def _create_pod(
        self, *, gpus: int = 0, metadata: dict[str, Any] | None = None, env: Any = (), **spec: Any
    ) -> ApiAnswer:
        self._number += 1
        limits = {names.GPU_RESOURCE: str(gpus)} if gpus else {}
        container = {"name": "main", "image": "localhost/pause:1", "env": list(env), "resources": {"limits": limits}}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**(metadata or {}), "name": f"pod-{self._number}"},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, **spec},
        }
        return self._create(f"/api/v1/namespaces/{self._home}/pods", body)

    def _create(self, path: str, body: dict[str, Any]) -> ApiAnswer:
        answer = self._send("POST", path, body)
        if answer.is_accepted:
            self._made.append(f"{path}/{body['metadata']['name']}")
        return answer

    def _patch(self, path: str, body: dict[str, Any]) -> ApiAnswer:
        return self._send("PATCH", path, body, content_type="application/merge-patch+json")

    def _send(self, method: str, path: str, body: Any = None, **more: str) -> ApiAnswer:
        return self._api.send(method, path, body, identity=NAME, **more)

    def _refused(self, answer: ApiAnswer, what: str) -> None:
        if answer.is_accepted:
            self.let_through.append(what)
