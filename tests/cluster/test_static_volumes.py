"""Static volumes for which members of a gang compete: a plan holds only if all find one, in whatever order."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster.objects import PersistentVolume, PersistentVolumeClaim, Pod, StorageClass
from atoll.cluster.static_volumes import static_clash
from atoll.cluster.volume_fit import Volumes
from tests.cluster.test_host_fit import HOSTNAME, node, pod
from tests.cluster.test_volume_fit import STATIC, claim, disk

NAMES = ("n1", "n2", "n3")
NODES = {name: node(name, labels={HOSTNAME: name}) for name in NAMES}


def reaching(name: str, nodes: list[str]) -> PersistentVolume:
    """Return a free volume that these nodes reach."""
    found = disk()
    row = {"key": HOSTNAME, "operator": "In", "values": nodes}
    reach = {"required": {"nodeSelectorTerms": [{"matchExpressions": [row]}]}}
    spec = {**msgspec.to_builtins(found.spec), "nodeAffinity": reach}
    body = {"metadata": {"name": name}, "spec": spec, "status": {"phase": "Available"}}
    return msgspec.convert(body, PersistentVolume)


def own_claim(name: str) -> PersistentVolumeClaim:
    """Return an unbound claim of the static class."""
    found = claim()
    return msgspec.structs.replace(found, metadata=msgspec.structs.replace(found.metadata, name=name))


def user(name: str) -> Pod:
    """Return a pod that uses the claim of its name."""
    return pod(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": name}}])


def all_find_one(wanted: list[frozenset[str]]) -> bool:
    """Tell whether each pod finds a volume whoever comes first and whichever it takes."""

    def ends_well(left: tuple[frozenset[str], ...], taken: frozenset[str]) -> bool:
        if not left:
            return True
        free = left[0] - taken
        return bool(free) and all(ends_well(left[1:], taken | {one}) for one in free)

    return all(ends_well(order, frozenset()) for order in itertools.permutations(wanted))


@given(
    homes=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
    volumes=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), max_size=5),
)
def test_a_plan_that_is_let_through_finds_volumes_in_every_order(homes: list[str], volumes: list[list[str]]) -> None:
    """And one whose members are alike, or have nothing to share, is refused only if some order fails."""
    claims = {("ml", f"c{number}"): own_claim(f"c{number}") for number in range(len(homes))}
    disks = {f"d{number}": reaching(f"d{number}", nodes) for number, nodes in enumerate(volumes)}
    known = Volumes(claims, disks, {"c": msgspec.convert({"metadata": {"name": "c"}, **STATIC}, StorageClass)})
    placed = [(user(f"c{number}"), NODES[home]) for number, home in enumerate(homes)]
    wanted = [frozenset(f"d{number}" for number, nodes in enumerate(volumes) if home in nodes) for home in homes]

    problem = static_clash(placed, known)
    fits = all_find_one(wanted)
    assert fits or problem
    if all(one == other or not one & other for one in wanted for other in wanted):
        assert fits == (not problem)
