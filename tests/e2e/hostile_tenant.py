"""A tenant who means harm: he has `edit` in a namespace of his own, a quota of four GPUs, and knows Atoll's code.

He fills it with the largest pods and claims that the API server takes, asks for what no tenant may have, has gangs that
never come or lose members, and holds the webhook's connections. Whatever is refused to him must be refused every time.
"""

import http.client
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from atoll.api import names
from devcluster import DevCluster
from devcluster.installation import WEBHOOK_PORT
from tests.deploy.api_server import DEPLOY, ApiAnswer, RealApi
from tests.e2e.world import RealCluster
from tests.worst_inputs import ANTI, LABELS, NOTES, NUMBERS, many

NAME: Final = "mallory"
OBJECTS_MAX: Final = 40
QUOTA: Final = {"hard": {f"requests.{names.GPU_RESOURCE}": "4"}}
CROWD: Final = 8
PAUSE_SECONDS: Final = 0.5
MANY_LABELS: Final = {"labels": dict(list(LABELS["labels"].items())[:15_000])}
"""Fewer than etcd takes, because managed fields name each of them once more."""
MANY_NOTES: Final = {"annotations": {f"{names.GROUP}/{number}": "" for number in range(60_000)}}
"""More than the API server stores; the webhook is asked before it counts."""
DEVICES: Final[tuple[dict[str, Any], ...]] = (
    {"volumes": [{"name": "device", "hostPath": {"path": "/dev/nvidia0"}}]},
    {"runtimeClassName": names.RUNTIME_CLASS},
    {"env": [{"name": names.NVIDIA_VISIBLE_DEVICES, "value": "all"}]},
    {"metadata": {"annotations": {"cdi.k8s.io/all": "nvidia.com/gpu=all"}}},
    {"metadata": {"annotations": {names.GANG: "launched", "cdi.k8s.io/all": "nvidia.com/gpu=all"}}},
)
FLOOD: Final = r"""
import itertools, socket, ssl, sys, time
host, port, connections, body_bytes = sys.argv[1], *map(int, sys.argv[2:])
head = b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n"
parts = itertools.cycle([head[:30], head, head + b" " * body_bytes])
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
held = []
while True:
    try:
        plain = socket.create_connection((host, port), timeout=2)
        one = context.wrap_socket(plain)
        held.append(one)
        one.sendall(next(parts))
    except OSError:
        time.sleep(0.2)
    if len(held) > connections:
        held.pop(0).close()
    time.sleep(0.005)
"""


def flood(cluster: DevCluster, name: str, *, connections: int, body_bytes: int) -> None:
    """Hold connections to the webhook from inside of the cluster's network until the process of that name is ended:
    half heads, heads without bodies, and bodies that never end."""
    target = (cluster.layout.network.bridge, str(WEBHOOK_PORT))
    cluster.spawn(name, [sys.executable, "-c", FLOOD, *target, str(connections), str(body_bytes)])


class HostileTenant:
    """Does harm after harm from a shuffled deck, in a thread of his own; `let_through` has what should have been
    refused."""

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
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._act_all_the_while, daemon=True)

    def move_in(self) -> None:
        """Make the namespace and the rights of an ordinary tenant, and begin."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self._home}}
        self._world.cluster.api.request("POST", "/api/v1/namespaces", body)
        role = ("--clusterrole=edit", f"--user={NAME}")
        assert self._world.cluster.kubectl("-n", self._home, "create", "rolebinding", NAME, *role).returncode == 0
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": QUOTA}
        self._world.cluster.api.request("POST", f"/api/v1/namespaces/{self._home}/resourcequotas", quota)
        unclaimed = DEPLOY / "policies" / "optional" / "unclaimed-pods.yaml"
        assert self._world.cluster.kubectl("apply", "-f", str(unclaimed)).returncode == 0
        self._world.wait(self._is_guarded, "every policy on what he will try to be in force")
        flood(self._world.cluster, "flood", connections=256, body_bytes=60_000)
        self._thread.start()

    def _is_guarded(self) -> bool:
        path = f"/api/v1/namespaces/{self._home}/pods"
        answers = [self._send("POST", path, self._pod_body(**options), dry_run=True) for options in DEVICES]
        is_in_force = any("atoll-unclaimed-pods" in answer.message for answer in answers)
        return is_in_force and not any(answer.is_accepted for answer in answers)

    def _act_all_the_while(self) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            self._act()

    def _act(self) -> None:
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
        """Stop, and take everything away."""
        self._stopped.set()
        self._thread.join()
        self._world.cluster.api.request("DELETE", f"/api/v1/namespaces/{self._home}")

    # Harms

    def large_pod(self) -> None:
        """A pod without GPUs, as large as etcd takes, in one of several ways."""
        spec, metadata = self._rng.choice(
            [
                ({}, MANY_LABELS),
                ({}, NOTES),
                ({}, NUMBERS),
                ({}, MANY_NOTES),
                ({"affinity": ANTI}, {}),
                ({"tolerations": many(20_000, {"operator": "Exists"})}, {}),
                ({"nodeSelector": dict(list(MANY_LABELS["labels"].items())[:7_000])}, {}),
            ]
        )
        self._create_pod(metadata=metadata, **spec)

    def large_claim(self) -> None:
        """A claim with as many labels, each write of which would cost the API server seconds."""
        self._number += 1
        metadata = {"name": f"claim-{self._number}", **MANY_LABELS}
        body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": metadata}
        answer = self._create(f"{self._ours}/gpuclaims", {**body, "spec": {"devices": {"count": 1}}})
        self._refused(answer, "a claim with labels without end")

    def gang_that_loses_a_member(self) -> None:
        """A gang that asks for more time than anybody may have; sooner or later one of its pods is deleted."""
        self._number += 1
        gang = f"gang-{self._number}"
        ready = {"enable": True, "timeout": "8760h", "recoveryTimeout": "8760h"}
        spec = {"podSets": [{"name": "w", "count": 2}], "waitForPodsReady": ready}
        body = {"apiVersion": names.API_VERSION, "kind": "GpuGang", "metadata": {"name": gang}, "spec": spec}
        self._create(f"{self._ours}/gpugangs", body)
        for _ in range(2):
            self._create_pod(gpus=1, metadata={"annotations": {names.GANG: gang, names.POD_SET: "w"}})

    def crowd(self) -> None:
        """Many pods that wait for gangs that never come, each a cause of events."""
        for _ in range(CROWD):
            waiting = {names.GANG: f"gang-of-{self._number}", names.GANG_SIZE: "64"}
            self._create_pod(metadata={"annotations": waiting})

    def devices_without_a_claim(self) -> None:
        """A pod without GPUs that reaches for some past Atoll."""
        options = self._rng.choice(DEVICES)
        self._refused(self._create_pod(**options), f"a pod without a claim with {options}")

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
        large_pod, large_pod, large_claim, gang_that_loses_a_member, crowd, devices_without_a_claim, costly_gpu_pod,
        everybodys_gpus, past_the_scheduler, forged_allocation, node_by_hand, leases_by_hand,
    )  # fmt: skip

    # Requests

    def _create_pod(self, **options: Any) -> ApiAnswer:
        return self._create(f"/api/v1/namespaces/{self._home}/pods", self._pod_body(**options))

    def _pod_body(
        self, *, gpus: int = 0, metadata: dict[str, Any] | None = None, env: Any = (), **spec: Any
    ) -> dict[str, Any]:
        self._number += 1
        limits = {names.GPU_RESOURCE: str(gpus)} if gpus else {}
        container = {"name": "main", "image": "localhost/pause:1", "env": list(env), "resources": {"limits": limits}}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**(metadata or {}), "name": f"pod-{self._number}"},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, **spec},
        }

    def _create(self, path: str, body: dict[str, Any]) -> ApiAnswer:
        answer = self._send("POST", path, body)
        if answer.is_accepted:
            self._made.append(f"{path}/{body['metadata']['name']}")
        return answer

    def _patch(self, path: str, body: dict[str, Any]) -> ApiAnswer:
        return self._send("PATCH", path, body, content_type="application/merge-patch+json")

    def _send(self, method: str, path: str, body: Any = None, **more: Any) -> ApiAnswer:
        return self._api.send(method, path, body, identity=NAME, **more)

    def _refused(self, answer: ApiAnswer, what: str) -> None:
        if answer.is_accepted:
            self.let_through.append(what)
