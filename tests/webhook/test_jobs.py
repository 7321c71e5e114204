"""Templates of Jobs are completed like their pods, so that quotas on templates count GPUs."""

import json
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.claims import GpuClaim
from webhook.errors import MalformedPod
from webhook.jobs import TEMPLATE, complete_template
from webhook.mutation import mutate
from webhook.pods import decode_pod, decode_template
from webhook.requests import ClaimLookup, ClaimMissing, ClaimUnavailable, Defaults
from webhook.review import Denial, Mutation, User

GPU = names.GPU_RESOURCE


def claim(**spec: Any) -> GpuClaim:
    body = {"metadata": {"name": "two", "uid": "claim-uid"}, "spec": {"devices": {"count": 2}, **spec}}
    return GpuClaim.model_validate(body)


def job(*containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a Job whose template names the claim `two`."""
    made = containers or ({"name": "main"},)
    metadata = {"annotations": {names.CLAIM: "two", **(annotations or {})}}
    return {"spec": {"template": {"metadata": metadata, "spec": {"containers": list(made), **spec}}}}


def decided(body: dict[str, Any], *, lookup: ClaimLookup | None = None, is_new: bool = True) -> Mutation | Denial:
    template = decode_template(json.dumps(body).encode())
    defaults = Defaults()
    found = lookup or claim()
    return complete_template(template, namespace="team", claim=found, defaults=defaults, is_new=is_new)


def completed(body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the Job as the webhook leaves it."""
    decision = decided(body, **options)
    assert isinstance(decision, Mutation), decision
    return patched(body, decision.operations)


def patched(body: dict[str, Any], operations: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Apply the add and remove operations of a JSON patch."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = copy
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if operation["op"] == "remove":
            del place[last]
        elif isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        else:
            place[last] = operation["value"]
    return copy


def template_of(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["spec"]["template"]
    return found


def test_the_template_shows_what_its_pods_will_ask_for() -> None:
    """A quota that counts requests of the template counts the claim's GPUs."""
    template = template_of(completed(job()))

    assert template["spec"]["containers"][0]["resources"] == {"limits": {GPU: "2"}, "requests": {GPU: "2"}}
    assert template["spec"]["schedulerName"] == names.SCHEDULER_NAME


def test_a_gang_s_template_carries_its_gate_and_its_name() -> None:
    """Whoever reads the template sees that its pods start together."""
    template = template_of(completed(job(), lookup=claim(gangRef="train")))

    assert template["metadata"]["annotations"][names.GANG] == "train"
    assert template["spec"]["schedulingGates"] == [{"name": names.GANG_GATE}]


@pytest.mark.parametrize("kind", ["claim-uid", "allocated"])
def test_what_only_a_pod_can_carry_stays_out_of_the_template(kind: str) -> None:
    """A claim that is made anew gives its uid to pods that come later; forged allocations are for the pod's review."""
    template = template_of(completed(job(annotations={f"gpu.scheduling/{kind}": "x"})))

    assert template["metadata"]["annotations"] == {names.CLAIM: "two", f"gpu.scheduling/{kind}": "x"}


CONTAINERS = [
    pytest.param([{"name": "main"}], {}, id="one"),
    pytest.param([{"name": "main"}, {"name": "side"}], {}, id="both-see-all"),
    pytest.param([{"name": "a", "resources": {"limits": {GPU: "2"}}}, {"name": "b"}], {}, id="one-asks"),
    pytest.param(
        [{"name": "a", "resources": {"limits": {GPU: "1"}}}, {"name": "b", "resources": {"limits": {GPU: "1"}}}],
        {},
        id="a-split",
    ),
    pytest.param(
        [{"name": "main", "env": [{"name": "A", "value": "b"}]}], {"initContainers": [{"name": "init"}]}, id="with-init"
    ),
]


@pytest.mark.parametrize(("containers", "spec"), CONTAINERS)
def test_pods_of_a_completed_template_are_what_pods_of_the_bare_one_would_be(
    containers: list[dict[str, Any]], spec: dict[str, Any]
) -> None:
    """Who sees which GPUs does not depend on whether the template was completed first."""

    def pod_of(body: dict[str, Any]) -> dict[str, Any]:
        pod = {"metadata": template_of(body)["metadata"], "spec": template_of(body)["spec"]}
        parsed = decode_pod(json.dumps(pod).encode())
        decision = mutate(parsed, namespace="team", user=User(), claim=claim(), defaults=Defaults())
        assert isinstance(decision, Mutation)
        return patched(pod, decision.operations)

    bare = job(*containers, **spec)

    assert pod_of(completed(bare)) == pod_of(bare)


@pytest.mark.parametrize(("containers", "spec"), CONTAINERS)
def test_a_completed_template_is_left_alone(containers: list[dict[str, Any]], spec: dict[str, Any]) -> None:
    """The second round of a reinvocation, and every later write, changes nothing and is not refused."""
    body = completed(job(*containers, **spec))

    assert decided(body) == Mutation()
    assert decided(body, is_new=False) == Mutation()


@pytest.mark.parametrize(
    ("lookup", "code", "fragment"),
    [
        pytest.param(ClaimMissing(), 403, "does not exist", id="missing"),
        pytest.param(ClaimUnavailable(), 503, "try again", id="nobody-to-ask"),
    ],
)
def test_a_claim_that_nobody_knows_is_refused(lookup: ClaimLookup, code: int, fragment: str) -> None:
    """Its GPUs could not be counted; the message says what to do."""
    decision = decided(job(), lookup=lookup)

    assert isinstance(decision, Denial)
    assert decision.code == code
    assert fragment in decision.message


def test_a_claim_that_comes_later_is_refused() -> None:
    """A suspended Job may still change its annotations, but not its containers: its GPUs would not be counted."""
    decision = decided(job(), is_new=False)

    assert isinstance(decision, Denial)
    assert "create the Job anew" in decision.message


def test_a_sum_that_the_claim_contradicts_is_refused() -> None:
    """What the pod would be refused for is told before a quota is taken."""
    decision = decided(job({"name": "main", "resources": {"limits": {GPU: "3"}}}))

    assert isinstance(decision, Denial)
    assert "make the sums equal" in decision.message


@pytest.mark.parametrize(
    "body", [b"null", b"[]", b"{}", b'{"spec":{"template":{}}}', b'{"spec":{"template":{"spec":1}}}']
)
def test_what_is_no_job_is_a_fault(body: bytes) -> None:
    """The server answers 400, and the API server goes by the failure policy."""
    with pytest.raises(MalformedPod):
        decode_template(body)


def test_every_operation_stays_inside_the_template() -> None:
    """Nothing of the Job itself, such as its switch, is ever touched."""
    decision = decided(job(), lookup=claim(gangRef="train"))

    assert isinstance(decision, Mutation)
    assert decision.operations
    assert all(operation["path"].startswith(f"{TEMPLATE}/") for operation in decision.operations)
    assert msgspec.json.encode(decision.operations)
