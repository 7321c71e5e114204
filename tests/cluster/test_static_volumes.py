"""Static volumes for which members of a gang compete: a plan holds only if all find one, in whatever order."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster.objects import Pod
from atoll.cluster.static_volumes import members_by_static_volumes, static_clash
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim, StorageClass
from atoll.cluster.volume_fit import Volumes
from tests.cluster.test_host_fit import HOSTNAME, node, pod
from tests.cluster.test_volume_fit import STATIC, claim, disk

NAMES = ("n1", "n2", "n3")
NODES = {name: node(name, labels={HOSTNAME: name}) for name in NAMES}


def reaching(name: str, nodes: list[str], size: int = 20) -> PersistentVolume:
    """Return a free volume of a size in gibibytes that these nodes reach, or every node for none."""
    found = disk(size=f"{size}Gi")
    row = {"key": HOSTNAME, "operator": "In", "values": nodes}
    reach = {"required": {"nodeSelectorTerms": [{"matchExpressions": [row]}]}}
    spec = {**msgspec.to_builtins(found.spec), "nodeAffinity": reach if nodes else None}
    body = {"metadata": {"name": name}, "spec": spec, "status": {"phase": "Available"}}
    return msgspec.convert(body, PersistentVolume)


def own_claim(name: str, size: int = 10) -> PersistentVolumeClaim:
    """Return an unbound claim of the static class for a size in gibibytes."""
    found = claim(resources={"requests": {"storage": f"{size}Gi"}})
    return msgspec.structs.replace(found, metadata=msgspec.structs.replace(found.metadata, name=name))


def user(*claims: str) -> Pod:
    """Return a pod that uses these claims."""
    return pod(volumes=[{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims])


def cluster(claims: dict[str, int], disks: list[tuple[list[str], int]], *, namespace: str = "ml") -> Volumes:
    """Return claims with their sizes, and free disks, each with the nodes that reach it and its size."""
    known = {f"d{number}": reaching(f"d{number}", nodes, size) for number, (nodes, size) in enumerate(disks)}
    kind = msgspec.convert({"metadata": {"name": "c"}, **STATIC}, StorageClass)
    return Volumes({(namespace, name): own_claim(name, size) for name, size in claims.items()}, known, {"c": kind})


def all_find_one(wanted: list[frozenset[str]], sizes: dict[str, int]) -> bool:
    """Tell whether each claim finds a volume whoever comes first, and whichever of the smallest it takes."""

    def ends_well(left: tuple[frozenset[str], ...], taken: frozenset[str]) -> bool:
        if not left:
            return True
        free = left[0] - taken
        least = min((sizes[one] for one in free), default=0)
        return bool(free) and all(ends_well(left[1:], taken | {one}) for one in free if sizes[one] == least)

    return all(ends_well(order, frozenset()) for order in itertools.permutations(wanted))


@given(
    asking=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from((10, 30))), min_size=1, max_size=4),
    disks=st.lists(
        st.tuples(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), st.sampled_from((20, 40))),
        max_size=5,
    ),
)
def test_a_plan_that_is_let_through_finds_volumes_in_every_order(
    asking: list[tuple[str, int]], disks: list[tuple[list[str], int]]
) -> None:
    """And one whose nodes reach the same volumes, or have nothing to share, is refused only if some order fails."""
    known = cluster({f"c{number}": size for number, (_, size) in enumerate(asking)}, disks)
    placed = [(user(f"c{number}"), NODES[home]) for number, (home, _) in enumerate(asking)]
    sizes = {f"d{number}": size for number, (_, size) in enumerate(disks)}
    reached = {home: frozenset(f"d{n}" for n, (nodes, _) in enumerate(disks) if home in nodes) for home, _ in asking}
    wanted = [frozenset(one for one in reached[home] if sizes[one] >= least) for home, least in asking]

    problem = static_clash(placed, known)
    fits = all_find_one(wanted, sizes)
    assert fits or problem
    if all(one == other or not one & other for one in reached.values() for other in reached.values()):
        assert fits == (not problem)


SMALL, BIG = (["n1"], 20), (["n1"], 40)


@pytest.mark.parametrize(
    ("claims", "disks", "most"),
    [
        pytest.param({"a": 10}, [SMALL, BIG, (["n2"], 20)], 2, id="one each"),
        pytest.param({"a": 10, "b": 10}, [SMALL, SMALL, SMALL], 1, id="two each: the third volume is left"),
        pytest.param({"a": 10, "b": 10}, [SMALL], 0, id="too few for one"),
        pytest.param({"a": 10, "b": 30}, [BIG, SMALL], 1, id="a small one and a big one"),
        pytest.param({"a": 10, "b": 30}, [BIG, BIG, SMALL, SMALL], 2, id="two of each kind"),
        pytest.param({"a": 10, "b": 30}, [BIG, SMALL, SMALL, SMALL], 1, id="one big for all"),
    ],
)
def test_a_node_takes_as_many_members_as_find_volumes_for_all_their_claims(
    claims: dict[str, int], disks: list[tuple[list[str], int]], most: int
) -> None:
    """One whose plan fills the node clashes with nobody: a claim leaves larger volumes to those that need them."""
    known = cluster(claims, disks)

    assert (members_by_static_volumes(user(*claims), NODES, known) or {})["n1"] == most
    alike = cluster({f"{name}{n}": size for name, size in claims.items() for n in range(most)}, disks)
    placed = [(user(*(f"{name}{n}" for name in claims)), NODES["n1"]) for n in range(most)]
    assert static_clash(placed, alike) == ""
