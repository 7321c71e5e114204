"""The demo's rows and texts, computed from objects."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from atoll.api import names
from atoll.api.node_status import Device, GpuNodeStatus, GpuNodeStatusReport
from atoll.cluster.consistency import Printed
from atoll.cluster.objects import Lease, LeaseSpec, Metadata, OwnerReference, Pod, PodCondition, PodSpec, PodStatus
from atoll.cluster.release import Proof
from devcluster.demo import __main__ as command
from devcluster.demo import facts
from devcluster.demo.errors import ExpectationFailed
from devcluster.demo.facts import DemoSnapshot, FreeGpus, MachineRow, PodRow, Progress
from devcluster.demo.job_room import JobRoom
from devcluster.demo.job_scenes import play_jobs
from devcluster.demo.stage import Terminal

NODE = "lovelace"


def report(count: int = 4) -> GpuNodeStatus:
    """A machine of two islands whose driver counts backwards."""
    devices = [
        Device(
            id=number,
            uuid=f"GPU-{number}",
            model="nvidia-l40s",
            product_name="NVIDIA L40S",
            island=f"numa-{number // 2}",
            index=count - 1 - number,
        )
        for number in range(count)
    ]
    status = GpuNodeStatusReport(devices=tuple(devices), device_count=count)
    return GpuNodeStatus(metadata={"name": NODE}, status=status)


def pod(name: str = "train", *, given: dict[str, str] | None = None, **fields: Any) -> Pod:
    """A pod; `given` maps containers to device ids like `0,3` and makes it a bound one."""
    annotations = {names.CLAIM: "pair"}
    if given is not None:
        ids = [number for part in given.values() for number in part.split(",") if number]
        annotations[names.ALLOCATED] = f"{NODE}:{','.join(ids)}"
        annotations[names.UUIDS] = uuids(",".join(ids))
        annotations |= {names.CONTAINER_UUIDS_PREFIX + key: uuids(part) for key, part in given.items()}
    spec = PodSpec(node_name=NODE if given is not None else "")
    return Pod(Metadata(name=name, uid=f"uid-{name}", annotations=annotations), spec, **fields)


def uuids(ids: str) -> str:
    """The uuids of device ids."""
    return ",".join(f"GPU-{number}" for number in ids.split(",") if number)


def lease(device_id: int) -> Lease:
    """The Lease of one device, held by the pod `train`."""
    annotations = {
        names.LEASE_NODE: NODE,
        names.LEASE_DEVICE_ID: str(device_id),
        names.LEASE_DEVICE_UUID: f"GPU-{device_id}",
    }
    labels = {names.LEASE_KIND_LABEL: names.LEASE_KIND_GPU}
    metadata = Metadata(name=f"gpu-{NODE}-{device_id}", labels=labels, annotations=annotations)
    return Lease(metadata, LeaseSpec(holder_identity="demo/train/uid-train"))


@pytest.mark.parametrize(
    ("log", "cuda", "nvidia"),
    [
        pytest.param("CUDA_VISIBLE_DEVICES=GPU-0,GPU-3\n", ("GPU-0", "GPU-3"), None, id="one-variable"),
        pytest.param("CUDA_VISIBLE_DEVICES=1 NVIDIA_VISIBLE_DEVICES=GPU-2\n", ("1",), ("GPU-2",), id="both-on-a-line"),
        pytest.param("NVIDIA_VISIBLE_DEVICES=\nCUDA_VISIBLE_DEVICES=\n", (), (), id="no-gpu"),
        pytest.param(
            "CUDA_VISIBLE_DEVICES=GPU-0\nCUDA_VISIBLE_DEVICES=GPU-1\n", ("GPU-1",), None, id="last-start-wins"
        ),
    ],
)
def test_what_a_container_printed_is_read(log: str, cuda: tuple[str, ...], nvidia: tuple[str, ...] | None) -> None:
    """The last values count; a variable that was not printed is not taken for an empty one."""
    assert facts.parse_printed(log, pod_uid="u", container="main") == Printed("u", "main", cuda, nvidia)


@pytest.mark.parametrize("log", ["", "starting\n", "NVIDIA_VISIBLE_DEVICES=GPU-0\n"])
def test_a_container_that_has_not_printed_yet_has_no_value(log: str) -> None:
    """Nothing is concluded from silence."""
    assert facts.parse_printed(log, pod_uid="u", container="main") is None


@pytest.mark.parametrize(
    ("entries", "ids"),
    [
        pytest.param(("GPU-3", "GPU-0"), ("3", "0"), id="uuids"),
        pytest.param(("0", "3"), ("3", "0"), id="indices-of-a-driver-that-counts-backwards"),
        pytest.param(("GPU-9", "7"), ("?", "?"), id="gpus-of-another-machine"),
    ],
)
def test_entries_are_told_as_device_ids(entries: tuple[str, ...], ids: tuple[str, ...]) -> None:
    """Uuids and indices become ids by the agent's report, never by taking an index for an id."""
    status = report().status
    assert status is not None
    assert facts.device_ids(entries, status.devices) == ids


@pytest.mark.parametrize(
    ("cuda", "saw", "progress"),
    [
        pytest.param(None, None, Progress.STARTING, id="not-printed-yet"),
        pytest.param(("GPU-1", "GPU-2"), ("1", "2"), Progress.KEPT, id="as-promised"),
        pytest.param(("2", "1"), ("1", "2"), Progress.KEPT, id="as-promised-by-index"),
        pytest.param(("GPU-1", "GPU-3"), ("1", "3"), Progress.BROKEN, id="another-gpu"),
        pytest.param(("GPU-1",), ("1",), Progress.BROKEN, id="one-too-few"),
        pytest.param((), (), Progress.BROKEN, id="none"),
    ],
)
def test_a_row_compares_promise_and_sight(
    cuda: tuple[str, ...] | None, saw: tuple[str, ...] | None, progress: Progress
) -> None:
    """Only exactly the promised GPUs earn the mark."""
    printed = {} if cuda is None else {("uid-train", "main"): Printed("uid-train", "main", cuda)}
    (row,) = facts.pod_rows([pod(given={"main": "1,2"})], [report()], printed)
    assert (row.pod, row.claim, row.node, row.promised) == ("train", "pair", NODE, ("1", "2"))
    assert row.islands == ("numa-0", "numa-1")
    assert (row.saw, row.progress) == (saw, progress)


@pytest.mark.parametrize(
    ("cuda", "saw"),
    [
        pytest.param(("0", "1"), ("1", "2"), id="counted-from-0"),
        pytest.param(("GPU-1", "GPU-2"), ("1", "2"), id="by-uuid"),
        pytest.param(("0", "1", "2"), ("1", "2", facts.UNKNOWN_DEVICE), id="one-too-many"),
    ],
)
def test_an_isolated_container_counts_its_own_gpus(cuda: tuple[str, ...], saw: tuple[str, ...]) -> None:
    """Under Atoll's RuntimeClass index 0 is the first GPU of the container, not of the machine."""
    printed = {("uid-train", "main"): Printed("uid-train", "main", cuda)}
    bound = pod(given={"main": "1,2"})
    isolated = msgspec.structs.replace(
        bound, spec=msgspec.structs.replace(bound.spec, runtime_class_name=names.RUNTIME_CLASS)
    )
    (row,) = facts.pod_rows([isolated], [report()], printed)

    assert row.saw == saw


def test_containers_with_parts_have_rows_of_their_own() -> None:
    """Each container is held against its own part; one that gets nothing shows up when it has printed."""
    split = pod(given={"trainer": "0,1", "loader": "3", "exporter": ""})
    assert [row.pod for row in facts.pod_rows([split], [report()], {})] == ["train/loader", "train/trainer"]

    printed = {("uid-train", "exporter"): Printed("uid-train", "exporter", ("GPU-2",))}
    exporter = facts.pod_rows([split], [report()], printed)[0]
    assert (exporter.promised, exporter.saw, exporter.progress) == ((), ("2",), Progress.BROKEN)


def test_a_pod_without_gpus_yet_waits() -> None:
    """Before bind there is one row and no promise."""
    (row,) = facts.pod_rows([pod()], [report()], {})
    assert (row.node, row.promised, row.saw, row.progress) == ("", (), None, Progress.WAITING)


def test_a_pod_has_printed_when_all_that_were_promised_gpus_have() -> None:
    """One silent container keeps the demo waiting; one without GPUs does not."""
    split = pod(given={"trainer": "0,1", "loader": "3", "exporter": ""})
    printed = {("uid-train", "trainer"): Printed("uid-train", "trainer", ("GPU-0", "GPU-1"))}
    assert not facts.is_printed(split, printed)
    assert facts.is_printed(split, {**printed, ("uid-train", "loader"): Printed("uid-train", "loader", ())})
    assert not facts.is_printed(pod(), {})


def test_machines_show_islands_and_the_drivers_count() -> None:
    """One row per machine: ids by island, and the driver's index of each id."""
    islands = (("numa-0", (0, 1)), ("numa-1", (2, 3)))
    assert facts.machine_rows([report()]) == (MachineRow(NODE, "4 x NVIDIA L40S", islands, (3, 2, 1, 0)),)


def test_free_gpus_are_those_without_a_lease() -> None:
    """A GPU whose Lease exists is free for nobody, and a full machine is left out."""
    some = DemoSnapshot((), (lease(1), lease(2), Lease(Metadata(name="some-leader"))), (report(),))
    assert facts.free_gpus(some) == (FreeGpus(NODE, "nvidia-l40s", (0, 3)),)
    assert facts.free_gpus(DemoSnapshot((), tuple(map(lease, range(4))), (report(),))) == ()
    assert [record.device_id for record in some.held_by("uid-train")] == [1, 2]
    assert some.held_by("uid-other") == ()


def test_the_reason_of_a_waiting_pod_is_short() -> None:
    """kube-scheduler's words, without those on preemption; nothing for a pod that it has not set aside."""
    message = "0/4 nodes are available: 4 too few free GPUs. preemption: 0/4 nodes are available"
    condition = PodCondition("PodScheduled", "False", message=message)
    refused = pod(status=PodStatus(conditions=(condition,)))
    assert facts.waiting_reason(refused) == "0/4 nodes are available: 4 too few free GPUs."
    assert facts.waiting_reason(pod()) == ""


def test_the_first_release_of_a_pod_is_found_in_the_log() -> None:
    """Other pods, other events and lines that are no JSON are passed over."""
    lines = [
        "uid-train: Traceback",
        '{"event": "Released GPUs", "pod": "demo/x/uid-x", "proof": "ended", "timestamp": "2026-01-01T00:00:00Z"}',
        '{"event": "Keeping GPUs in doubt", "pod": "demo/train/uid-train", "timestamp": "2026-01-01T00:00:01Z"}',
        '{"event": "Released GPUs", "pod": "demo/train/uid-train", "proof": "vanished", "timestamp": "T2"}',
        '{"event": "Released GPUs", "pod": "demo/train/uid-train", "proof": "ended", "timestamp": "T3"}',
        "{uid-train broken",
    ]
    release = facts.find_release(lines, "uid-train")
    assert release is not None
    assert (release.time, release.words) == ("T2", "the agent saw its sandbox before and no longer sees it")
    assert facts.find_release(lines, "uid-other") is None


def test_every_proof_has_words() -> None:
    """A new rule of release must be told to whoever watches."""
    assert set(facts.PROOFS) == set(Proof)


def test_times_of_logs_and_events_are_compared() -> None:
    """Both write UTC, with a Z and microseconds."""
    assert facts.seconds_between("2026-11-28T01:39:59.345960Z", "2026-11-28T01:40:00.345960Z") == 1.0


@pytest.mark.parametrize(
    ("document", "count"),
    [
        pytest.param({"kind": "Pod", "spec": {}}, 1, id="pod"),
        pytest.param({"kind": "Job", "spec": {"completions": 3, "parallelism": 3, "template": {}}}, 3, id="job"),
        pytest.param({"kind": "Job", "spec": {"template": {}}}, 1, id="plain-job"),
        pytest.param({"kind": "StatefulSet", "spec": {"replicas": 2, "template": {}}}, 2, id="replicas"),
        pytest.param({"kind": "GpuClaim", "spec": {"devices": {"count": 8}}}, 0, id="claim"),
        pytest.param({"kind": "Namespace"}, 0, id="no-spec"),
    ],
)
def test_manifests_say_how_many_pods_to_wait_for(document: dict[str, Any], count: int) -> None:
    """Pods, and what makes pods at once."""
    assert facts.pod_count(document) == count


def test_workers_of_a_job_are_told_apart() -> None:
    """Pods that end by themselves are waited for."""
    owner = OwnerReference(kind="Job", name="workers", uid="j")
    assert facts.is_of_job(Pod(Metadata(name="workers-x", owner_references=(owner,))))
    assert not facts.is_of_job(pod())


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "✓"), ("ascii", "ok")])
def test_without_a_terminal_everything_is_plain_lines(encoding: str, mark: str) -> None:
    """No control characters, marks that the encoding has, and every table once, as it was at the end."""
    buffer = io.BytesIO()
    stage = Terminal(Console(file=io.TextIOWrapper(buffer, encoding=encoding, write_through=True), highlight=False))
    with stage.step("a step [of two]"):
        pass
    with stage.pods() as draw:
        draw([PodRow("train", "pair", NODE, ("0",), ("numa-0",), None, Progress.STARTING)])
        draw([PodRow("train", "pair", NODE, ("0",), ("numa-0",), ("0",), Progress.KEPT, indices=("3",))])
    stage.verbatim("export KUBECONFIG=/" + "x" * 300)
    lines = [line.rstrip() for line in buffer.getvalue().decode(encoding).splitlines()]

    assert "\x1b" not in "".join(lines)
    assert lines[0].startswith(f"  {mark} a step [of two] ")
    row = next(line.split() for line in lines if "train" in line)
    assert row == ["train", "pair", NODE, "0", "numa-0", "0", "(index", "3)", mark]
    assert sum("train" in line for line in lines) == 1
    assert lines[-1] == "  export KUBECONFIG=/" + "x" * 300


def test_what_is_broken_is_told_on_one_line() -> None:
    """It may end with the name of a log, which a line break in the middle would make useless."""
    buffer = io.StringIO()
    Terminal(Console(file=buffer, highlight=False)).broken("a promise is broken; read /" + "x" * 200 + ".log")

    assert buffer.getvalue().splitlines() == ["  ✗ a promise is broken; read /" + "x" * 200 + ".log"]


def test_where_real_nodes_cannot_run_one_sentence_says_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who is not root is told so, with what to do instead, and nothing is built or started."""
    monkeypatch.setattr("devcluster.launch.os.geteuid", lambda: 1000)
    monkeypatch.setattr(command, "ensure_binaries", lambda **_: pytest.fail("nothing may be built"))

    assert command.perform("never") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "real nodes cannot run here: you are not root; run this as root on Linux" in said
    assert "kind" in said


def test_who_keeps_the_cluster_is_told_how_to_reach_and_to_end_it() -> None:
    """The lines can be copied: kubeconfig, a kubectl that fits, what to look at, and the end."""
    lines = command.how_to_go_on("demo", kubectl=Path("/cache/k8s/kubectl"), kubeconfig=Path("/state/demo/admin"))
    text = "\n".join(lines)
    assert "export KUBECONFIG=/state/demo/admin" in text
    assert "export PATH=/cache/k8s:$PATH" in text
    assert lines[-1].endswith("atoll dev down demo")


def test_a_promise_of_the_play_of_jobs_that_breaks_names_a_log_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clusters are removed, so the logs are copied first."""
    service, copies = tmp_path / "service", tmp_path / "copies"
    service.mkdir()
    copies.mkdir()
    (service / "service.log").write_text("what the service said")
    room = JobRoom(Terminal(Console(file=io.StringIO())), SimpleNamespace(log=service / "service.log"), {})

    monkeypatch.setattr(tempfile, "tempdir", str(copies))

    with pytest.raises(ExpectationFailed) as failure:
        play_jobs(room, [lambda room: room.expect(0, "two and two are five")])
    log = re.search(r"not so: two and two are five; read (\S+)", str(failure.value))
    assert log is not None
    assert Path(log.group(1)).is_relative_to(copies)
    assert Path(log.group(1)).read_text() == "what the service said"
