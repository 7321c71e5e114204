"""The command: `python -m devcluster.demo [--play jobs] [--keep] [--name NAME]`.

Exit status: 0 only if every promise held, 1 if one failed or something did not start, 130 if interrupted. The clusters
are removed afterwards, unless --keep is given.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from atoll.cluster.errors import MalformedValue
from devcluster.build import ensure_binaries
from devcluster.cluster import DevCluster
from devcluster.demo.errors import ExpectationFailed
from devcluster.demo.job_room import opened_room
from devcluster.demo.job_scenes import JOB_SCENES, JobScene, play_jobs
from devcluster.demo.observer import NAMESPACE, Observer
from devcluster.demo.scenes import SCENES, Play, Scene, summarize
from devcluster.demo.stage import Terminal
from devcluster.errors import AdminApiError, DevclusterError
from devcluster.installation import AtollPart, Installation
from devcluster.launch import check_machine
from devcluster.node import DevNodeSpec
from devcluster.programs import DEFAULT_KUBERNETES

NODES = (
    DevNodeSpec("volta", profile="dgx1-v100"),
    DevNodeSpec("hopper", profile="dgx-h100"),
    DevNodeSpec("lovelace", profile="l40s-8"),
    DevNodeSpec("grace", profile="gb200-tray"),
)
AGENT_OPTIONS = ("--poll-seconds", "5", "--simulated-order", "reversed")
"""Reversed, so that index and device id differ: a mix-up of the two fails. Drivers renumber GPUs at every boot."""
ATOLL = Path(sys.executable).with_name("atoll")
INTERRUPTED = 130
PLAY_MINUTES = 2
JOBS_MINUTES = 4


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and run the demo; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m devcluster.demo", description="Show Atoll at work on this machine."
    )
    parser.add_argument(
        "--play",
        choices=("gpus", "jobs"),
        default="gpus",
        help="gpus: the scheduler on one cluster; jobs: the job service on two (default: %(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the cluster running and print how to reach it")
    parser.add_argument("--name", default="demo", help="name of the cluster (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.play == "jobs" and options.keep:
        parser.error("--keep is for --play gpus: the clusters of --play jobs end with the play")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    if options.play == "jobs":
        return perform_jobs(options.name)
    return perform(options.name, keep=options.keep)


def perform(name: str, *, keep: bool = False, scenes: Sequence[Scene] = SCENES) -> int:
    """Start a cluster and play the scenes on it; return the exit status."""
    stage = Terminal()

    def play() -> str:
        stage.scene("A real Kubernetes on this machine")
        with stage.step(f"programs of Kubernetes {DEFAULT_KUBERNETES}") as report:
            ensure_binaries(report=report)
        return _start_and_play(stage, name, keep=keep, scenes=scenes)

    status = _told(stage, PLAY_MINUTES, play)
    if keep and status == 0:
        kubectl = ensure_binaries()["kubectl"]
        for line in how_to_go_on(name, kubectl=kubectl, kubeconfig=DevCluster.attach(name).kubeconfig):
            stage.verbatim(line)
    return status


def perform_jobs(name: str, *, scenes: Sequence[JobScene] = JOB_SCENES) -> int:
    """Start two clusters and the job service and play the scenes; return the exit status."""
    stage = Terminal()

    def play() -> str:
        stage.scene("Two real clusters on this machine, and the job service")
        with stage.step(f"programs of Kubernetes {DEFAULT_KUBERNETES}, and Kueue") as report:
            ensure_binaries(report=report, kueue=True)
        with opened_room(stage, name) as room:
            return play_jobs(room, scenes)

    return _told(stage, JOBS_MINUTES, play)


def _told(stage: Terminal, minutes: int, play: Callable[[], str]) -> int:
    """Check the machine, play, and print how it ended; return the exit status."""
    try:
        check_machine(real_nodes=True)
        stage.say(f"The demo takes about {minutes} minutes. Programs that are missing are built first, once.")
        summary = play()
    except (DevclusterError, OSError) as error:
        stage.broken(str(error))
        return 1
    except KeyboardInterrupt:
        stage.say("interrupted; nothing is left running")
        return INTERRUPTED
    stage.kept(summary)
    return 0


def _start_and_play(stage: Terminal, name: str, *, keep: bool, scenes: Sequence[Scene]) -> str:
    """Play the scenes; return the summary. With `keep` the cluster stays, even if a promise failed."""
    with ExitStack() as owned:
        with stage.step(f"control plane and four nodes: {', '.join(node.name for node in NODES)}") as report:
            cluster = DevCluster.start(name, nodes=NODES, scheduler=False, persistent=keep, report=report)
            owned.callback(_remove, stage, cluster)
        try:
            summary = _play(stage, cluster, scenes)
        except ExpectationFailed as error:
            logs = cluster.layout.logs if keep else _save_logs(cluster)
            end = f"; end the cluster with {ATOLL} dev down {name}" if keep else ""
            if keep:
                owned.pop_all()
            raise ExpectationFailed(f"{error}; read {logs / error.process}.log{end}", process=error.process) from error
        if keep:
            owned.pop_all()
    return summary


def _remove(stage: Terminal, cluster: DevCluster) -> None:
    with stage.step("cluster and files are removed"):
        cluster.stop()


def _play(stage: Terminal, cluster: DevCluster, scenes: Sequence[Scene]) -> str:
    installation = Installation(cluster, options={"agent": AGENT_OPTIONS})
    with stage.step("deploy/: resource kinds, roles, policies"):
        installation.apply_manifests()
    with stage.step("Atoll's parts, each a process under its own ServiceAccount"):
        installation.start_parts()
    for account, parts in parts_by_account(installation.parts.values()).items():
        stage.quote(f"{account}: {', '.join(parts)}")
    play = Play(stage, Observer(cluster), installation)
    try:
        for scene in scenes:
            scene(play)
        return summarize(play)
    except (AdminApiError, MalformedValue) as error:
        raise ExpectationFailed(str(error), process="kube-apiserver") from error


def parts_by_account(parts: Iterable[AtollPart]) -> dict[str, list[str]]:
    """Group the names of parts by ServiceAccount."""
    accounts: dict[str, list[str]] = {}
    for part in parts:
        accounts.setdefault(part.account, []).append(part.name)
    accounts["atoll-scheduler"].append("kube-scheduler")
    return accounts


def how_to_go_on(name: str, *, kubectl: Path, kubeconfig: Path) -> tuple[str, ...]:
    """Return commands to try on a cluster that was kept."""
    return (
        "The cluster keeps running. Try:",
        f"  export KUBECONFIG={kubeconfig}",
        f"  export PATH={kubectl.parent}:$PATH",
        "  kubectl get gns                            # the machines",
        f"  kubectl get gclaim,pods -n {NAMESPACE} -o wide     # claims, pods and their nodes",
        f"  kubectl describe pod -n {NAMESPACE} third          # annotations and events: its GPUs and why",
        f"  kubectl logs -n {NAMESPACE} third                  # GPUs that its container sees",
        "  kubectl get leases -n atoll-system -l gpu.scheduling/lease=gpu",
        f"  {ATOLL} audit",
        f"  {ATOLL} dev logs controllers --name {name} -f",
        f"End it with: {ATOLL} dev down {name}",
    )


def _save_logs(cluster: DevCluster) -> Path:
    """Copy the logs of a cluster before it ends; return the folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"atoll-{cluster.name}-logs-"))
    shutil.copytree(cluster.layout.logs, folder, dirs_exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
