"""The wire format: Atoll decodes kube-scheduler's JSON as Go writes it, and kube-scheduler decodes Atoll's."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender import wire

POD = (
    b'{"metadata":{"name":"p","namespace":"team","uid":"u1","creationTimestamp":null,"labels":{"app":"x"},'
    b'"annotations":{"gpu.scheduling/claim":"c"}},"spec":{"containers":[{"name":"main","image":"i","resources":'
    b'{"limits":{"gpu.scheduling/gpu":"2"},"requests":{"gpu.scheduling/gpu":"2"}},"terminationMessagePolicy":"File"}],'
    b'"restartPolicy":"Always","schedulerName":"gpu-scheduler","priority":0,"enableServiceLinks":true},'
    b'"status":{"phase":"Pending","conditions":[{"type":"PodScheduled","status":"False","lastProbeTime":null}]}}'
)


def test_filter_arguments_as_go_writes_them() -> None:
    """Go writes field names, nulls and all; what we do not know is skipped."""
    call = wire.read_filter(b'{"Pod":' + POD + b',"Nodes":null,"NodeNames":["n1","n2"],"Later":{"x":[1]}}')

    assert call.node_names == ("n1", "n2")
    assert (call.pod.metadata.uid, call.pod.spec.scheduler_name) == ("u1", "gpu-scheduler")
    assert call.pod.spec.containers[0].resources.limits == {"gpu.scheduling/gpu": "2"}


def test_no_node_at_all_is_no_error() -> None:
    """An empty list of names is answered by an empty list."""
    assert wire.read_filter(b'{"Pod":' + POD + b',"Nodes":null,"NodeNames":[]}').node_names == ()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"{}",
        b'{"Pod":null,"NodeNames":["n1"]}',
        b'{"Pod":{},"NodeNames":["n1"]}',
        b'{"Pod":' + POD + b',"NodeNames":"n1"}',
        b'{"Pod":' + POD + b',"NodeNames":[null]}',
        b'{"Pod":' + POD + b',"Nodes":{"items":[]},"NodeNames":null}',
        b'{"Pod":' + POD.replace(b'"containers":[', b'"containers":null,"x":[') + b',"NodeNames":[]}',
        b"\xff\xfe",
    ],
)
def test_nonsense_is_a_malformed_call(body: bytes) -> None:
    """Every odd body is one error that says what could not be read; whole Nodes name the setting to change."""
    with pytest.raises(wire.MalformedCall) as caught:
        wire.read_filter(body)

    assert b'"Nodes":{' not in body or "nodeCacheCapable" in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_readers(body: bytes) -> None:
    """Any bytes are read or refused."""
    for read in (wire.read_filter, wire.read_bind, wire.read_preempt):
        try:
            read(body)
        except wire.MalformedCall:
            continue


def test_filter_reply_is_what_go_decodes() -> None:
    """Names that fit and reasons of nodes that preemption cannot help; no error."""
    assert wire.filter_reply(["n1"], {"n2": "too few free GPUs"}) == (
        b'{"NodeNames":["n1"],"FailedNodes":{},"FailedAndUnresolvableNodes":{"n2":"too few free GPUs"},"Error":""}'
    )
    assert json.loads(wire.filter_reply((), {}))["NodeNames"] == []


def test_names_of_the_second_call_are_found_without_reading_it() -> None:
    """What stands before the names is known again byte by byte; a name is found whole, and only behind that."""
    before = wire.before_names(b'{"Pod":' + POD + b',"Nodes":null,"NodeNames":["n1","n22"]}')

    assert before == b'{"Pod":' + POD + b',"Nodes":null,"NodeNames":['
    assert wire.is_followed_by(before + b'"n22"]}', before, "n22")
    assert not wire.is_followed_by(before + b'"n22"]}', before, "n2")
    assert not wire.is_followed_by(before + b'"n22"]}', before, "main")
    assert not wire.is_followed_by(before.replace(b"u1", b"u2") + b'"n22"]}', before, "n22")
    assert wire.before_names(b'{"Pod":' + POD + b',"NodeNames":null}') == b""
    assert not wire.is_followed_by(b'{"NodeNames":["n1"]}', b"", "n1")


def test_prioritize_reply_is_a_bare_array_with_integers() -> None:
    """One node is named: those that are not score 0. A score with a decimal point would not decode in Go."""
    assert wire.prioritize_reply("n1", 10) == b'[{"Host":"n1","Score":10}]'
    assert wire.prioritize_reply(None, 10) == b"[]"


def test_bind_in_both_directions() -> None:
    """The Go names of bind have their own spelling of UID."""
    call = wire.read_bind(b'{"PodName":"p","PodNamespace":"team","PodUID":"u1","Node":"n1"}')

    assert (call.pod_name, call.pod_namespace, call.pod_uid, call.node) == ("p", "team", "u1", "n1")
    assert wire.bind_reply("") == b'{"Error":""}'
    assert wire.bind_reply("why") == b'{"Error":"why"}'


@pytest.mark.parametrize("missing", ["PodName", "PodNamespace", "PodUID", "Node"])
def test_bind_needs_every_name(missing: str) -> None:
    """A bind without a pod, its uid or a node is refused before anything is written, and so is a name that would lead
    to another path of the API."""
    whole = {"PodName": "p", "PodNamespace": "team", "PodUID": "u1", "Node": "n1"}
    path = [{**whole, missing: "../x"}] if missing != "PodUID" else []

    for broken in ({**whole, missing: ""}, {k: v for k, v in whole.items() if k != missing}, *path):
        with pytest.raises(wire.MalformedCall):
            wire.read_bind(json.dumps(broken).encode())


@pytest.mark.parametrize(
    ("victims", "expected"),
    [
        (b"null", None),
        (b"{}", {}),
        (b'{"n1":{"Pods":null,"NumPDBViolations":0}}', {"n1": None}),
        (b'{"n1":{"Pods":[],"NumPDBViolations":0}}', {"n1": []}),
        (b'{"n1":{"Pods":[{"UID":"u7"}],"NumPDBViolations":2}}', {"n1": ["u7"]}),
    ],
    ids=["null", "no node", "null victims", "no victims", "one victim"],
)
def test_preempt_arguments_in_every_form(victims: bytes, expected: dict[str, list[str] | None] | None) -> None:
    """Nodes may come without victims, as newer schedulers send them."""
    call = wire.read_preempt(b'{"Pod":' + POD + b',"NodeNameToVictims":null,"NodeNameToMetaVictims":' + victims + b"}")

    found = call.node_name_to_meta_victims
    assert found is None or expected is not None
    assert expected == (
        None
        if found is None
        else {name: None if v.pods is None else [pod.uid for pod in v.pods] for name, v in found.items()}
    )


def test_preempt_reply_keeps_the_victims() -> None:
    """The reply is always in the form with uids alone, and carries the count of violated budgets back."""
    call = wire.read_preempt(
        b'{"Pod":' + POD + b',"NodeNameToMetaVictims":{"n1":{"Pods":[{"UID":"u7"}],"NumPDBViolations":2}}}'
    )

    assert wire.preempt_reply(call.node_name_to_meta_victims or {}) == (
        b'{"NodeNameToMetaVictims":{"n1":{"Pods":[{"UID":"u7"}],"NumPDBViolations":2}}}'
    )
