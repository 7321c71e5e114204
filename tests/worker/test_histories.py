"""Any history of starts, saves, crashes and damage agrees with a simple model, a list."""

from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.worker.faults import FaultyStore, Killed
from worker import Checkpoints, Fenced, Version
from worker.records import committed
from worker.stores import ObjectStore

JOB, PLACE = "job", "az://container/run/"


def die() -> None:
    """End the process of the history, without a trace."""
    raise Killed


class Histories(RuleBasedStateMachine):
    """`whole`: what a resume may come to, oldest first: version and weights. `doubtful`: a commit nobody heard of."""

    @initialize(kept=st.integers(1, 4))
    def begin(self, kept: int) -> None:
        self.cloud = MemoryFileSystem(skip_instance_cache=True)
        self.cloud.store, self.cloud.pseudo_dirs = {}, [""]
        self.store = ObjectStore(self.cloud, "container/run/")
        self.kept = kept
        self.whole: dict[Version, bytes] = {}
        self.damaged: set[Version] = set()
        self.old: Checkpoints | None = None
        self.deaths = 0
        self.start()

    def checkpoints(self) -> Checkpoints:
        self.faulty = FaultyStore(self.store, at=0, when="before", act=die)
        return Checkpoints(self.faulty, job_id=JOB, uri=PLACE, kept=self.kept)

    def expire(self) -> None:
        """The oldest go, damaged ones among them; the newest n stay."""
        everything = sorted({*self.whole, *self.damaged}, reverse=True)
        for version in everything[self.kept :]:
            self.whole.pop(version, None)
            self.damaged.discard(version)

    @rule()
    def start(self) -> None:
        """A new pod begins; the one before may still be there."""
        self.old, self.current = getattr(self, "current", None), self.checkpoints()
        with self.current.restore() as restored:
            newest = max(self.whole, default=None)
            assert (restored is None) == (newest is None), "from zero only where nothing whole exists"
            if restored is not None and newest is not None:
                assert restored.record.version == newest
                assert restored.paths["model"].read_bytes() == self.whole[newest]
                assert restored.next_step == newest.step + 1
            self.step = 0 if restored is None else restored.next_step

    @rule()
    def save(self) -> None:
        """A step is made and saved."""
        version = Version(self.current.generation, self.step)
        weights = b"weights of %d of %d" % (version.step, version.generation)
        self.current.save(self.step, {"model": weights, "optimizer": b"o"})
        self.whole[version] = weights
        self.damaged.discard(version)
        self.expire()
        self.deaths = 0
        self.step += 1

    @rule(call=st.integers(1, 14), when=st.sampled_from(["before", "after", "half"]))
    def die_while_saving(self, call: int, when: str) -> None:
        """The process is killed in the midst of it, or comes through; then a new pod begins."""
        self.faulty.calls, self.faulty.at, self.faulty._when = 0, call, when
        version = Version(self.current.generation, self.step)
        weights = b"weights of %d of %d" % (version.step, version.generation)
        before = set(committed(self.store.list_sizes()))
        try:
            self.current.save(self.step, {"model": weights, "optimizer": b"o"})
        except Killed:
            self.deaths += 1
            there = set(committed(self.store.list_sizes()))
            if version in there:
                self.whole[version] = weights
                gone = {*self.whole, *self.damaged} - there
                assert gone <= set(sorted({*self.whole, *self.damaged})[: -self.kept]), "only the oldest may be gone"
                self.whole = {one: held for one, held in self.whole.items() if one in there}
                self.damaged &= there
            else:
                assert there == before, "nothing goes before the new one is there"
        else:
            self.faulty.at = 0  # it came through: nothing kills it later, when another pod has begun
            self.whole[version] = weights
            self.expire()
            self.deaths = 0
        self.start()

    @precondition(lambda self: self.old is not None)
    @rule()
    def an_old_pod_tries(self) -> None:
        """Whoever began before is refused."""
        try:
            self.old.save(10_000, {"model": b"old"})
        except Fenced:
            return
        raise AssertionError("an old pod has saved")

    @precondition(lambda self: self.whole)
    @rule(part=st.sampled_from(["record", "model", "optimizer"]), cut=st.booleans(), data=st.data())
    def damage(self, part: str, cut: bool, data: st.DataObject) -> None:
        """A disk or a hand damages one checkpoint."""
        version = data.draw(st.sampled_from(sorted(self.whole)))
        key = version.record_key if part == "record" else version.part_key(part)
        content = bytearray(self.store.read(key))
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        self.store.write(key, lambda file: file.write(content[:-1] if cut else content))
        del self.whole[version]
        self.damaged.add(version)

    @invariant()
    def nothing_piles_up(self) -> None:
        """The count is kept, but for the one that each death left behind since the last save, and so are leftovers."""
        keys = self.store.list_sizes()
        assert len(committed(keys)) <= self.kept + max(1, self.deaths)
        folders = {Path(key).parts[1] for key in keys if key.startswith("weights/")}
        assert len(folders) <= self.kept + 1 + self.current.generation


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestHistories = Histories.TestCase
