"""`python -m bench.hardware`: checks the agent against the real driver of this machine.

Needs an NVIDIA GPU with its driver, and nvidia-smi on PATH; no cluster. Prints lines PASS or FAIL, a JSON summary on
the last line, and with --out saves every driver answer, for building mocks. Exit status 0 if every line passed.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from agent.driver_client import DriverWorker
from agent.errors import ReadingFailed
from agent.nvml import NvmlBackend
from agent.observation import MachineObserver
from bench.hardware import checks, smi
from bench.hardware.checks import HardwareFinding
from bench.hardware.probe import probe
from bench.hardware.recording import Recorder

POD_UID = "0b5e1f6e-5d1c-4c52-9a58-3c4f6d1e2a10"
CHILD = Path(__file__).with_name("cuda_child.py")
CHILD_SECONDS = 120


def main() -> int:
    """Run every check; a check that raises counts as a failure and hides no other."""
    options = _options()
    findings: list[HardwareFinding] = []
    summary: dict[str, Any] = {"python": sys.version.split()[0]}
    report: dict[str, Any] = {}
    for part in (
        lambda: _discovery(report, summary, options.out),
        lambda: _cuda(report),
        lambda: _evidence(report),
        lambda: _costs(summary, options),
        lambda: _isolation(summary, options),
        lambda: _recording(options.out),
    ):
        findings += _guarded(part)
    for finding in findings:
        print(
            f"{'PASS' if finding.holds else 'FAIL'}  {finding.what}" + (f": {finding.detail}" if finding.detail else "")
        )
    summary |= {"passed": sum(one.holds for one in findings), "failed": sum(not one.holds for one in findings)}
    print(json.dumps(summary))
    return int(summary["failed"] > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the report, nvidia-smi's texts and every driver answer")
    parser.add_argument("--polls", type=int, default=50, help="polls that the cost is averaged over")
    return parser.parse_args()


def _guarded(part: Callable[[], Iterable[HardwareFinding]]) -> list[HardwareFinding]:
    found = []
    try:
        for finding in part():
            found.append(finding)  # noqa: PERF402 - what was found before a break counts
    except Exception:  # noqa: BLE001 - the next check shall run
        found.append(HardwareFinding("check ran to its end", holds=False, detail=traceback.format_exc()))
    return found


def _discovery(report: dict[str, Any], summary: dict[str, Any], out: Path | None) -> Iterator[HardwareFinding]:
    """Compare the printed report with nvidia-smi."""
    started = time.perf_counter()
    done = subprocess.run(
        (sys.executable, "-m", "agent", "--node", "hardware-check", "--once"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    summary["agent_once_rss_kib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    yield HardwareFinding("agent --once ends well", done.returncode == 0, done.stderr[-2000:])
    report |= json.loads(done.stdout)
    xml, listed, topology = smi.ask("-q", "-x"), smi.ask("-L"), smi.ask("topo", "-m")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        texts = {"report.json": done.stdout, "smi.xml": xml, "smi-L.txt": listed, "smi-topo.txt": topology}
        for name, text in texts.items():
            (out / name).write_text(text)
    yield HardwareFinding(
        "agent --once took", holds=True, detail=f"{time.perf_counter() - started:.2f} s with nvidia-smi"
    )
    devices = sorted(report["devices"], key=lambda device: device["index"])
    gpus = smi.gpus(xml)
    yield checks.same("uuids in order", [device["uuid"] for device in devices], smi.listed_uuids(listed))
    for position, (device, facts) in enumerate(zip(devices, gpus, strict=True)):
        yield from checks.device_findings(device, facts, position=position)
        yield HardwareFinding(f"gpu {position} healthy", device["health"]["state"] == "healthy", str(device["health"]))
    yield checks.fabric_finding(report.get("fabric"), gpus[0])
    yield from checks.topology_findings(report["links"], report["devices"], topology)
    yield from checks.adapter_findings(report["links"], report["devices"], topology)


def _cuda(report: dict[str, Any]) -> Iterator[HardwareFinding]:
    """Check that programs under the variables that Atoll injects see exactly the promised devices."""
    devices = sorted(report["devices"], key=lambda device: device["index"])
    uuids = [device["uuid"] for device in devices]
    cases = [("with every device by uuid", ",".join(uuids), uuids), ("without any device", "", [])]
    for device in devices:
        cases.append((f"with device {device['id']} by uuid", device["uuid"], [device["uuid"]]))
        cases.append((f"with device {device['id']} by index", str(device["index"]), [device["uuid"]]))
    cases.append(("with the uuid of no device", "GPU-00000000-0000-4000-8000-000000000000", []))
    for what, value, promised in cases:
        with _child(value, nvidia=",".join(promised)) as seen:
            yield checks.sees_exactly(what, promised=promised, seen=seen)


@contextmanager
def _child(cuda: str, *, nvidia: str) -> Iterator[dict[str, Any]]:
    """Run a CUDA program under these variables; yield its output, then end it."""
    variables = os.environ | {
        "CUDA_VISIBLE_DEVICES": cuda,
        "NVIDIA_VISIBLE_DEVICES": nvidia,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    with subprocess.Popen(
        (sys.executable, str(CHILD)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    ) as child:
        try:
            assert child.stdout is not None
            yield json.loads(child.stdout.readline())
        finally:
            child.communicate(timeout=CHILD_SECONDS)


def _evidence(report: dict[str, Any]) -> Iterator[HardwareFinding]:
    """Check that the agent finds the pod of a CUDA program, and no longer after the program has ended."""
    uuid = min(report["devices"], key=lambda device: device["index"])["uuid"]
    backend = NvmlBackend()
    with tempfile.TemporaryDirectory() as folder:
        proc = Path(folder)
        observer = MachineObserver(backend, proc_mount=proc, timeout_seconds=60)
        with _child(uuid, nvidia=uuid) as seen:
            pid = seen["pid"]
            (proc / str(pid)).mkdir()
            (proc / str(pid) / "cgroup").write_text(f"0::/kubepods/besteffort/pod{POD_UID}/main\n")
            users = asyncio.run(observer.observe()).use.pods
            yield HardwareFinding(
                "process of a pod found on its GPU", users == {POD_UID: frozenset({uuid})}, str(users)
            )
            xml = smi.ask("-q", "-x")
            theirs = smi.pids({"uuid": uuid}, xml)
            ours = backend.read().pids_by_uuid()[uuid]
            yield HardwareFinding(
                "pids as nvidia-smi has them", pid in ours and theirs in (set(), set(ours)), f"{ours} {theirs}"
            )
        users = asyncio.run(observer.observe()).use.pods
        yield HardwareFinding("ended process not found any more", users == {}, str(users))
    backend.close()


def _costs(summary: dict[str, Any], options: argparse.Namespace) -> Iterator[HardwareFinding]:
    """Cost of a poll: CPU and wall time, time per driver call, memory of this process."""
    recorder = Recorder(pynvml)
    backend = NvmlBackend(recorder)
    started = time.perf_counter()
    backend.read()
    summary["first_poll_seconds"] = round(time.perf_counter() - started, 4)
    if options.out is not None:
        (options.out / "nvml.json").write_text(json.dumps(recorder.answers, indent=1))
    recorder.seconds.clear()
    before, started = time.process_time(), time.perf_counter()
    for _ in range(options.polls):
        backend.read()
    summary["poll_cpu_ms"] = round(1e3 * (time.process_time() - before) / options.polls, 3)
    summary["poll_wall_ms"] = round(1e3 * (time.perf_counter() - started) / options.polls, 3)
    summary["nvml_calls"] = recorder.table()
    backend.close()
    summary["rss_kib"] = _rss_kib("self")
    yield HardwareFinding(
        "poll costs", holds=True, detail=f"{summary['poll_cpu_ms']} ms CPU, {summary['poll_wall_ms']} ms wall"
    )


def _isolation(summary: dict[str, Any], options: argparse.Namespace) -> Iterator[HardwareFinding]:
    """Ask the driver in the worker process, as the agent does: the cost, and the effect of a hang."""
    backend = NvmlBackend()
    worker = DriverWorker(step_seconds=2.0, open_seconds=20.0)
    backend.steps = worker
    first = backend.read()
    assert worker.pid is not None
    before, started = time.process_time() + _cpu_seconds(worker.pid), time.perf_counter()
    for _ in range(options.polls):
        backend.read()
    passed = time.process_time() + _cpu_seconds(worker.pid) - before
    summary["worker_poll_cpu_ms"] = round(1e3 * passed / options.polls, 3)
    summary["worker_poll_wall_ms"] = round(1e3 * (time.perf_counter() - started) / options.polls, 3)
    summary["worker_rss_kib"] = _rss_kib(worker.pid)
    facts = ("uuid", "serial", "memory_bytes", "cpu_affinity", "ecc_enabled", "nvlinks", "signs", "signs_unread")
    told = [{name: str(getattr(device, name)) for name in facts} for device in first.devices]
    yield HardwareFinding("worker reads the machine", holds=bool(told), detail=json.dumps(told))
    os.kill(worker.pid, signal.SIGSTOP)
    worker._open_seconds = 1.0
    started = time.perf_counter()
    try:
        backend.read()
        yield HardwareFinding("a hang is noticed", holds=False)
    except ReadingFailed as error:
        yield HardwareFinding("a hang is noticed", holds=time.perf_counter() - started < 5, detail=str(error))
    worker._open_seconds = 20.0
    yield HardwareFinding("the next look succeeds", backend.read().devices[0].uuid == first.devices[0].uuid)
    backend.close()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_kib(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _recording(out: Path | None) -> Iterator[HardwareFinding]:
    """Record the driver's answers to a long list of calls, for building mocks."""
    if out is not None:
        recorder = Recorder(pynvml)
        probe(recorder)
        (out / "probe.json").write_text(json.dumps(recorder.answers, indent=1))
        yield HardwareFinding("driver probed", holds=True, detail=f"{len(recorder.answers)} answers")


if __name__ == "__main__":
    sys.exit(main())
