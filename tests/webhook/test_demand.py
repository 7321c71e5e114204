"""Names of claims that are looked up."""

import json

import pytest

from atoll.api import names
from webhook.pods import decode_pod
from webhook.requests import claim_name_of
from webhook.review import Denial


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("", id="empty"),
        pytest.param("Two", id="capitals"),
        pytest.param("../secrets", id="path"),
        pytest.param("a/b", id="slash"),
        pytest.param("two\n", id="newline"),
        pytest.param("a" * 254, id="too-long"),
        pytest.param("zwei-ü", id="not-ascii"),
    ],
)
def test_a_name_that_no_object_can_have_is_denied_without_a_lookup(name: str) -> None:
    """A hostile name never becomes part of a URL."""
    pod = {"metadata": {"annotations": {names.CLAIM: name}}, "spec": {"containers": []}}

    denial = claim_name_of(decode_pod(json.dumps(pod).encode()))

    assert isinstance(denial, Denial)
    assert denial.code == 400


@pytest.mark.parametrize("name", ["two", "a", "a.b-c", "a" * 253])
def test_a_possible_name_is_looked_up(name: str) -> None:
    """Every DNS subdomain may be the name of a claim."""
    pod = {"metadata": {"annotations": {names.CLAIM: name}}, "spec": {"containers": []}}

    assert claim_name_of(decode_pod(json.dumps(pod).encode())) == name
