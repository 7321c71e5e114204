"""Starts the supervisor of a cluster in its own namespaces, after checking that this machine supports it.

Returns the process that holds the namespaces, and the port on the host's loopback of the relay to the API server.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from devcluster.addresses import in_url
from devcluster.control import Control
from devcluster.control_plane import SERVER_PORT, SERVICE_PORT, Layout
from devcluster.errors import ControlError, RealNodesUnavailableError, StartError
from devcluster.waiting import log_tail, wait_until

NAMESPACE_FLAGS = (
    "--mount",
    "--pid",
    "--net",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation",
    "private",
)

_TOOLS = ("unshare", "nsenter", "mount", "ip")
_BRIDGE_SCRIPT = """set -e
ip link set lo up
ip link add atoll0 type bridge
{addresses}
ip link set atoll0 up
"""


@dataclass(slots=True)
class Launched:
    """Process that holds the namespaces, port of the relay, and pipe end; closing the pipe ends the cluster."""

    process: subprocess.Popen[bytes]
    port: int
    owner: int | None

    def detach(self, control: Control) -> None:
        """Let the cluster outlive this process; silences Python's warning about a child that nobody waits for."""
        control.disown()
        self.release()
        self.process.returncode = 0

    def release(self) -> None:
        """Close the pipe; a cluster that was not detached ends."""
        if self.owner is not None:
            os.close(self.owner)
            self.owner = None


def check_machine(*, real_nodes: bool) -> None:
    """Raise RealNodesUnavailableError if this machine cannot run the requested cluster."""
    if sys.platform != "linux":
        raise RealNodesUnavailableError(f"this is {sys.platform}, not Linux")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise RealNodesUnavailableError(f"{', '.join(missing)} missing (packages util-linux and iproute2)")
    if real_nodes and os.geteuid() != 0:
        raise RealNodesUnavailableError("you are not root")


def launch(layout: Layout, *, lock: IO[str]) -> Launched:
    """Start the supervisor and the cluster's bridge; they end with this process unless detached.

    On failure raises StartError with the supervisor's log.
    """
    layout.logs.mkdir()
    log = layout.logs / "supervisor.log"
    reading, owner = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener, lock:
        port = int(listener.getsockname()[1])
        inherited = {"listener": listener.fileno(), "lock": lock.fileno(), "owner": reading}
        process = _start(layout, inherited=inherited, log=log)
    os.close(reading)
    launched = Launched(process=process, port=port, owner=owner)
    try:
        _make_bridge(layout, launched, log=log)
    except BaseException:
        process.kill()
        launched.release()
        raise
    return launched


def _start(layout: Layout, *, inherited: Mapping[str, int], log: Path) -> subprocess.Popen[bytes]:
    # Without root the kernel requires a user namespace as well; that is enough for a control plane.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    supervisor = [sys.executable, "-m", "devcluster.supervisor", str(layout.folder)]
    descriptors = [f"--{name}={descriptor}" for name, descriptor in inherited.items()]
    network = layout.network
    server, service = f"{in_url(network.bridge)}:{SERVER_PORT}", f"{in_url(network.service)}:{SERVICE_PORT}"
    addresses = (f"--server={server}", f"--service={service}")
    command = ["unshare", *user, *NAMESPACE_FLAGS, "--", *supervisor, *descriptors, *addresses]
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=tuple(inherited.values()),
            start_new_session=True,
        )


def _make_bridge(layout: Layout, launched: Launched, *, log: Path) -> None:
    control = Control(layout.folder)

    def answers() -> bool:
        if launched.process.poll() is not None:
            raise StartError("the supervisor", problem="ended at once", log_tail=log_tail(log))
        try:
            control.status()
        except ControlError:
            return False
        return True

    wait_until(answers, what="the supervisor", timeout_seconds=120, log=log)
    script = _BRIDGE_SCRIPT.format(addresses="\n".join(layout.network.bridge_commands("atoll0")))
    result = control.run(["/bin/sh", "-c", script])
    if result.returncode != 0:
        raise StartError("the cluster's bridge", problem="cannot be made", log_tail=result.stderr)
