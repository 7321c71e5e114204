"""`atoll simulate`: the webhook's changes, the scheduler's choice, and no writes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from atoll.api import names
from atoll.explain.codec import encode_snapshot
from atollctl.__main__ import app
from tests.builders import claim_json
from tests.explain.situations import Situation, holder, situation, waiting


def pod_manifest(name: str = "new", claim: str = "two", **spec: Any) -> dict[str, Any]:
    """Return a pod as a user writes it: a claim's name and a container, nothing of Atoll's own."""
    metadata = {"name": name, "annotations": {names.CLAIM: claim}}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {"containers": [{"name": "main"}], **spec}}


def claim_manifest(name: str = "two", count: int = 2, **devices: Any) -> dict[str, Any]:
    """Return a claim as a user writes it."""
    body = claim_json(name, count=count, **devices)
    return {**body, "metadata": {"name": name}}


def ask(folder: Path, found: Situation, *documents: Any, options: tuple[str, ...] = ()) -> Result:
    """Ask about these manifests on that cluster."""
    (folder / "cluster.json").write_bytes(encode_snapshot(found.snapshot))
    (folder / "app.yaml").write_text(yaml.safe_dump_all(documents))
    files = ["-f", str(folder / "app.yaml"), "--snapshot", str(folder / "cluster.json")]
    return CliRunner().invoke(app, ["simulate", *files, "-n", "team", *options])


def answer(folder: Path, found: Situation, *documents: Any, options: tuple[str, ...] = ()) -> Any:
    """Return the JSON answer."""
    result = ask(folder, found, *documents, options=("-o", "json", *options))
    return msgspec.json.decode(result.stdout)


ROOM = situation({"n1": {}, "n2": {"profile": "l40s-4"}}, [holder("a", "n1", *range(8))])
TAKEN = situation({"n1": {}}, [holder("b", "n1", 0)])
FULL = situation({"n1": {}}, [holder("a", "n1", *range(8))])


def test_pod_as_the_user_writes_it(tmp_path: Path) -> None:
    """Claim and pod of one file, shaped as the webhook would: node, devices, islands, and what is left."""
    told = answer(tmp_path, ROOM, pod_manifest(), claim_manifest())

    assert [(one["node"], one["deviceIds"]) for one in told["pods"]] == [("n2", [0, 1])]
    assert told["before"]["free"] == {"n1": 0, "n2": 4}
    assert told["after"]["free"] == {"n1": 0, "n2": 2}


def test_text_says_where_and_what_is_left(tmp_path: Path) -> None:
    """People read one line per pod and the sum; status 0 where all fit."""
    result = ask(tmp_path, ROOM, pod_manifest(), claim_manifest())

    assert result.exit_code == 0
    assert "team/new: n2 GPUs 0,1 on numa-0" in result.output
    assert "1 of 1 pods fit. Free GPUs: 4 before, 2 after" in result.output


def test_workload_is_multiplied(tmp_path: Path) -> None:
    """A Job of three with two GPUs each takes one after another; the last one is told why it waits."""
    template = {"metadata": {"annotations": {names.CLAIM: "two"}}, "spec": {"containers": [{"name": "main"}]}}
    job = {"kind": "Job", "metadata": {"name": "train"}, "spec": {"parallelism": 3, "template": template}}

    told = answer(tmp_path, ROOM, job, claim_manifest())

    assert [one["fits"] for one in told["pods"]] == [True, True, False]
    assert told["pods"][2]["state"] == "busy"


def workload(kind: str, **spec: Any) -> dict[str, Any]:
    """Return a workload named like its kind, whose pods ask for two GPUs."""
    template = {"metadata": {"annotations": {names.CLAIM: "two"}}, "spec": {"containers": [{"name": "main"}]}}
    return {"kind": kind, "metadata": {"name": kind.lower()}, "spec": {"template": template, **spec}}


@pytest.mark.parametrize(
    ("kind", "spec", "count"),
    [
        ("Deployment", {}, 1),
        ("Deployment", {"replicas": 0}, 0),
        ("StatefulSet", {"replicas": 2}, 2),
        ("Job", {"parallelism": 0}, 0),
        ("Job", {"parallelism": 5, "completions": 2}, 2),
        ("Job", {"completions": 3}, 1),
    ],
)
def test_as_many_pods_as_the_owner_would_run(kind: str, spec: dict[str, Any], count: int, tmp_path: Path) -> None:
    """None where it is scaled to none, one where it says nothing, never more of a Job than are left to complete."""
    told = answer(tmp_path, ROOM, workload(kind, **spec), claim_manifest())

    assert [one["fits"] for one in told["pods"]] == [True] * count


def test_no_two_pods_are_one(tmp_path: Path) -> None:
    """Made up names are unlike each other and those of the cluster: no GPU is given out twice, none falls free."""
    nameless = pod_manifest()
    nameless["metadata"] = {**nameless["metadata"], "name": None, "generateName": "statefulset-"}
    found = situation({"n1": {}, "n2": {"profile": "l40s-4"}}, [holder("statefulset-0", "n1", *range(8))])

    told = answer(tmp_path, found, workload("StatefulSet"), nameless, nameless, claim_manifest())

    assert [one["fits"] for one in told["pods"]] == [True, True, False]
    assert len({one["pod"] for one in told["pods"]}) == 3
    assert told["after"]["free"] == {"n1": 0, "n2": 0}


def test_nodes_are_added_as_often_as_they_are_asked_for(tmp_path: Path) -> None:
    """Each one is a node by itself, also where two options name one shape."""
    options = ("--add", "1xl40s-4", "--add", "2xl40s-4")

    told = answer(tmp_path, FULL, workload("Deployment", replicas=6), claim_manifest(), options=options)

    assert [one["fits"] for one in told["pods"]] == [True] * 6
    assert sum(told["before"]["free"].values()) == 12


def test_a_claim_that_is_there_is_the_one_that_counts(tmp_path: Path) -> None:
    """The same once more changes nothing; another spec under its name would be refused, and so it is told."""
    found = situation({"n1": {}}, [], waiting(2, claim={}))

    same = ask(tmp_path, found, pod_manifest(claim="c"), claim_manifest("c", 2))
    other = ask(tmp_path, found, pod_manifest(claim="c"), claim_manifest("c", 1))

    assert same.exit_code == 0
    assert other.exit_code == 2
    assert "GpuClaim team/c is there and asks for something else" in other.output


def test_priority_goes_first(tmp_path: Path) -> None:
    """The pod of the higher priority gets the last set, wherever it stands in the file."""
    low, high = pod_manifest("low", "four", priority=1), pod_manifest("high", "four", priority=9)

    told = answer(tmp_path, ROOM, low, high, claim_manifest("four", 4), options=("--no-preemption",))

    assert {one["pod"]: one["fits"] for one in told["pods"]} == {"team/high": True, "team/low": False}


@pytest.mark.parametrize(
    ("options", "node"),
    [
        (("--add", "1xdgx-h100"), "added-dgx-h100-1"),
        (("--add", "2xn1"), "added-n1-1"),
        (("--without", "a"), "n1"),
        (("--without", "team/a"), "n1"),
    ],
)
def test_what_if(options: tuple[str, ...], node: str, tmp_path: Path) -> None:
    """A node that comes, by shape or by likeness, or a pod that ends makes room."""
    assert answer(tmp_path, FULL, pod_manifest(), claim_manifest())["pods"][0]["fits"] is False
    assert answer(tmp_path, FULL, pod_manifest(), claim_manifest(), options=options)["pods"][0]["node"] == node


def test_node_that_goes(tmp_path: Path) -> None:
    """Without its only node the pod fits nowhere."""
    told = answer(tmp_path, ROOM, pod_manifest(), claim_manifest(), options=("--remove", "n2"))

    assert told["pods"][0]["fits"] is False
    assert "n2" not in told["after"]["free"]


@pytest.mark.parametrize(
    ("document", "options", "words"),
    [
        (pod_manifest(claim="none"), (), "would be denied"),
        (
            {"items": [pod_manifest(schedulerName="mine"), claim_manifest()]},
            (),
            "only gpu-scheduler gives Atoll's GPUs",
        ),
        (
            {"kind": "GpuClaim", "metadata": {"name": "x"}, "spec": {"devices": {"count": -1}}},
            (),
            "GpuClaim x: spec.devices.count: ",
        ),
        (7, (), "where an object is expected"),
        ({"kind": "Job", "metadata": {"name": "j"}, "spec": {}}, (), "no readable template"),
        (claim_manifest(), ("--remove", "n9"), "there is no such node"),
        (claim_manifest(), ("--without", "c"), "there is no such pod"),
        (claim_manifest(), ("--add", "3xnosuch"), "no profile named 'nosuch'"),
        (claim_manifest(), ("--add", "-1"), "write COUNTxSHAPE"),
        (claim_manifest(), ("--add", "0xdgx-h100"), "write COUNTxSHAPE"),
        (claim_manifest(), (), "there is no pod in the files"),
        (claim_manifest(), ("--add", "1001xl40s-4"), "at most 1000 nodes"),
        ({"items": 7}, (), "holds a int where an object is expected"),
        ({"items": None}, (), "holds a NoneType where an object is expected"),
        ({"kind": "Pod", "metadata": ["a"]}, (), "metadata of a Pod is a list"),
        ({"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": ["a"]}}, (), "no readable template"),
        (workload("Deployment", replicas=10**6), (), "deployment asks for 1000000 pods"),
        ({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"priority": 10**30}}, (), "pod team/p cannot be read"),
        ({"items": [pod_manifest("a"), pod_manifest("a"), claim_manifest()]}, (), "pod team/a is in the files twice"),
        ({"items": [pod_manifest("b"), claim_manifest()]}, (), "one of that name is on n1; say --without team/b"),
    ],
    ids=[
        "no-claim",
        "scheduler",
        "claim",
        "number",
        "job",
        "remove",
        "without",
        "add",
        "count",
        "zero",
        "no-pod",
        "many-nodes",
        "items",
        "no-items",
        "metadata",
        "template",
        "many-pods",
        "large-priority",
        "twice",
        "taken",
    ],
)
def test_mistakes_are_told_in_one_sentence(document: Any, options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """What the webhook would deny is denied in its words; what is not there is named. Status 2."""
    result = ask(tmp_path, TAKEN, document, options=options)

    assert result.exit_code == 2, result.output
    assert words in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is named."""
    result = CliRunner().invoke(app, ["simulate", "-f", str(tmp_path / "no"), "--snapshot", str(tmp_path / "none")])

    assert result.exit_code == 2
    assert "none" in result.output


def test_members_of_a_gang_are_told_apart(tmp_path: Path) -> None:
    """A member is not placed by itself: its gang starts as one."""
    member = pod_manifest()
    member["metadata"]["annotations"][names.GANG] = "g"

    told = answer(tmp_path, ROOM, member, claim_manifest())

    assert told["pods"][0]["fits"] is False
    assert "its GpuGang is missing" in told["pods"][0]["headline"]
