"""When a program is built, and the path of the result."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from devcluster import build, programs
from devcluster.errors import BuildError
from devcluster.paths import MODULES
from devcluster.programs import Program
from devcluster.toolchain import Toolchain, parse_version


def module(folder: Path, *, requirement: str = "example.test/thing v1.2.3") -> Path:
    """A module folder with one requirement below the folder."""
    (folder / "thing").mkdir(parents=True)
    (folder / "thing" / "go.mod").write_text(f"module thing\n\nrequire {requirement}\n")
    return folder


ROW = Program("thing", "thing", "example.test/thing")


def test_the_same_inputs_give_the_same_cache_folder(tmp_path: Path) -> None:
    """A second start finds what the first one built."""
    first, second = module(tmp_path / "a"), module(tmp_path / "b")

    assert build.folder_name(ROW, go_version="1.26.8", modules=first) == build.folder_name(
        ROW, go_version="1.26.8", modules=second
    )


@pytest.mark.parametrize(
    ("requirement", "go_version", "flags"),
    [
        pytest.param("example.test/thing v1.2.4", "1.26.8", "-s -w", id="another version of the module"),
        pytest.param("example.test/thing v1.2.3", "1.27.0", "-s -w", id="another Go"),
        pytest.param("example.test/thing v1.2.3", "1.26.8", "-s", id="other link flags"),
    ],
)
def test_whatever_decides_the_result_decides_the_folder(
    tmp_path: Path, requirement: str, go_version: str, flags: str
) -> None:
    """A change of module files, Go or flags never meets a stale program."""
    before = build.folder_name(ROW, go_version="1.26.8", modules=module(tmp_path / "a"))
    changed = Program("thing", "thing", "example.test/thing", flags)

    after = build.folder_name(changed, go_version=go_version, modules=module(tmp_path / "b", requirement=requirement))

    assert after != before


def test_every_kubernetes_version_has_a_module_of_its_minor_version() -> None:
    """Folder names tell the truth about what go.mod pins, and the default is among them."""
    versions = programs.kubernetes_versions()

    assert programs.DEFAULT_KUBERNETES in versions
    assert len(versions) >= 2
    for version, folder in versions.items():
        assert folder == f"kubernetes-{'.'.join(version.split('.')[:2])}"


def test_an_unknown_version_is_refused_with_those_there_are() -> None:
    """A typo in the version costs a sentence, not a build."""
    with pytest.raises(BuildError, match=r"no module for Kubernetes '1\.99\.0'; there are: .*1\.37\.2"):
        programs.programs_for("1.99.0", real_nodes=True, kwok=False)


def test_a_cluster_without_nodes_needs_no_node_programs() -> None:
    """A control plane alone is quick to build."""
    names = {row.name for row in programs.programs_for("1.37.2", real_nodes=False, kwok=False)}

    assert names == {"etcd", "pause", "flock", *programs.CONTROL_PLANE}


def test_nvidias_runtime_is_built_only_for_who_asks() -> None:
    """The demo needs no C compiler and none of NVIDIA's programs."""
    plain = programs.programs_for("1.37.2", real_nodes=True, kwok=False)
    asked = programs.programs_for("1.37.2", real_nodes=True, kwok=False, nvidia=True)

    assert not any(row.needs_c for row in plain)
    assert {row.name for row in asked if row.needs_c} == {"nvidia-container-runtime", "nvidia-ctk", "nvidia-cdi-hook"}


def test_kueue_is_built_only_for_who_asks() -> None:
    """It takes minutes, and few tests need it."""
    plain = programs.programs_for("1.37.2", real_nodes=True, kwok=True, nvidia=True)
    asked = programs.programs_for("1.37.2", real_nodes=True, kwok=True, nvidia=True, kueue=True)

    assert [row.name for row in asked if row not in plain] == ["kueue"]
    assert asked[-1].link_flags.endswith("pkg/version.GitVersion=v0.17.0")


def test_the_stamped_version_is_the_pinned_one() -> None:
    """Clients must not see v0.0.0-master."""
    flags = programs.kubernetes_link_flags("1.37.2")

    assert programs.helm_program().link_flags.endswith("internal/version.version=v4.3.2")

    assert "version.gitVersion=v1.37.2" in flags
    assert "version.gitMinor=37" in flags


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in MODULES.glob("*/tools.go")))
def test_programs_are_packages_that_their_module_pins(folder: str) -> None:
    """tools.go keeps every built package in go.mod; a package that it lacks would not build with -mod=readonly."""
    tools = (MODULES / folder / "tools.go").read_text()
    rows = [
        row
        for version in programs.kubernetes_versions()
        for row in programs.programs_for(version, real_nodes=True, kwok=True, nvidia=True, kueue=True)
    ]

    rows += [programs.helm_program(), programs.s3_program(), *programs.owner_programs()]
    packages = {row.package for row in rows if row.module == folder}

    assert packages
    assert all(f'"{package}"' in tools for package in packages)


@pytest.mark.parametrize(
    ("done", "seconds", "percent"),
    [
        pytest.param(0, 0, 0, id="nothing is built"),
        pytest.param(1, 0, 30 * 100 // 325, id="the first program is built"),
        pytest.param(1, 145, 175 * 100 // 325, id="half the time of the second has passed"),
        pytest.param(1, 9000, 291 * 100 // 325, id="a slow machine never shows a program as built before it is"),
        pytest.param(3, 0, 100, id="all are built"),
    ],
)
def test_a_build_shows_a_percentage_of_its_time(done: int, seconds: float, percent: int) -> None:
    """It counts expected time, not programs: kube-apiserver takes sixty times as long as pause."""
    assert build.percent_built(("etcd", "kube-apiserver", "pause"), done, seconds=seconds) == percent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("go version go1.26.8 linux/amd64", (1, 26, 8), id="a release"),
        pytest.param("go version go1.27 linux/arm64", (1, 27, 0), id="a first release"),
        pytest.param("go version go1.28rc1 linux/amd64", (1, 28, 0), id="a release candidate"),
        pytest.param("command not found", None, id="no Go at all"),
    ],
)
def test_versions_of_go_are_read(text: str, expected: tuple[int, ...] | None) -> None:
    """Only what Go itself prints counts as a version."""
    assert parse_version(text) == expected


def executable(path: Path, script: str) -> Path:
    """A shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_assets_of_the_wanted_version_are_used(tmp_path: Path) -> None:
    """Who has Kubernetes test binaries need not build them again; what is missing there is built."""
    executable(tmp_path / "kube-apiserver", "echo Kubernetes v1.37.0")
    executable(tmp_path / "etcd", "exit 0")

    found = build.assets_from_environment({"KUBEBUILDER_ASSETS": str(tmp_path)}, kubernetes="1.37.2", report=print)

    assert found == {"etcd": tmp_path / "etcd", "kube-apiserver": tmp_path / "kube-apiserver"}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param("echo Kubernetes v1.36.2", "has Kubernetes v1.36.2, wanted 1.37.2", id="an older minor version"),
        pytest.param("exit 1", "has no version, wanted 1.37.2", id="a broken program"),
        pytest.param(None, "has no kube-apiserver", id="an empty folder"),
    ],
)
def test_other_assets_are_left_alone_with_a_word(tmp_path: Path, script: str | None, reason: str) -> None:
    """A kubelet newer than its API server is unsupported, so such assets are not used, and the user learns why."""
    if script is not None:
        executable(tmp_path / "kube-apiserver", script)
    reports: list[str] = []

    found = build.assets_from_environment(
        {"KUBEBUILDER_ASSETS": str(tmp_path)}, kubernetes="1.37.2", report=reports.append
    )

    assert found == {}
    assert len(reports) == 1
    assert reason in reports[0]


def test_a_failed_build_leaves_nothing_that_looks_built(tmp_path: Path) -> None:
    """An interrupted or failed build goes on where it stopped: the target appears whole or not at all."""
    command = executable(
        tmp_path / "go", 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; echo no space >&2; exit 1'
    )
    target = tmp_path / "cache" / "pause"

    with pytest.raises(BuildError, match=r"cannot build pause from \./pause: no space"):
        build.build_program(
            Program("pause", "tools", "./pause"), target, toolchain=Toolchain(command=str(command), version="1.26.8")
        )

    assert list(target.parent.iterdir()) == []


def test_a_finished_build_is_executable_under_its_name(tmp_path: Path) -> None:
    """What the compiler wrote becomes the target by one rename."""
    command = executable(tmp_path / "go", 'while [ "$1" != -o ]; do shift; done; echo whole > "$2"')
    target = tmp_path / "cache" / "pause"

    build.build_program(
        Program("pause", "tools", "./pause"), target, toolchain=Toolchain(command=str(command), version="1.26.8")
    )

    assert target.read_text() == "whole\n"
    assert list(target.parent.iterdir()) == [target]


def test_a_build_is_told_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits hears how long all of it takes, then how far it is, then that it is done."""
    told: list[str] = []
    command = executable(tmp_path / "go", 'while [ "$1" != -o ]; do shift; done; echo whole > "$2"')
    monkeypatch.setattr(build, "find_toolchain", lambda *_a, **_k: Toolchain(str(command), "1.26.8"))

    build.ensure_helm(cache=tmp_path / "cache", report=told.append)
    build.ensure_helm(cache=tmp_path / "cache", report=told.append)

    assert [line[:26] for line in told] == [
        "programs to build, once: 1",
        "  0 %  building helm (helm",
        "100 %  helm: 0 MB in 0 s",
    ]
