"""Atoll's cost on a large idle cluster, and its time to recover, on a real control plane.

    python -m bench.load [--nodes 1000] [--pending 2000] [--idle-seconds 60] [--planted]

Every GPU of every node is held (one whole-machine pod per node, bound by Atoll, so 8 Leases per node), and pods wait
for more. The cluster then idles for a while, and the benchmark measures requests in the API server's audit log by
program (kube-scheduler shares the extender's account), and each process's CPU and memory. Then extender and controllers
are killed, one after the other, and the time until they are ready again is compared with one LIST of the objects that
they read. Finally a pod ends, and waiting pods must get its GPUs.

Nodes are fake (kwok), their reports written once: the agents' load is calculated, not measured. Times include the start
of a Python interpreter. Exits 1 if something did not happen in time.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.api.times import format_microtime
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation, ContainerDevices, allocation_annotations
from atoll.cluster.leases import Reservation, lease_body
from atoll.cluster.objects import decode_pod
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.service.clock import SystemClock
from bench.figures import Row, table
from bench.journal import TooSlow
from bench.stand import GPUS, NAMESPACE, Stand, open_stand
from devcluster.errors import DevclusterError

WAIT_SECONDS = 900.0
SETTLE_SECONDS = 20.0
"""Time for wake-ups, claim status and the last back-offs of filling to end."""
HEARTBEAT_SECONDS = 60.0
SHOWN = 6
"""Kinds of requests shown per row."""
READ = (paths.pods(), paths.leases(names.SYSTEM_NAMESPACE), paths.gpunodestatuses())
"""Collections that extender and controllers list, without the small ones."""
SCHEDULER = f"system:serviceaccount:{names.SYSTEM_NAMESPACE}:atoll-scheduler"
AT_ONCE = 16
ANSWER_SECONDS = 60.0


def asked(lines: Iterable[str]) -> Counter[tuple[str, str]]:
    """Count requests by program and kind, like ("kube-scheduler", "patch events"), from lines of an audit log.

    Atoll's parts and kube-scheduler go by program name; a watch counts when it ends.
    """
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        if not line.endswith("\n"):
            continue  # still being written
        event = json.loads(line)
        if event["stage"] == "ResponseComplete":
            what = event.get("objectRef", {}).get("resource") or "other paths"
            found[event.get("userAgent", "unknown").partition("/")[0], f"{event['verb']} {what}"] += 1
    return found


def fill(stand: Stand, nodes: int, pending: int, *, is_planted: bool = False) -> list[Row]:
    """Hold every GPU, bound by Atoll or planted, then create waiting pods. Raises TooSlow."""
    journal = stand.journal
    if is_planted:
        stand.cluster.stop_scheduler()
    started = time.monotonic()
    holders = stand.create(nodes, gpus=GPUS)
    if is_planted:
        plant(stand.cluster.kubeconfig, NAMESPACE, holders)
        stand.start_scheduler()
    stand.wait(lambda: len(journal.bound_at) >= len(holders), f"the binding of {nodes} pods", WAIT_SECONDS)
    stand.wait(lambda: len(journal.leases) >= nodes * GPUS, f"{nodes * GPUS} Leases", WAIT_SECONDS)
    held = time.monotonic()
    waiters = stand.create(pending)
    stand.wait(lambda: journal.rejected.issuperset(waiters), f"the rejection of {pending} pods", WAIT_SECONDS)
    way = "created and planted, not bound by Atoll" if is_planted else "created"
    return [
        Row("to hold everything", f"{held - started:.0f} s", f"{nodes} pods of {GPUS} GPUs {way}, to the last Lease"),
        Row("to refuse the rest", f"{time.monotonic() - held:.0f} s", f"{pending} pods created, to the last refusal"),
    ]


def plant(kubeconfig: Path, namespace: str, planted: Sequence[str]) -> None:
    """Give each pod all GPUs of a node of its own, by name, by the writes of a bind as the scheduler's account.

    For machines that are too slow to bind thousands of pods in a run. Raises KubeError.
    """
    asyncio.run(_plant(kubeconfig, namespace, planted))


async def _plant(kubeconfig: Path, namespace: str, planted: Sequence[str]) -> None:
    limit = asyncio.Semaphore(AT_ONCE)
    connect = ApiClient.connect(kubeconfig, requests_per_second=1000, burst=1000, impersonate=SCHEDULER)
    async with await connect as client:
        reports = (await client.list(paths.gpunodestatuses(), GpuNodeStatus.model_validate_json)).items

        async def one(name: str, report: GpuNodeStatus) -> None:
            async with limit:
                await _bind(client, namespace, name, report)

        ordered = sorted(reports, key=lambda report: report.metadata.name)
        await asyncio.gather(*(one(name, report) for name, report in zip(planted, ordered, strict=True)))


async def _bind(client: ApiClient, namespace: str, name: str, report: GpuNodeStatus) -> None:
    assert report.status is not None
    node, devices = report.metadata.name, report.status.devices
    pod = decode_pod(await client.get(paths.pods(namespace, name), timeout_seconds=ANSWER_SECONDS))
    now = format_microtime(SystemClock().now())
    holder, claim = pods.holder_of(pod), pods.claim_name(pod)
    reservation = Reservation(node, report.status.node_uid, holder, claim, "planted", now, now)
    for device in devices:
        body = lease_body(reservation, device.id, device.uuid)
        await client.create(paths.leases(names.SYSTEM_NAMESPACE), body, timeout_seconds=ANSWER_SECONDS)
    allocation = Allocation(node, tuple(device.id for device in devices), tuple(device.uuid for device in devices))
    uuids = ",".join(allocation.uuids)
    values = tuple(ContainerDevices(one, uuids, uuids) for one in pods.all_container_names(pod))
    metadata: dict[str, Any] = {"name": name, "uid": pod.metadata.uid}
    metadata["annotations"] = allocation_annotations(allocation, values)
    binding = {"metadata": metadata, "target": {"kind": "Node", "name": node}}
    await client.create(paths.binding(namespace, name), binding, timeout_seconds=ANSWER_SECONDS)


def idle(stand: Stand, nodes: int, seconds: float) -> list[Row]:
    """Measure requests, CPU and memory while idle."""
    time.sleep(SETTLE_SECONDS)
    log, cpu, began = stand.cluster.layout.audit_log, stand.cpu_seconds(), time.monotonic()
    with log.open() as lines:
        lines.seek(0, os.SEEK_END)
        time.sleep(seconds)
        cpu_after, length = stand.cpu_seconds(), time.monotonic() - began
        requests = asked(lines)
    rows = [
        _requests("Atoll's parts", length, {one: n for one, n in requests.items() if one[0].startswith("atoll-")}),
        _requests("kube-scheduler", length, {one: n for one, n in requests.items() if one[0] == "kube-scheduler"}),
        Row(
            "idle, agents' heartbeats",
            f"{nodes / HEARTBEAT_SECONDS:.1f}/s",
            f"arithmetic: {nodes} agents, one small Lease a minute each, in their own namespace",
        ),
    ]
    memory = stand.memory_bytes()
    for name in cpu:
        share = 100 * (cpu_after[name] - cpu[name]) / length
        rows.append(Row(f"idle, {name}", f"{share:.1f} % CPU, {memory[name] / 2**20:.0f} MiB", "of one core; resident"))
    return rows


def restart(stand: Stand) -> list[Row]:
    """Kill and restart the two processes with state; the ratio is to one LIST of what they read. Raises StartError."""
    began = time.monotonic()
    sizes = [len(stand.cluster.api.get(path)["items"]) for path in READ]
    listing = time.monotonic() - began
    objects = " + ".join(map(str, sizes))
    leader = _leader(stand)
    rows = [Row("LIST", f"{listing:.1f} s", f"{objects} pods, Leases, reports, one after another, decoded")]
    for name in ("extender", "controllers"):
        began = time.monotonic()
        stand.cluster.run(sys.executable, "-c", f"import {name}.__main__")
        importing = time.monotonic() - began
        stand.installation.kill(name)
        began = time.monotonic()
        stand.installation.start(name)
        length = time.monotonic() - began
        shown = f"{length:.1f} s, of it {importing:.1f} s imports; the rest {(length - importing) / listing:.1f} x LIST"
        rows.append(
            Row(f"restart, {name}", shown, "SIGKILL, start, until ready; asked by a process of its own each time")
        )
        if name == "controllers":
            stand.wait(lambda: _leader(stand) != leader, "the next leader of the controllers", WAIT_SECONDS)
            told = "since the start; a killed leader's Lease runs out after 15 s"
            rows.append(Row("restart, controllers lead", f"{time.monotonic() - began:.1f} s", told))
    return rows


def move_on(stand: Stand) -> list[Row]:
    """End one pod; waiting pods must get its GPUs. Raises TooSlow."""
    journal = stand.journal
    holder = next(pod for pod in sorted(journal.bound_at))
    bound = len(journal.bound_at)
    stand.delete([holder])
    stand.wait(lambda: len(journal.bound_at) >= bound + GPUS, f"{GPUS} waiting pods in freed GPUs", WAIT_SECONDS)
    last = max(journal.bound_at.values())
    since = last - journal.ended_at[holder]
    return [Row(f"{GPUS} waiting pods bound", f"{since:.1f} s", "since the holder was seen to end, after the restarts")]


def _requests(who: str, seconds: float, requests: Mapping[tuple[str, str], int]) -> Row:
    often = sorted(requests.items(), key=lambda row: (-row[1], row[0]))
    told = ", ".join(f"{what} {count / seconds:.2f} ({program})" for (program, what), count in often[:SHOWN])
    return Row(f"idle, requests per second, {who}", f"{sum(requests.values()) / seconds:.2f}", told)


def _leader(stand: Stand) -> str:
    lease = stand.cluster.api.get(paths.leases(names.SYSTEM_NAMESPACE, names.CONTROLLERS_LEADER_LEASE))
    return str(lease["spec"].get("holderIdentity", ""))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Run every part, adding to the table. Raises TooSlow and DevclusterError."""
    started = time.monotonic()
    with open_stand(arguments.name, arguments.nodes, audit_log=True) as stand:
        _say(f"{arguments.nodes} nodes after {time.monotonic() - started:.0f} s")
        rows += fill(stand, arguments.nodes, arguments.pending, is_planted=arguments.planted)
        _say(f"full after {time.monotonic() - started:.0f} s")
        rows += idle(stand, arguments.nodes, arguments.idle_seconds)
        rows += restart(stand)
        rows += move_on(stand)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000, help=f"fake nodes of {GPUS} GPUs, each held whole")
    parser.add_argument("--pending", type=int, default=2000, help="pods that wait for a GPU")
    parser.add_argument("--idle-seconds", type=float, default=60.0, help="seconds of idle measurement")
    parser.add_argument("--planted", action="store_true", help="write Leases and Bindings here, on slow machines")
    parser.add_argument("--name", default="bench-load", help="name of the cluster")
    arguments = parser.parse_args()
    if arguments.nodes < 1 or arguments.pending < GPUS or arguments.idle_seconds <= 0:
        parser.error(f"needs a node, {GPUS} waiting pods and some idle time")
    rows: list[Row] = []
    status = 0
    started = time.monotonic()
    try:
        measure(arguments, rows)
    except (TooSlow, DevclusterError, OSError) as failure:
        _say(f"FAILED: {failure}")
        status = 1
    length = time.monotonic() - started
    print(f"{arguments.nodes} nodes x {GPUS} GPUs held, {arguments.pending} pods waiting, {length:.0f} s in all")
    print(table(rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
