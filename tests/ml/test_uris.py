"""URIs of models and checkpoints: formats, path escapes, addresses inside the cluster."""

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ml.attributes import ModelRegistry
from atoll.ml.policy import MlPolicy
from atoll.ml.uris import (
    host_of,
    is_public,
    is_trusted_checkpoint,
    refuse_addresses,
    refuse_checkpoint_uri,
    refuse_model_uri,
)
from tests.ml.special_addresses import CARRIERS, SPECIAL

OPEN = MlPolicy()

MODELS = (
    ("hf://bert-base", ModelRegistry.HUGGINGFACE),
    ("hf://org/name", ModelRegistry.HUGGINGFACE),
    ("hf://org/name@main", None),
    ("hf://org/name@refs/pr/1", None),
    ("mlflow://mlflow.example.com/name/3", ModelRegistry.MLFLOW),
    ("mlflow://mlflow.example.com:5000/name/Production", None),
    ("wandb://entity/project/model:v3", ModelRegistry.WANDB),
    ("wandb://entity/project/model", None),
    ("s3://bucket/path/", ModelRegistry.S3),
    ("s3://bucket/path/model.safetensors", ModelRegistry.S3),
    ("gs://bucket_1/path/", ModelRegistry.GCS),
    ("https://models.example.com/llama/7b.gguf", ModelRegistry.CUSTOM),
    ("oci://registry.example.com/models/llama", None),
    ("https://93.184.216.34/model", None),
    ("s3://bucket/a%20name/", None),
    ("s3://bucket/".ljust(1024, "a"), None),
)


@pytest.mark.parametrize(("uri", "registry"), MODELS)
def test_uri_of_a_model_in_a_public_place_is_taken(uri: str, registry: ModelRegistry | None) -> None:
    """Each form of the reference, with and without the registry beside it."""
    assert refuse_model_uri(uri, registry, OPEN) is None
    assert refuse_model_uri(uri, None, OPEN) is None


CLIMBS = (
    "s3://bucket/../other/",
    "s3://bucket/a/..",
    "s3://bucket/./a/",
    "s3://bucket/%2e%2e/other/",
    "s3://bucket/%2E./other/",
    "s3://bucket/%252e%252e/other/",
    "s3://bucket/a%2f..%2fb/",
    "s3://bucket/a//b/",
    "s3://bucket/..\\other/",
    "s3://bucket/%5c..%5c/",
    "s3://bucket/a%00b/",
    "s3://bucket/a?versionId=1",
    "s3://bucket/a#b",
    "s3://bucket/a b/",
    "s3://bucket/\u2025/",
    "s3://bucket/".ljust(1025, "a"),
)
MALFORMED = (
    "",
    "llama",
    "/models/llama",
    "hf:org/name",
    "HF://org/name",
    "hf://",
    "hf://a/b/c",
    "hf://org/name@",
    "mlflow://server",
    "mlflow://mlflow.example.com/name",
    "wandb://entity/model",
    "s3://b/",
    "s3://UPPER/x/",
    "s3://user:pass@bucket/x/",
)
INSIDE = (
    "https://localhost/model",
    "https://127.0.0.1/model",
    "https://127.1/model",
    "https://2130706433/model",
    "https://0x7f000001/model",
    "https://0x7f.0.0.1/model",
    "https://0177.0.0.1/model",
    "https://0/model",
    "https://10.0.0.5/model",
    "https://172.16.0.1/model",
    "https://192.168.1.1/model",
    "https://100.64.0.1/model",
    "https://169.254.169.254/latest/meta-data",
    "https://169.254.169.254./latest/meta-data",
    "https://metadata.google.internal/computeMetadata",
    "https://[::1]/model",
    "https://[fd00:ec2::254]/model",
    "https://[fe80::1]/model",
    "https://[::ffff:10.0.0.1]/model",
    "https://[64:ff9b::a00:1]/model",
    "https://[2002:a00:1::]/model",
    "https://kubernetes/api",
    "https://kubernetes.default.svc/api",
    "https://kubernetes.default.svc.cluster.local/api",
    "https://kubernetes.default.svc.example/api",
    "https://registry.corp.internal/model",
    "https://printer.local/model",
    "https://models.example.com@10.0.0.5/model",
    "https://user:secret@models.example.com/model",
    "https://models.example.com:99999/model",
    "https://models.example.com:x/model",
    "https://[::1/model",
    "https:///model",
    "mlflow://10.0.0.5/name/3",
    "mlflow://user@mlflow.example.com/name/3",
)
OTHER_SCHEMES = (
    "file:///etc/passwd",
    "gopher://x.example.com/",
    "dict://x.example.com/",
    "jar://x.example.com/a",
    "data://x",
)


@pytest.mark.parametrize("uri", [*CLIMBS, *MALFORMED, *INSIDE, *OTHER_SCHEMES])
def test_uri_that_climbs_hides_or_leads_inside_is_refused(uri: str) -> None:
    """Traversal, odd forms, addresses in any disguise, names of the cluster's own network, schemes of no registry."""
    problem = refuse_model_uri(uri, None, OPEN)

    assert problem is not None
    assert problem.limit.startswith("must")
    assert problem.hint


def test_host_that_administrators_list_may_be_inside() -> None:
    """A registry in the cluster is allowed by name, by name and port, or by address; its neighbours are not."""
    policy = MlPolicy(hosts=("mlflow.ml.svc", "10.0.0.5"))

    assert refuse_model_uri("mlflow://mlflow.ml.svc:5000/name/3", None, policy) is None
    assert refuse_model_uri("https://10.0.0.5/model", None, policy) is None
    assert refuse_model_uri("https://10.0.0.6/model", None, policy) is not None
    assert refuse_model_uri("https://evil.mlflow.ml.svc/model", None, policy) is not None


@pytest.mark.parametrize(
    "uri",
    ["s3://bucket/", "s3://bucket/run/", "gs://bucket/run/", "az://container/run/", "file:///checkpoints/run/",
     "az://container@account.dfs.core.windows.net/run/"],
)  # fmt: skip
def test_place_of_checkpoints_is_taken(uri: str) -> None:
    """The four schemes, with the slash at the end."""
    assert refuse_checkpoint_uri(uri, OPEN) is None


@pytest.mark.parametrize(
    "uri",
    ["s3://bucket", "s3://bucket/run", "file://checkpoints/", "file://host/checkpoints/", "https://x.example.com/run/",
     "hf://org/name/", "az://container@evil.example.com/run/", "file:///checkpoints/../etc/", *CLIMBS],
)  # fmt: skip
def test_place_of_checkpoints_that_is_open_or_elsewhere_is_refused(uri: str) -> None:
    """No slash at the end, another scheme, another host, a way out."""
    assert refuse_checkpoint_uri(uri, OPEN) is not None


def test_checkpoints_are_kept_and_restored_below_allowed_prefixes_alone() -> None:
    """A place whose name only begins like an allowed one is another place."""
    policy = MlPolicy(checkpoint_prefixes=("s3://checkpoints/team-a/",))

    assert refuse_checkpoint_uri("s3://checkpoints/team-a/run/", policy) is None
    assert is_trusted_checkpoint("s3://checkpoints/team-a/run/step-7", policy)
    for uri in (
        "s3://checkpoints/team-a-b/run/",
        "s3://checkpoints/",
        "file:///team-a/",
        "s3://checkpoints/team-a/../b/",
    ):
        assert refuse_checkpoint_uri(uri, policy) is not None
        assert not is_trusted_checkpoint(uri, policy)
    with pytest.raises(ValueError, match="no slash at its end"):
        MlPolicy(checkpoint_prefixes=("s3://checkpoints/team-a",))


ADDRESSES: dict[str, tuple[tuple[str, ...], bool]] = {
    "a public address": (("93.184.216.34",), True),
    "public addresses of both kinds": (("93.184.216.34", "2606:2800:220:1::1"), True),
    "a public and an inner one": (("93.184.216.34", "10.0.0.5"), False),
    "the metadata service": (("169.254.169.254",), False),
    "loopback": (("::1",), False),
    "the address of nobody": (("0.0.0.0",), False),
    "a group": (("224.0.0.1",), False),
    "an inner address in another's clothes": (("::ffff:192.168.0.1",), False),
    "an address behind a gateway": (("64:ff9b::c0a8:1",), False),
    "an address with a zone": (("fe80::1%eth0",), False),
    "no address": ((), False),
    "no address but words": (("localhost",), False),
}


@pytest.mark.parametrize(("addresses", "allowed"), ADDRESSES.values(), ids=ADDRESSES)
def test_name_that_resolves_to_the_inside_is_refused(addresses: tuple[str, ...], allowed: bool) -> None:
    """What a look-up found is judged before anybody connects; one inner address refuses the host."""
    problem = refuse_addresses("models.example.com", addresses, OPEN)

    assert (problem is None) == allowed


def test_listed_host_may_resolve_to_the_inside() -> None:
    """Administrators list hosts, or the addresses that they lead to."""
    assert refuse_addresses("mlflow.ml.svc", ("10.0.0.5",), MlPolicy(hosts=("mlflow.ml.svc",))) is None
    assert refuse_addresses("models.example.com", ("10.0.0.5",), MlPolicy(hosts=("10.0.0.5",))) is None
    assert refuse_addresses("models.example.com", ("10.0.0.5", "10.0.0.6"), MlPolicy(hosts=("10.0.0.5",))) is not None


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        ("https://models.example.com:8443/x", "models.example.com"),
        ("https://[2606:2800::1]:8443/x", "2606:2800::1"),
        ("mlflow://mlflow.example.com/n/1", "mlflow.example.com"),
        ("hf://org/name", ""),
        ("s3://bucket/x/", ""),
        ("https://a/../b", ""),
    ],
)
def test_host_to_look_up_is_told(uri: str, host: str) -> None:
    """Buckets and hubs have no host of the user's choice."""
    assert host_of(uri) == host


@given(st.sampled_from(SPECIAL).flatmap(lambda network: st.ip_addresses(network=network)))
def test_no_inner_address_is_public(address: IPv4Address | IPv6Address) -> None:
    """No special purpose, however it is drawn; an IPv4 address is none in any IPv6 address that carries it either."""
    assert not is_public(str(address))
    if isinstance(address, IPv4Address):
        for carrier in CARRIERS:
            assert not is_public(carrier.format(*struct.unpack("!HH", address.packed)))


@given(st.ip_addresses())
def test_what_python_knows_as_inner_is_not_public(address: IPv4Address | IPv6Address) -> None:
    """The standard library's table is another one, and older."""
    assert not is_public(str(address)) or address.is_global


@given(st.text("s3hf:/.%2eE5cab@[]-_", max_size=40))
def test_no_text_raises_and_none_that_climbs_is_taken(text: str) -> None:
    """Anything may be handed in; nothing with a segment .. comes through."""
    taken = refuse_model_uri(text, None, OPEN) is None or refuse_checkpoint_uri(text, OPEN) is None

    assert not taken or ".." not in text.replace("%2e", ".").replace("%2E", ".").split("/")


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("s3://b/x/", "lower-case letters, digits, dots and hyphens"),
        ("s3://my_bucket/run/", "lower-case letters, digits, dots and hyphens"),
        ("gs://B/x/", "hyphens and underscores"),
        ("s3:///x/", "3 to 63"),
    ],
)
def test_a_bucket_that_cannot_be_is_told_with_what_its_name_may_be(uri: str, told: str) -> None:
    """The form of the URI is right, so a message about the form would not help."""
    problem = refuse_checkpoint_uri(uri, MlPolicy())

    assert problem is not None
    assert told in problem.limit
