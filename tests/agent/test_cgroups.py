"""Pod cgroups: found in every layout of kubelet, and never reported as absent if they are unreadable."""

from pathlib import Path

import pytest

from agent.cgroups import CgroupReading, pod_uid_of, read_cgroups

RUNNING = "11111111-2222-3333-4444-555555555555"
IDLE = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
STATIC = "0123456789abcdef0123456789abcdef"


def _slice(uid: str) -> str:
    return f"pod{uid.replace('-', '_')}.slice"


PARENT = f"kubepods-burstable-{_slice(RUNNING)}"
LAYOUTS = {
    "cgroupfs": (
        "/",
        {
            RUNNING: (f"kubepods/burstable/pod{RUNNING}", "0a1b"),
            IDLE: (f"kubepods/pod{IDLE}", ""),
            STATIC: (f"kubepods/besteffort/pod{STATIC}", "0a1c"),
        },
    ),
    "cgroupfs below a root": (
        "/atoll-demo-n1",
        {
            RUNNING: (f"atoll-demo-n1/kubepods/pod{RUNNING}", "0a1b"),
            IDLE: (f"atoll-demo-n1/kubepods/burstable/pod{IDLE}", ""),
            STATIC: (f"atoll-demo-n1/kubepods/besteffort/pod{STATIC}", "0a1c"),
        },
    ),
    "systemd": (
        "/",
        {
            RUNNING: (
                f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{_slice(RUNNING)}",
                "cri-containerd-0a1b.scope",
            ),
            IDLE: (f"kubepods.slice/kubepods-{_slice(IDLE)}", ""),
            STATIC: (
                f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-{_slice(STATIC)}",
                "crio-0a1c.scope",
            ),
        },
    ),
    "systemd below a root": (
        "/nodes/n-1",
        {
            RUNNING: (
                (
                    "nodes.slice/nodes-n_1.slice/nodes-n_1-kubepods.slice/nodes-n_1-kubepods-burstable.slice/"
                    f"nodes-n_1-kubepods-burstable-{_slice(RUNNING)}"
                ),
                "cri-containerd-0a1b.scope",
            ),
            IDLE: (f"nodes.slice/nodes-n_1.slice/nodes-n_1-kubepods.slice/nodes-n_1-kubepods-{_slice(IDLE)}", ""),
            STATIC: (
                (
                    "nodes.slice/nodes-n_1.slice/nodes-n_1-kubepods.slice/nodes-n_1-kubepods-besteffort.slice/"
                    f"nodes-n_1-kubepods-besteffort-{_slice(STATIC)}"
                ),
                "crio-0a1c.scope",
            ),
        },
    ),
}
"""Cgroup root of the kubelet, and for each pod its folder and the folder of its one container."""
HIERARCHIES = {"v1": ["cpu", "memory", "pids"], "v2": [""]}


def cgroup(folder: Path, *, processes: str = "", version: str = "v1", populated: bool = False) -> None:
    """Make one cgroup folder as the kernel shows it, parents included."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text(processes)
    if version == "v2":
        (folder / "cgroup.events").write_text(f"populated {int(populated or bool(processes))}\nfrozen 0\n")


def grow(
    mount: Path, pods: dict[str, tuple[str, str]], *, version: str, busy: tuple[str, ...] = (RUNNING, STATIC)
) -> None:
    """Lay out pods below every hierarchy. Processes run in container folders; v2 marks the pod as populated too."""
    for hierarchy in HIERARCHIES[version]:
        cgroup(mount / hierarchy, processes="1\n")
        for uid, (pod, container) in pods.items():
            processes = "4711\n" if uid in busy else ""
            cgroup(mount / hierarchy / pod, version=version, populated=bool(processes))
            if container:
                cgroup(mount / hierarchy / pod / container, processes=processes, version=version)


@pytest.mark.parametrize("version", HIERARCHIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_understood(layout: str, version: str, tmp_path: Path) -> None:
    """v1 and v2, both drivers, with and without a cgroup root: populated and empty pods are told apart."""
    root, pods = LAYOUTS[layout]
    grow(tmp_path, pods, version=version)

    reading = read_cgroups(root, mount=tmp_path)

    assert reading == CgroupReading(populated=frozenset({RUNNING, STATIC}), empty=frozenset({IDLE}))


STRAYS = {
    "containerd without the systemd driver": f"system.slice/containerd.service/{PARENT}:cri-containerd:0a1b",
    "containerd, not below its service": f"system.slice/{PARENT}:cri-containerd:0a1b",
    "k3s": f"system.slice/k3s.service/{PARENT}:cri-containerd:0a1b",
    "docker without the systemd driver": f"{PARENT}/0a1b",
    "below a root": f"system.slice/containerd.service/nodes-n_1-{PARENT}:cri-containerd:0a1b",
}


@pytest.mark.parametrize("version", HIERARCHIES)
@pytest.mark.parametrize("stray", STRAYS)
def test_containers_beside_their_pods_cgroup_are_found(stray: str, version: str, tmp_path: Path) -> None:
    """Kubelet and runtime with different drivers: the pod's own cgroup is empty, and its container runs elsewhere."""
    grow(tmp_path, {RUNNING: LAYOUTS["systemd"][1][RUNNING]}, version=version, busy=())
    for hierarchy in HIERARCHIES[version]:
        cgroup(tmp_path / hierarchy / "system.slice" / "sshd.service", processes="22\n", version=version)
        cgroup(tmp_path / hierarchy / STRAYS[stray], processes="4711\n", version=version)
        pod = (tmp_path / hierarchy / STRAYS[stray]).parent
        if PARENT in pod.name:
            cgroup(pod, version=version, populated=True)

    assert read_cgroups(mount=tmp_path) == CgroupReading(populated=frozenset({RUNNING}), empty=frozenset())


def test_a_process_in_any_controller_counts(tmp_path: Path) -> None:
    """On v1 a pod is live when any mounted controller still holds a process of it."""
    _, pods = LAYOUTS["cgroupfs"]
    grow(tmp_path, pods, version="v1", busy=())
    (tmp_path / "pids" / pods[RUNNING][0] / "cgroup.procs").write_text("4711\n")

    reading = read_cgroups(mount=tmp_path)

    assert reading is not None
    assert reading.populated == {RUNNING}
    assert reading.empty == {IDLE, STATIC}


def test_controllers_without_pods_do_not_disturb(tmp_path: Path) -> None:
    """Hybrid machines mount v2 beside v1, without the kubelet's tree in it; links name a controller twice."""
    grow(tmp_path, LAYOUTS["cgroupfs"][1], version="v1")
    cgroup(tmp_path / "unified")
    (tmp_path / "cpuacct").symlink_to("cpu")
    (tmp_path / "README").write_text("not a folder")

    reading = read_cgroups(mount=tmp_path)

    assert reading is not None
    assert reading.populated == {RUNNING, STATIC}


@pytest.mark.parametrize(
    "break_it",
    [
        pytest.param(lambda mount: mount.rename(mount.parent / "away"), id="nothing is mounted"),
        pytest.param(
            lambda mount: (mount / "cpu" / "kubepods").rename(mount / "cpu" / "other"), id="another cgroup root"
        ),
        pytest.param(
            lambda mount: [
                (mount / "cpu" / "kubepods" / f"pod{IDLE}" / "cgroup.procs").unlink(),
                (mount / "cpu" / "kubepods" / f"pod{IDLE}" / "cgroup.procs").mkdir(),
            ],
            id="a file that cannot be read",
        ),
    ],
)
def test_unreadable_is_unknown_not_empty(break_it: object, tmp_path: Path) -> None:
    """Without the kubelet's tree, or with any part of it unreadable, nothing is known."""
    mount = tmp_path / "cgroup"
    cgroup(mount / "cpu", processes="1\n")
    cgroup(mount / "cpu" / "kubepods" / f"pod{IDLE}")
    break_it(mount)

    assert read_cgroups(mount=mount) is None


def test_a_pod_that_vanishes_while_it_is_read_is_gone(tmp_path: Path) -> None:
    """The kernel removes files under the reader; that is an end, not a fault."""
    cgroup(tmp_path / "cpu", processes="1\n")
    pod = tmp_path / "cpu" / "kubepods" / f"pod{RUNNING}"
    cgroup(pod)
    (pod / "cgroup.procs").unlink()

    reading = read_cgroups(mount=tmp_path)

    assert reading == CgroupReading(populated=frozenset(), empty=frozenset({RUNNING}))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param(f"4:memory:/kubepods/burstable/pod{RUNNING}/0a1b\n", RUNNING, id="v1 cgroupfs"),
        pytest.param(f"0::/atoll/kubepods/pod{RUNNING}/0a1b\n", RUNNING, id="v2 below a root"),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{RUNNING.replace('-', '_')}.slice/cri-containerd-1.scope\n",
            RUNNING,
            id="v2 systemd",
        ),
        pytest.param(f"0::/kubepods/pod{STATIC}/1\n", STATIC, id="static pod"),
        pytest.param(
            f"0::/system.slice/containerd.service/{PARENT}:cri-containerd:0a1b\n", RUNNING, id="containerd's own driver"
        ),
        pytest.param(f"0::/{PARENT}/0a1b\n", RUNNING, id="docker's own driver"),
        pytest.param(f"4:cpu:/kubepods/burstable/pod{RUNNING}/crio-0a1b\n", RUNNING, id="CRI-O, cgroupfs"),
        pytest.param(f"0::/kubepods.slice/{PARENT}/crio-conmon-0a1b.scope\n", RUNNING, id="CRI-O's monitor"),
        pytest.param(f"0::/../../{PARENT}/cri-containerd-0a1b.scope\n", RUNNING, id="cgroup namespace, v2"),
        pytest.param(f"4:cpu:/../pod{RUNNING}/0a1b\n", RUNNING, id="cgroup namespace, v1"),
        pytest.param(f"0::/kubelet.slice/kubelet-{PARENT}/cri-containerd-1.scope\n", RUNNING, id="kind"),
        pytest.param(f"0::/system.slice/k3s.service/{PARENT}:cri-containerd:1/nested\n", RUNNING, id="k3s, nested"),
        pytest.param("0::/../cri-containerd-0a1b.scope\n", None, id="a neighbour in our own pod"),
        pytest.param("0::/system.slice/sshd.service\n", None, id="no pod"),
        pytest.param("0::/podman/podcast\n", None, id="a name that begins alike"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_a_process_is_matched_to_its_pod(text: str, want: str | None) -> None:
    """The pod of a GPU process is read off its cgroup path, in every layout."""
    assert pod_uid_of(text) == want
