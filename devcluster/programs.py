"""The programs of a development cluster, and the pinned Go module of each.

Pure tables of (program, module folder, package, link flags) by Kubernetes version. modules/*/go.mod pin the versions,
with Go's checksums.
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
"""Lazy binding: the program loads the driver's library at its first use, not at start."""

KUEUE = "sigs.k8s.io/kueue"
JOBSET = "sigs.k8s.io/jobset"
LWS = "sigs.k8s.io/lws"
MPI_OPERATOR = "github.com/kubeflow/mpi-operator"
KUBERAY = "github.com/ray-project/kuberay/ray-operator"
TRAINER = "github.com/kubeflow/trainer/v2"
APPWRAPPER = "github.com/project-codeflare/appwrapper"
"""Modules of operators; they include the manifests."""
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
CNI_PLUGINS = {"bridge": "main/bridge", "host-local": "ipam/host-local", "loopback": "main/loopback"}


@dataclass(frozen=True, slots=True)
class Program:
    """One program: file name, module folder that pins it, Go package, link flags, and a flag for cgo."""

    name: str
    module: str
    package: str
    link_flags: str = "-s -w"
    needs_c: bool = False


def kubernetes_versions(modules: Path = MODULES) -> dict[str, str]:
    """Return each Kubernetes version that can be built, with its module's folder."""
    folders = sorted(folder.name for folder in modules.glob("kubernetes-*"))
    return {required_version(modules / folder / "go.mod", of=_KUBERNETES): folder for folder in folders}


def required_version(go_mod: Path, *, of: str) -> str:
    """Return the version of a module that a go.mod requires, without `v`. Raises BuildError if it requires none."""
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
    """Return a cluster's programs in build order. Raises BuildError for a version without a module."""
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
    """Return Helm, which renders and installs the chart; not part of a cluster."""
    version = required_version(modules / "helm" / "go.mod", of=_HELM)
    return Program("helm", "helm", f"{_HELM}/cmd/helm", f"-s -w -X {_HELM}/internal/version.version=v{version}")


def s3_program() -> Program:
    """Return an S3 server over a folder, for the checkpoint tests; not part of a cluster."""
    return Program("versitygw", "s3", f"{_VERSITYGW}/cmd/versitygw")


def owner_programs(modules: Path = MODULES) -> list[Program]:
    """Return the operators that own pods of gangs, for the tests with their real controllers."""
    go_mod = modules / "owners" / "go.mod"

    def flags(module: str) -> str:
        return f"-s -w -X {module}/pkg/version.GitVersion=v{required_version(go_mod, of=module)}"

    return [
        Program("jobset", "owners", JOBSET, flags(JOBSET)),
        Program("lws", "owners", f"{LWS}/cmd", flags(LWS)),
        Program("mpi-operator", "owners", f"{MPI_OPERATOR}/cmd/mpi-operator"),
        Program("trainer", "owners", f"{TRAINER}/cmd/trainer-controller-manager"),
        Program("kuberay", "kuberay", KUBERAY),
        Program("appwrapper", "appwrapper", f"{APPWRAPPER}/cmd"),
    ]


def kubernetes_link_flags(version: str) -> str:
    """Return link flags that set the version; without them clients see v0.0.0-master."""
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
