"""`atoll simulate` and `atoll explain` include reservations: where their pods would go, or why they do not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from atoll.api.reservations import GpuReservation
from atoll.cluster.leases import Holder, reserved_for
from atoll.explain.decision import index_snapshot
from atoll.explain.explanation import PodState, explain
from atoll.explain.gang_decision import index_gangs
from atoll.explain.gang_explanation import GangState, explain_gang
from tests.builders import NOW, make_lease, make_pod
from tests.explain.gang_situations import gang_situation, rack
from tests.explain.situations import Situation, situation
from tests.explain.test_simulate import answer, claim_manifest, pod_manifest

MARK = "nightly/uid-of-nightly"


def hall(*reserved: int, phase: str = "Active", **spec: Any) -> Situation:
    """Return two free machines, where nightly holds these GPUs of n2 for the namespace team."""
    found = situation({"n1": {}, "n2": {}}, [])
    holder = reserved_for(MARK, "n2", "", NOW).holder
    leases = [make_lease("n2", number, holder=holder, annotations={names.RESERVATION: MARK}) for number in reserved]
    body = {
        "metadata": {"name": "nightly", "uid": "uid-of-nightly"},
        "spec": {"shape": {"count": 4}, "namespaces": ["team"], **spec},
        "status": {"phase": phase},
    }
    snapshot = replace(found.snapshot, leases=tuple(leases), reservations=(GpuReservation.model_validate(body),))
    return replace(found, snapshot=snapshot)


def naming(name: str) -> dict[str, Any]:
    """Return the manifest of a pod that names the reservation."""
    body = pod_manifest(name)
    body["metadata"]["annotations"][names.RESERVATION] = "nightly"
    return body


def test_pods_that_name_it_go_there_and_others_elsewhere(tmp_path: Path) -> None:
    """Two fit what it holds, the third nowhere beside twelve free GPUs; whoever names none is offered none of it."""
    pods = [naming("a"), naming("b"), naming("c"), *(pod_manifest(f"other-{number}") for number in range(7))]
    told = answer(tmp_path, hall(0, 1, 2, 3), *pods, claim_manifest())

    places = {one["pod"]: (one["node"], set(one["deviceIds"] or ())) for one in told["pods"]}
    assert places["team/a"][0] == places["team/b"][0] == "n2"
    assert places["team/a"][1] | places["team/b"][1] == {0, 1, 2, 3}
    assert not places["team/c"][0]
    others = [places[f"team/other-{number}"] for number in range(7)]
    assert sum(bool(node) for node, _ in others) == 6
    assert not any(node == "n2" and ids & {0, 1, 2, 3} for node, ids in others)


REFUSED: dict[str, tuple[Situation, dict[str, Any]]] = {
    names.REJECT_RESERVATION_MISSING: (situation({"n1": {}}, []), {}),
    names.REJECT_RESERVATION_OVER: (hall(phase="Ended"), {}),
    names.REJECT_RESERVATION_FOREIGN: (hall(namespaces=["x"]), {}),
    names.REJECT_RESERVATION_EARLY: (hall(phase="Pending"), {}),
    names.REJECT_RESERVATION_SMALL: (hall(), {"gpus": 5}),
}
BUSY: dict[str, tuple[Situation, dict[str, Any]]] = {
    "too few free GPUs": (hall(0), {}),
    names.REJECT_RESERVATION_ELSEWHERE: (hall(), {}),
}


@pytest.mark.parametrize("words", [*REFUSED, *BUSY])
def test_pod_that_waits_is_told_why(words: str) -> None:
    """And nothing is proposed that would free GPUs outside of it."""
    scene, options = (REFUSED | BUSY)[words]
    pod = make_pod("p", annotations={names.RESERVATION: "nightly"}, **{"gpus": 2, **options})
    found = explain(index_snapshot(replace(scene.snapshot, pods=(pod,))), pod)

    assert found.state is (PodState.REFUSED if words in REFUSED else PodState.BUSY)
    assert words in found.headline
    assert not found.help.proposals


@pytest.mark.parametrize(
    ("reserved", "count", "state", "words"),
    [
        pytest.param(("a1",), 2, GangState.FITS, "2 members fit now, on 1 nodes", id="fits"),
        pytest.param(("a1", "a2"), 4, GangState.BUSY, "waits for the 8 GPUs of its GpuReservation", id="others-use-it"),
        pytest.param(
            ("a1",), 4, GangState.BUSY, "even if no pod used the 4 GPUs of its GpuReservation", id="too-small"
        ),
        pytest.param((), 2, GangState.MEMBERS, names.REJECT_RESERVATION_OVER, id="over"),
    ],
)
def test_gang_that_names_it_is_explained_by_what_it_holds(
    reserved: tuple[str, ...], count: int, state: GangState, words: str
) -> None:
    """Eight free GPUs beside it change nothing, and nothing is proposed that would free others."""
    member = {"annotations": {names.GANG: "g", names.RESERVATION: "nightly"}}
    nodes = {name: rack("a") for name in ("a1", "a2", "b1", "b2")}
    found = gang_situation(nodes, gpus=2, count=count, member=member)
    own = reserved_for(MARK, "a1", "", NOW).holder
    leases = [
        make_lease(node, number, holder=other if node == "a2" else own, annotations={names.RESERVATION: MARK})
        for other in (Holder("team", "other", "uid-of-other"),)
        for node in reserved
        for number in range(4)
    ]
    phase = "Active" if reserved else "Ended"
    snapshot = replace(found.snapshot, leases=tuple(leases), reservations=hall(phase=phase).snapshot.reservations)
    told = explain_gang(index_gangs(index_snapshot(snapshot)), found.gang)

    assert told.state is state
    assert words in told.headline
    assert not told.help.proposals
    assert {node for _, node, _ in told.assignments} <= {"a1"}
