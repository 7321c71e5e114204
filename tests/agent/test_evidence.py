"""Evidence: what an observation proves about pods, and what it does not prove."""

from dataclasses import replace

import pytest

from agent.cgroups import CgroupReading
from agent.evidence import (
    GONE_MAX,
    EvidenceReading,
    GpuUse,
    KubeletReading,
    PodInventory,
    collect_evidence,
    gpu_use,
)
from agent.kubelet import kubelet_url
from atoll.api import names
from atoll.api.node_status import PODS_MAX, HostUse, PodEvidence
from tests.agent.builders import make_pod

GPU_POD = make_pod("g", gpus=1)
PLAIN_POD = make_pod("p")


def inventory(*pods: object, gone: tuple[object, ...] = ()) -> PodInventory:
    """A inventory that knows `pods`, and once met those in `gone`."""
    known = PodInventory()
    for pod in gone:
        known = known.with_pod(pod)
    return known.with_pods(pods, position="7")


def cgroups(*populated: str, empty: tuple[str, ...] = ()) -> CgroupReading:
    return CgroupReading(frozenset(populated), frozenset(empty))


def kubelet(*listed: str, running: tuple[str, ...] = ()) -> KubeletReading:
    return KubeletReading(frozenset(listed), frozenset(running))


def states(evidence: EvidenceReading) -> dict[str, tuple[bool, bool]]:
    return {pod.uid: (pod.live, pod.kubelet) for pod in evidence.pods}


@pytest.mark.parametrize("kind", ["a plain pod", "a mirror made by hand"])
def test_nobody_hides_a_pod_behind_an_annotation(kind: str) -> None:
    """A user annotates a plain pod with the uid of a GPU pod in doubt; an agent that starts anew tells of it still."""
    annotations = {names.STATIC_POD_UID: "g"} | ({names.MIRROR: "g"} if kind == "a mirror made by hand" else {})
    known = inventory(make_pod("p", annotations=annotations)).with_reported(["g"])
    evidence = collect_evidence(known, cgroups=cgroups("g", "p"), kubelet=kubelet(running=("p",)), use=GpuUse())
    assert states(evidence) == {"g": (True, False)}
    assert "g" in evidence.terminating or kind == "a mirror made by hand"


@pytest.mark.parametrize(
    ("case", "want"),
    [
        pytest.param(
            {"cgroups": cgroups("g"), "kubelet": kubelet("g"), "last_empty": frozenset()},
            {"g": (True, True)},
            id="runs",
        ),
        pytest.param(
            {"cgroups": cgroups("g"), "kubelet": kubelet(), "last_empty": frozenset()},
            {"g": (True, False)},
            id="force-deleted: the kubelet forgot it, its processes run on",
        ),
        pytest.param(
            {"cgroups": cgroups(empty=("g",)), "kubelet": kubelet("g"), "last_empty": frozenset({"g"})},
            {"g": (True, True)},
            id="cgroup made, sandbox not started yet",
        ),
        pytest.param(
            {"cgroups": cgroups(empty=("g",)), "kubelet": kubelet(), "last_empty": frozenset()},
            {"g": (True, False)},
            id="empty for the first time: perhaps about to start",
        ),
        pytest.param(
            {"cgroups": cgroups(empty=("g",)), "kubelet": kubelet(), "last_empty": frozenset({"g"})},
            {},
            id="empty twice and unknown to the kubelet: a leftover folder",
        ),
        pytest.param(
            {"cgroups": cgroups(empty=("g",)), "kubelet": None, "last_empty": frozenset({"g"})},
            {"g": (True, False)},
            id="empty twice, but the kubelet cannot be asked: it may wake up",
        ),
        pytest.param(
            {"cgroups": cgroups(), "kubelet": kubelet("g"), "last_empty": frozenset()},
            {"g": (False, True)},
            id="not started",
        ),
        pytest.param({"cgroups": cgroups(), "kubelet": kubelet(), "last_empty": frozenset()}, {}, id="gone"),
    ],
)
def test_live_means_processes_or_a_possible_start(case: dict, want: dict[str, tuple[bool, bool]]) -> None:
    """A pod counts as live while a process runs in it or may still be started in it."""
    evidence = collect_evidence(inventory(gone=(GPU_POD,)), use=GpuUse(), **case)

    assert states(evidence) == want
    assert evidence.live_read


@pytest.mark.parametrize(
    ("read", "kubelet_read", "want"),
    [
        pytest.param(None, kubelet(), {"g": (True, False)}, id="cgroups unread: still live as last seen"),
        pytest.param(cgroups(), None, {"g": (False, True)}, id="kubelet unread: still listed as last seen"),
        pytest.param(None, None, {"g": (True, True)}, id="nothing read: nothing changes"),
    ],
)
def test_what_was_not_read_is_unknown(
    read: CgroupReading | None, kubelet_read: KubeletReading | None, want: dict[str, tuple[bool, bool]]
) -> None:
    """A source that cannot be read keeps its last word and says so; it never makes a pod absent."""
    evidence = collect_evidence(
        inventory(gone=(GPU_POD,)),
        cgroups=read,
        kubelet=kubelet_read,
        use=GpuUse(),
        last_pods=(PodEvidence(uid="g", live=True, kubelet=True),),
    )

    assert states(evidence) == want
    assert (evidence.live_read, evidence.kubelet_read) == (read is not None, kubelet_read is not None)
    assert not evidence.is_complete


@pytest.mark.parametrize(
    ("kubelet_read", "want"),
    [
        pytest.param(kubelet("p", running=("p",)), False, id="the kubelet says that a pod runs"),
        pytest.param(None, False, id="the API says that a pod runs"),
        pytest.param(kubelet(), False, id="the API says that a pod runs, and the kubelet knows none"),
        pytest.param(kubelet("p"), True, id="nothing is said to run"),
    ],
)
def test_an_implausible_cgroup_reading_does_not_count(kubelet_read: KubeletReading | None, want: bool) -> None:
    """Where pods run and not one is seen, the agent looks in the wrong place: absence there proves nothing."""
    evidence = collect_evidence(inventory(PLAIN_POD), cgroups=cgroups(), kubelet=kubelet_read, use=GpuUse())

    assert evidence.live_read is want


def test_plain_pods_are_left_out() -> None:
    """Pods that never had to do with GPUs do not make the report grow, not even after they are gone."""
    evidence = collect_evidence(
        inventory(GPU_POD, gone=(PLAIN_POD,)), cgroups=cgroups("g", "p"), kubelet=kubelet("g", "p"), use=GpuUse()
    )

    assert states(evidence) == {"g": (True, True)}


def test_a_plain_pod_that_uses_a_gpu_is_told() -> None:
    """A process on a GPU is evidence, whoever its pod is."""
    users = gpu_use({"GPU-a": (1, 2), "GPU-b": (2, 3)}, {1: "p", 2: "p"}, unread=frozenset())

    evidence = collect_evidence(inventory(PLAIN_POD), cgroups=cgroups("p"), kubelet=kubelet("p"), use=users)

    assert [(pod.uid, pod.uuids) for pod in evidence.pods] == [("p", ("GPU-a", "GPU-b"))]


def test_an_unknown_pod_is_told() -> None:
    """A pod that was bound and deleted while the agent was down is known to nobody, and may hold a GPU."""
    evidence = collect_evidence(inventory(), cgroups=cgroups("stranger"), kubelet=kubelet(), use=GpuUse())

    assert states(evidence) == {"stranger": (True, False)}


def test_a_static_pod_is_known_under_the_uid_that_the_kubelet_uses() -> None:
    """A mirror pod names the real uid of its static pod; without that each static pod would look like a stranger."""
    hash_of_file = "0123456789abcdef0123456789abcdef"
    mirror = make_pod("mirror", annotations={names.MIRROR: hash_of_file, names.STATIC_POD_UID: hash_of_file})

    evidence = collect_evidence(
        inventory(mirror),
        cgroups=cgroups("0123456789abcdef0123456789abcdef"),
        kubelet=kubelet("0123456789abcdef0123456789abcdef"),
        use=GpuUse(),
    )

    assert evidence.pods == ()


def test_a_static_pod_whose_mirror_was_refused_is_told_as_one() -> None:
    """Nobody but the kubelet knows of it, so its word is kept while it does not answer."""
    told = KubeletReading(frozenset({"f"}), frozenset(), frozenset({"f"}))
    last = collect_evidence(inventory(), cgroups=cgroups("f", "a"), kubelet=told, use=GpuUse())
    later = collect_evidence(
        inventory().with_reported(["f", "a"]),
        cgroups=cgroups("f", "a"),
        kubelet=None,
        use=GpuUse(),
        last_pods=last.pods,
    )

    assert [{pod.uid: pod.static for pod in one.pods} for one in (last, later)] == [{"a": False, "f": True}] * 2
    assert later.terminating == {"a"}


@pytest.mark.parametrize(
    ("pods", "gone", "read", "listed", "want"),
    [
        pytest.param((), (GPU_POD,), cgroups("g"), (), {"g"}, id="deleted and live"),
        pytest.param((), (GPU_POD,), cgroups(), ("g",), {"g"}, id="deleted and listed"),
        pytest.param((), (GPU_POD,), cgroups(), (), set(), id="deleted and gone"),
        pytest.param((GPU_POD,), (), cgroups("g"), ("g",), set(), id="there and running"),
        pytest.param(
            (make_pod("g", gpus=1, phase="Failed"),), (), cgroups("g"), ("g",), {"g"}, id="set Failed by hand, live"
        ),
        pytest.param(
            (make_pod("g", gpus=1, phase="Failed"),), (), cgroups(), ("g",), set(), id="set Failed by hand, ended"
        ),
        pytest.param(
            (make_pod("g", gpus=1, phase="Succeeded", state="terminated"),),
            (),
            cgroups("g"),
            ("g",),
            set(),
            id="ended by its own object, sandbox still there",
        ),
        pytest.param((), (), cgroups("stranger"), (), set(), id="a stranger is no reason to hurry"),
    ],
)
def test_leavers_make_the_agent_hurry(
    pods: tuple, gone: tuple, read: CgroupReading, listed: tuple, want: set[str]
) -> None:
    """A GPU pod that should be gone and is still seen is watched closely; nothing else is."""
    evidence = collect_evidence(inventory(*pods, gone=gone), cgroups=read, kubelet=kubelet(*listed), use=GpuUse())

    assert evidence.terminating == want


def test_a_plain_pod_that_runs_on_does_not_become_a_stranger() -> None:
    """What it was is remembered as long as anything is seen of it."""
    known = inventory(gone=(PLAIN_POD,))
    for _ in range(3):
        evidence = collect_evidence(known, cgroups=cgroups("p"), kubelet=kubelet(), use=GpuUse())
        assert evidence.pods == ()
        known = known.forget_gone(evidence)


def test_an_empty_cgroup_counts_anew_when_the_kubelet_was_silent() -> None:
    """Two readings in a row must both have the kubelet's word; one without it begins the count again."""
    known = inventory(gone=(GPU_POD,))
    first = collect_evidence(known, cgroups=cgroups(empty=("g",)), kubelet=kubelet(), use=GpuUse())
    silent = collect_evidence(known, cgroups=cgroups(empty=("g",)), kubelet=None, use=GpuUse(), last_empty=first.empty)
    third = collect_evidence(
        known, cgroups=cgroups(empty=("g",)), kubelet=kubelet(), use=GpuUse(), last_empty=silent.empty
    )
    fourth = collect_evidence(
        known, cgroups=cgroups(empty=("g",)), kubelet=kubelet(), use=GpuUse(), last_empty=third.empty
    )

    assert [states(one).get("g", (False, False))[0] for one in (first, silent, third, fourth)] == [
        True,
        True,
        True,
        False,
    ]


def test_a_restarted_agent_watches_what_the_last_report_named() -> None:
    """Pods of the last report that the API no longer has are leavers from the first look on."""
    evidence = collect_evidence(
        inventory(PLAIN_POD).with_reported(["g", "p"]), cgroups=cgroups("g", "p"), kubelet=kubelet(), use=GpuUse()
    )

    assert evidence.terminating == {"g"}


@pytest.mark.parametrize("answer", [kubelet(), None], ids=["the kubelet answers", "the kubelet may not be asked"])
def test_memory_of_pods_is_bounded(answer: KubeletReading | None) -> None:
    """A pod that neither the API nor the cgroups show is forgotten; one that is still seen is not."""
    known = inventory(make_pod("api"), gone=(GPU_POD, PLAIN_POD, make_pod("q")))

    evidence = collect_evidence(known, cgroups=cgroups("g", "api"), kubelet=answer, use=GpuUse())
    kept = known.forget_gone(evidence)

    assert (kept.with_gpus, kept.plain) == ({"g"}, {"api"})


@pytest.mark.parametrize(("count", "left"), [(GONE_MAX, GONE_MAX), (GONE_MAX + 1, 0)])
def test_an_agent_that_reads_no_cgroups_remembers_only_so_many_pods(count: int, left: int) -> None:
    """What is gone may still run, unseen: it is remembered up to a limit."""
    known = replace(inventory(), plain=frozenset(f"u{number}" for number in range(count)))

    evidence = collect_evidence(known, cgroups=None, kubelet=None, use=GpuUse())

    assert len(known.forget_gone(evidence).plain) == left


def test_a_pod_stays_a_gpu_pod() -> None:
    """Annotations can be taken off a pod; what it once held does not go away with them."""
    claimed = make_pod("g", annotations={names.ALLOCATED: "n1:0"})

    known = inventory(claimed).with_pods([make_pod("g")], position="8")

    assert known.with_gpus == {"g"}
    assert known.plain == set()


def test_a_flood_of_pods_says_that_it_is_cut() -> None:
    """More pods than a report holds: the report is cut, and then absence proves nothing."""
    uids = [f"u{number:05}" for number in range(PODS_MAX + 1)]

    evidence = collect_evidence(inventory(), cgroups=cgroups(*uids), kubelet=kubelet(*uids), use=GpuUse())

    assert len(evidence.pods) == PODS_MAX
    assert not evidence.live_read
    assert not evidence.kubelet_read


@pytest.mark.parametrize(
    ("node", "want"),
    [
        pytest.param(
            b'{"status":{"addresses":[{"type":"Hostname","address":"n1"},{"type":"InternalIP","address":"10.0.0.7"}],'
            b'"daemonEndpoints":{"kubeletEndpoint":{"Port":10255}}}}',
            "https://10.0.0.7:10255",
            id="address and port",
        ),
        pytest.param(
            b'{"status":{"addresses":[{"type":"InternalIP","address":"fd00::7"}]}}',
            "https://[fd00::7]:10250",
            id="IPv6",
        ),
        pytest.param(b'{"status":{}}', "", id="no address yet"),
        pytest.param(b"[]", "", id="nonsense"),
    ],
)
def test_the_kubelet_is_found_through_the_node(node: bytes, want: str) -> None:
    """The Node's internal address and the kubelet's port; nothing while they are not known."""
    assert kubelet_url(node) == want


def test_a_gpu_that_could_not_be_read_is_used_by_whoever_used_it_last() -> None:
    """Unknown is not absent: its pod and its host processes stay told, and the report says that it could not read."""
    last = (PodEvidence(uid="p", live=True, uuids=("GPU-a", "GPU-b")),)
    hosts = (HostUse(uuid="GPU-a", pids=(7,)), HostUse(uuid="GPU-b", pids=(8,)))
    use = GpuUse(pods={"q": frozenset({"GPU-b"})}, unread=frozenset({"GPU-a"}))

    evidence = collect_evidence(
        inventory(PLAIN_POD), cgroups=cgroups("p", "q"), kubelet=kubelet("p"), use=use, last_pods=last, last_host=hosts
    )

    assert {pod.uid: pod.uuids for pod in evidence.pods} == {"p": ("GPU-a",), "q": ("GPU-b",)}
    assert [one.uuid for one in evidence.host_uses] == ["GPU-a"]
    assert not evidence.processes_read
    assert evidence.uses_unread == ("GPU-a",)


def test_a_gpu_on_record_that_a_look_does_not_name_could_not_be_read() -> None:
    """A machine that cannot be read, or a card that says nothing, shows no process: that proves nothing."""
    assert GpuUse().with_missing(["GPU-a", "GPU-b"], ["GPU-b"]).unread == {"GPU-a"}


def test_processes_outside_of_pods_are_told_with_their_gpu() -> None:
    """What nobody placed is reported as it is: by GPU, with how many processes and some of their pids."""
    pids = {"GPU-a": tuple(range(1, 20)), "GPU-b": (30, 31)}
    use = gpu_use(pids, {**dict.fromkeys(range(1, 20)), 30: "p"}, unread=frozenset())

    evidence = collect_evidence(inventory(), cgroups=cgroups("p"), kubelet=kubelet(), use=use)

    (host,) = evidence.host_uses
    assert (host.uuid, host.count, host.pids) == ("GPU-a", 19, tuple(range(1, 9)))
    assert {pod.uid: pod.uuids for pod in evidence.pods} == {"p": ("GPU-b",)}
