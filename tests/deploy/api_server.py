"""A client that sends requests to an API server under any identity, and the manifests of deploy/ as values."""

import base64
import http.client
import json
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
WAIT_SECONDS = 240.0


NODE_EXTRA = f"Impersonate-Extra-{quote('authentication.kubernetes.io/node-name', safe='')}"
SERVICE_ACCOUNTS = ("scheduler", "webhook", "agent", "controllers")


STRANGERS = {
    "admin": ("mallory", "system:masters"),
    "default-scheduler": ("system:kube-scheduler", "system:masters"),
    "static-pods": ("kubelet", "system:masters", "system:nodes"),
    "pod-collector": ("system:serviceaccount:kube-system:pod-garbage-collector", "system:masters"),
    "garbage-collector": ("system:serviceaccount:kube-system:generic-garbage-collector", "system:masters"),
    "namespace-controller": ("system:serviceaccount:kube-system:namespace-controller", "system:masters"),
}


def user_and_groups(identity: str) -> tuple[str, ...]:
    """Return whom the name of an identity means: a part of Atoll, `kubelet@NODE`, one of STRANGERS, or a plain user."""
    name, _, node = identity.partition("@")
    if name in SERVICE_ACCOUNTS:
        namespace = "atoll-nodes" if name == "agent" else "atoll-system"
        return f"system:serviceaccount:{namespace}:atoll-{name}", f"system:serviceaccounts:{namespace}"
    if name == "kubelet":
        return f"system:node:{node}", "system:nodes"
    return STRANGERS.get(name, (name, "system:authenticated"))


def impersonation(identity: str) -> Iterator[tuple[str, str]]:
    """Yield the headers by which the administrator acts as `identity`; `agent@NODE` has a token bound to that node."""
    if not identity:
        return
    user, *groups = user_and_groups(identity)
    yield "Impersonate-User", user
    for group in groups:
        yield "Impersonate-Group", group
    name, _, node = identity.partition("@")
    if name == "agent" and node:
        yield NODE_EXTRA, node


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """Status and message of the API server."""

    status: int
    message: str

    @property
    def is_accepted(self) -> bool:
        """Tell whether the request went through."""
        return self.status < 300


class RealApi:
    """Requests under an identity, over the administrator's credentials."""

    def __init__(self, kubeconfig: Path, *, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Read server, authority and credentials of the current context; a token or a client certificate."""
        self._timeout_seconds = timeout_seconds
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config["users"], context["user"])["user"]
        self._host = cluster["server"].removeprefix("https://")
        self._headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        self._tls = ssl.create_default_context()
        if cluster.get("insecure-skip-tls-verify"):
            self._tls = ssl._create_unverified_context()
        with tempfile.TemporaryDirectory() as folder:
            if authority := _file(cluster, "certificate-authority", folder):
                self._tls.load_verify_locations(authority)
            if certificate := _file(user, "client-certificate", folder):
                self._tls.load_cert_chain(certificate, _file(user, "client-key", folder))

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        identity: str = "",
        content_type: str = "application/json",
        dry_run: bool = False,
    ) -> ApiAnswer:
        """Send a request; an error of the API server is an answer too."""
        separator = "&" if "?" in path else "?"
        data = None if body is None else json.dumps(body).encode()
        connection = http.client.HTTPSConnection(self._host, context=self._tls, timeout=self._timeout_seconds)
        with closing(connection):
            connection.putrequest(method, f"{path}{separator}dryRun=All" if dry_run else path)
            for name, value in (*self._headers.items(), *impersonation(identity), ("Content-Type", content_type)):
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(data or b"")))
            connection.endheaders(data)
            response = connection.getresponse()
            text = response.read()
        return ApiAnswer(response.status, text.decode() if response.status < 300 else _message(text))

    def apply(self, manifest: Mapping[str, Any], *, path: str) -> ApiAnswer:
        """Create or change one object by server-side apply."""
        return self.send(
            "PATCH",
            f"{path}/{manifest['metadata']['name']}?fieldManager=tests&force=true",
            manifest,
            content_type="application/apply-patch+yaml",
        )

    def allows(self, identity: str, attributes: Mapping[str, str]) -> bool:
        """Ask the API server whether RBAC lets `identity` do that (a SubjectAccessReview)."""
        user, *groups = user_and_groups(identity)
        spec = {"user": user, "groups": groups, "resourceAttributes": dict(attributes)}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        answer = self.send("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        assert answer.status == 201, answer
        return bool(json.loads(answer.message)["status"]["allowed"])


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the entry of a kubeconfig's list that has that name."""
    return next(entry for entry in entries if entry["name"] == name)


def _file(section: Mapping[str, str], key: str, folder: str) -> str:
    """Return the path of a kubeconfig's file entry, written into `folder` where the data stand inline."""
    data = section.get(f"{key}-data")
    if not data:
        return section.get(key, "")
    path = Path(folder, key)
    path.touch(mode=0o600)
    path.write_bytes(base64.b64decode(data))
    return str(path)


def _message(body: bytes) -> str:
    """Return the message of a Status, or the text itself."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


PLURALS = {
    "ClusterRole": ("rbac.authorization.k8s.io/v1", "clusterroles"),
    "ClusterRoleBinding": ("rbac.authorization.k8s.io/v1", "clusterrolebindings"),
    "ConfigMap": ("v1", "configmaps"),
    "CustomResourceDefinition": ("apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "Namespace": ("v1", "namespaces"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    "RuntimeClass": ("node.k8s.io/v1", "runtimeclasses"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "ValidatingAdmissionPolicy": ("admissionregistration.k8s.io/v1", "validatingadmissionpolicies"),
    "ValidatingAdmissionPolicyBinding": ("admissionregistration.k8s.io/v1", "validatingadmissionpolicybindings"),
}


def collection(manifest: Mapping[str, Any]) -> str:
    """Return the path of the collection that a manifest belongs to."""
    version, plural = PLURALS[manifest["kind"]]
    root = "/api/v1" if version == "v1" else f"/apis/{version}"
    namespace = manifest["metadata"].get("namespace")
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


def manifests(*patterns: str) -> Iterator[dict[str, Any]]:
    """Yield the documents of the files under deploy/ that match, in order of file name."""
    for pattern in patterns:
        for path in sorted(DEPLOY.glob(pattern)):
            yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds; fail with `what` where it never does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.2)
