"""The shipped webhook configuration: it never blocks certain requests, and it agrees with the code."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api import names
from controllers.webhook_certs import WEBHOOK_NAMES
from webhook.app import MUTATE_PATH
from webhook.claims import LOOKUP_SECONDS

FILE = Path(__file__).parents[2] / "deploy" / "webhook.yaml"


@pytest.fixture
def configuration() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return content


def named(configuration: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in configuration["webhooks"] if one["name"] == name)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def webhook(configuration: dict[str, Any]) -> dict[str, Any]:
    """The webhook for pods."""
    return named(configuration, "pods.gpu.scheduling")


@pytest.fixture
def jobs(configuration: dict[str, Any]) -> dict[str, Any]:
    """The webhook for Jobs."""
    return named(configuration, "jobs.gpu.scheduling")


def test_jobs_are_sent_only_where_a_namespace_asks_for_it(jobs: dict[str, Any], webhook: dict[str, Any]) -> None:
    """By a label, never from the namespaces that keep the cluster alive, and never for a subresource."""
    rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["jobs"]}

    assert jobs["rules"] == [{**rule, "scope": "Namespaced"}]
    assert jobs["namespaceSelector"]["matchLabels"] == {names.COMPLETE_JOBS: "true"}
    assert jobs["namespaceSelector"]["matchExpressions"] == webhook["namespaceSelector"]["matchExpressions"]


def test_jobs_without_a_claim_and_writes_that_ask_for_nothing_new_are_not_sent(jobs: dict[str, Any]) -> None:
    """The Job controller, a queue that resumes a Job, and Jobs of others never depend on the webhook."""
    names_a_claim, asks_anew = (condition["expression"] for condition in jobs["matchConditions"])

    assert f"'{names.CLAIM}' in object.spec.template" in names_a_claim
    assert asks_anew.startswith("oldObject == null ||")
    assert [key for key in names.USER_ANNOTATIONS if f"'{key}'" not in asks_anew] == []


def test_jobs_are_asked_about_as_pods_are(jobs: dict[str, Any], webhook: dict[str, Any]) -> None:
    """The same service, time and policies: a claimed Job of such a namespace waits as its pods would."""
    own = {"name", "rules", "namespaceSelector", "matchConditions"}

    assert {key: value for key, value in jobs.items() if key not in own} == {
        key: value for key, value in webhook.items() if key not in own
    }


def test_only_the_creation_of_pods_is_sent(webhook: dict[str, Any]) -> None:
    """No update, no subresource, no other kind depends on the webhook."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}

    assert webhook["rules"] == [{**rule, "scope": "Namespaced"}]


def test_the_namespaces_that_keep_the_cluster_alive_are_left_out(webhook: dict[str, Any]) -> None:
    """A dead webhook can keep neither the network plugin nor itself or an agent from starting."""
    (expression,) = webhook["namespaceSelector"]["matchExpressions"]

    assert expression == {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": ["kube-system", names.SYSTEM_NAMESPACE, names.HEARTBEAT_NAMESPACE],
    }


def test_it_fails_closed_for_the_pods_it_matches(webhook: dict[str, Any]) -> None:
    """Fail with conditions: pods with GPUs wait for the webhook, all others never notice."""
    assert webhook["failurePolicy"] == "Fail"
    assert webhook["sideEffects"] == "None"
    assert webhook["reinvocationPolicy"] == "IfNeeded"
    assert webhook["matchConditions"]


def test_it_is_called_last(configuration: dict[str, Any]) -> None:
    """Configurations are called in the order of their names."""
    assert configuration["metadata"]["name"] == names.WEBHOOK_CONFIGURATION
    assert names.WEBHOOK_CONFIGURATION.startswith("zz")


def test_the_answer_comes_before_the_api_server_gives_up(webhook: dict[str, Any]) -> None:
    """The one call that the webhook makes ends well within the time it has."""
    assert webhook["timeoutSeconds"] >= 2 * LOOKUP_SECONDS


def test_the_service_is_the_one_that_the_certificate_names(webhook: dict[str, Any]) -> None:
    """The API server verifies the certificate for `<service>.<namespace>.svc`."""
    service = webhook["clientConfig"]["service"]

    assert f"{service['name']}.{service['namespace']}.svc" in WEBHOOK_NAMES
    assert service["path"] == MUTATE_PATH
    assert "caBundle" not in webhook["clientConfig"]


def test_the_conditions_speak_of_every_name_that_concerns_atoll(webhook: dict[str, Any]) -> None:
    """A name that is added to the code and not here would let pods past the webhook."""
    (condition,) = webhook["matchConditions"]
    keys = (*names.USER_ANNOTATIONS, *names.OWN_ANNOTATIONS)

    assert [key for key in keys if f"'{key}'" not in condition["expression"]] == []
    assert all(f"('{prefix}' + c.name)" in condition["expression"] for prefix in names.OWN_ANNOTATION_PREFIXES)
    assert names.GPU_RESOURCE.startswith(f"{names.GROUP}/")
    assert names.MIG_RESOURCE_PREFIX.startswith(f"{names.GROUP}/")
    assert f"'{names.RUNTIME_CLASS}'" in condition["expression"]
    assert f"'{names.GANG_GATE}'" in condition["expression"]
