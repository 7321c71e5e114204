"""The programs of a development cluster, and the pinned Go module of each.

Pure tables of (program, module folder, package, link flags) by Kubernetes version. The versions themselves are in
modules/*/go.mod, under Go's own tools and checksums.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import BuildError
from devcluster.nvidia import PROGRAMS
from devcluster.paths import MODULES

DEFAULT_KUBERNETES = "1.37.2"

_ETCD = "go.etcd.io/etcd/server/v3"
_CONTAINERD = "github.com/containerd/containerd/v2"
_PLUGINS = "github.com/containernetworking/plugins"
_KUBERNETES = "k8s.io/kubernetes"
_KWOK = "sigs.k8s.io/kwok"
_HELM = "helm.sh/helm/v4"
_VERSITYGW = "github.com/versity/versitygw"
_NVIDIA = "github.com/NVIDIA/nvidia-container-toolkit"
_NVIDIA_FLAGS = "-s -w -extldflags=-Wl,-z,lazy"
"""It loads the driver's library when it needs it, not when it starts."""

KUEUE = "sigs.k8s.io/kueue"
"""The module of Kueue, which holds its manifests too."""
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
CNI_PLUGINS = {"bridge": "main/bridge", "host-local": "ipam/host-local", "loopback": "main/loopback"}


@dataclass(frozen=True, slots=True)
class Program:
    """One program: file name, the module folder that pins it, its Go package, link flags, and whether it needs C."""

    name: str
    module: str
    package: str
    link_flags: str = "-s -w"
    needs_c: bool = False


def kubernetes_versions(modules: Path = MODULES) -> dict[str, str]:
    """Each Kubernetes version that can be built, with the folder of its module."""
    folders = sorted(folder.name for folder in modules.glob("kubernetes-*"))
    return {required_version(modules / folder / "go.mod", of=_KUBERNETES): folder for folder in folders}


def required_version(go_mod: Path, *, of: str) -> str:
    """The version, without its v, that a go.mod requires of a module. Raises BuildError where it requires none."""
    found = re.search(rf"^(?:require)?\s+{re.escape(of)} v(\S+)", go_mod.read_text(), re.MULTILINE)
    if found is None:
        raise BuildError(f"{go_mod} does not require {of}: restore the file from version control")
    return found.group(1)


def programs_for(
    kubernetes: str,
    *,
    real_nodes: bool,
    kwok: bool,
    nvidia: bool = False,
    kueue: bool = False,
    modules: Path = MODULES,
) -> list[Program]:
    """The programs of a cluster, in the order to build them. Raises BuildError for a version without a module."""
    folders = kubernetes_versions(modules)
    if kubernetes not in folders:
        raise BuildError(f"no module for Kubernetes {kubernetes!r}; there are: {', '.join(sorted(folders))}")
    rows = [Program("etcd", "etcd", _ETCD), *_kubernetes(CONTROL_PLANE, kubernetes, folders[kubernetes])]
    rows += [Program(name, "tools", f"./{name}") for name in ("pause", "flock")]
    if real_nodes:
        rows += _kubernetes(("kubelet",), kubernetes, folders[kubernetes])
        rows += _containerd(modules)
        rows += [Program(name, "cni", f"{_PLUGINS}/plugins/{path}") for name, path in CNI_PLUGINS.items()]
    if nvidia:
        rows += [Program(name, "nvidia", f"{_NVIDIA}/cmd/{name}", _NVIDIA_FLAGS, needs_c=True) for name in PROGRAMS]
    if kwok:
        rows.append(Program("kwok", "kwok", f"{_KWOK}/cmd/kwok"))
    if kueue:
        version = required_version(modules / "kueue" / "go.mod", of=KUEUE)
        flags = f"-s -w -X {KUEUE}/pkg/version.GitVersion=v{version}"
        rows.append(Program("kueue", "kueue", f"{KUEUE}/cmd/kueue", flags))
    return rows


def helm_program(modules: Path = MODULES) -> Program:
    """Helm, which no cluster is made of; what renders and installs the chart."""
    version = required_version(modules / "helm" / "go.mod", of=_HELM)
    return Program("helm", "helm", f"{_HELM}/cmd/helm", f"-s -w -X {_HELM}/internal/version.version=v{version}")


def s3_program() -> Program:
    """An S3 server over a folder, which no cluster is made of; what tests of checkpoints write to."""
    return Program("versitygw", "s3", f"{_VERSITYGW}/cmd/versitygw")


def kubernetes_link_flags(version: str) -> str:
    """Link flags that stamp the version; without them every client sees v0.0.0-master."""
    major, minor = version.split(".")[:2]
    facts = {
        "gitVersion": f"v{version}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "unknown",
    }
    return " ".join(["-s -w", *(f"-X k8s.io/component-base/version.{key}={value}" for key, value in facts.items())])


def _kubernetes(names: Iterable[str], version: str, module: str) -> list[Program]:
    flags = kubernetes_link_flags(version)
    return [Program(name, module, f"{_KUBERNETES}/cmd/{name}", flags) for name in names]


def _containerd(modules: Path) -> list[Program]:
    version = required_version(modules / "containerd" / "go.mod", of=_CONTAINERD)
    flags = f"-s -w -X {_CONTAINERD}/version.Version=v{version}"
    names = ("containerd", "containerd-shim-runc-v2", "ctr")
    return [Program(name, "containerd", f"{_CONTAINERD}/cmd/{name}", flags) for name in names]
