"""The ledger of GPU time against a second-by-second account, over random lives of GPUs."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.jobs.costs.spans import HELD, NOBODY, GpuAccount, GpuFact, GpuSpan, OpenSpan, TimeUse, advance
from atoll.jobs.costs.usage import UsageKey, sum_usage

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
GAP_SECONDS = 5
GPUS = ("g0", "g1", "g2")
NOT_HELD = (TimeUse.FREE, TimeUse.STRANDED, TimeUse.UNAVAILABLE)


def at(second: int) -> datetime:
    """Return a second after START."""
    return START + timedelta(seconds=second)


def held_fact(gpu: str, use: TimeUse, pod: str, since: int | None) -> GpuFact:
    """Return a GPU that a pod holds."""
    account = GpuAccount("acme", "vision", "ann", "tenant-acme", f"job-{pod}", pod)
    return GpuFact(
        gpu, "n1", "nvidia-h100", use, account, price_micros=3_600_000, held_since=None if since is None else at(since)
    )


@st.composite
def lives(draw: st.DrawFn) -> list[dict[str, GpuFact]]:
    """Return what is true of every GPU at each second; a hold has its Lease's creation."""
    seconds = draw(st.integers(2, 40))
    truth: list[dict[str, GpuFact]] = [{} for _ in range(seconds)]
    for gpu in GPUS:
        second, pods = draw(st.integers(0, 3)), 0
        while second < seconds:
            length = min(draw(st.integers(1, 12)), seconds - second)
            kind = draw(st.sampled_from(("absent", "open", "held")))
            pods += 1
            for offset in range(length):
                if kind == "held":
                    use = draw(st.sampled_from(sorted(HELD)))
                    truth[second + offset][gpu] = held_fact(gpu, use, f"{gpu}-{pods}", second)
                elif kind == "open":
                    truth[second + offset][gpu] = GpuFact(gpu, "n1", "nvidia-h100", draw(st.sampled_from(NOT_HELD)))
            second += length
    return truth


def recorded(truth: list[dict[str, GpuFact]], looks: list[int]) -> list[GpuSpan]:
    """Return the spans of a ledger that looks at these seconds, what goes on until the last one included."""
    spans: dict[str, OpenSpan] = {}
    ended: list[GpuSpan] = []
    seen: datetime | None = None
    for second in looks:
        now = at(second)
        changes = advance(spans, truth[second], seen=seen, now=now, gap_seconds=GAP_SECONDS)
        ended += changes.ended
        if seen is None or now > seen:
            for gpu in {one.fact.gpu for one in changes.begun} | (spans.keys() - truth[second].keys()):
                spans.pop(gpu, None)
            spans |= {one.fact.gpu: one for one in changes.begun}
            seen = now
    assert seen is not None
    return ended + [one.until(seen) for one in spans.values() if one.started < seen]


def expected(truth: list[dict[str, GpuFact]], looks: list[int]) -> dict[tuple[str, int], GpuFact]:
    """Return what must stand at each second of each GPU, one second at a time, by the rules alone."""
    account: dict[tuple[str, int], GpuFact] = {}
    for before, after in pairwise(looks):
        for gpu, was in truth[before].items():
            fact = truth[after].get(gpu)
            for second in range(before, after):
                told = second_of(was, fact, second, after - before)
                if told is not None:
                    account[gpu, second] = told
    return account


def second_of(was: GpuFact, fact: GpuFact | None, second: int, apart: int) -> GpuFact | None:
    """Return what one second between two looks counts as."""
    is_same = fact is not None and was.account == fact.account and {was.use, fact.use} <= HELD
    if is_same or (fact is None and apart <= GAP_SECONDS):
        return was
    if fact is None:
        return None
    is_begun = fact.use in HELD and fact.held_since is not None and fact.held_since <= at(second)
    if is_begun:
        return fact
    return was if apart <= GAP_SECONDS else replace(was, use=TimeUse.UNSEEN, account=NOBODY)


@given(lives(), st.data())
def test_spans_are_the_account_of_every_second(truth: list[dict[str, GpuFact]], data: st.DataObject) -> None:
    """Whenever somebody looks, every second of every GPU is in exactly one span, and says what the rules say."""
    looks = sorted({0, *data.draw(st.lists(st.integers(0, len(truth) - 1)))})
    told: dict[tuple[str, int], GpuFact] = {}
    for span in recorded(truth, looks):
        for second in range(int((span.start - START).total_seconds()), int((span.end - START).total_seconds())):
            assert (span.fact.gpu, second) not in told, "two spans of one second"
            told[span.fact.gpu, second] = span.fact
    wanted = expected(truth, looks)

    assert told.keys() == wanted.keys()
    for key, fact in wanted.items():
        assert (told[key].use, told[key].account) == (fact.use, fact.account), key


@given(lives(), st.data())
def test_nobody_pays_for_a_second_that_was_not_theirs(truth: list[dict[str, GpuFact]], data: st.DataObject) -> None:
    """A hold is charged for no second before its Lease existed, and after its end at most until the next look."""
    looks = sorted({0, *data.draw(st.lists(st.integers(0, len(truth) - 1)))})
    for span in recorded(truth, looks):
        if span.fact.use not in HELD:
            continue
        for second in range(int((span.start - START).total_seconds()), int((span.end - START).total_seconds())):
            really = truth[second].get(span.fact.gpu)
            if really is None or really.account != span.fact.account:
                next_look = min(look for look in looks if look > second)
                assert next_look - second <= GAP_SECONDS
                assert any(
                    truth[look].get(span.fact.gpu) is not None
                    and truth[look][span.fact.gpu].account == span.fact.account
                    for look in looks
                    if look <= second
                )


@given(lives(), st.data())
def test_sums_are_the_capacity_that_existed(truth: list[dict[str, GpuFact]], data: st.DataObject) -> None:
    """Of a GPU that is always there, the sum of all states is the time looked at; every grouping has the same sum."""
    for second, facts in enumerate(truth):
        for gpu in GPUS:
            facts.setdefault(gpu, GpuFact(gpu, "n1", "nvidia-h100", TimeUse.FREE))
        assert second < len(truth)
    looks = sorted({0, *data.draw(st.lists(st.integers(0, len(truth) - 1)))})
    spans = recorded(truth, looks)
    whole = sum_usage(spans, START, at(len(truth)), ()).get(())
    total = whole.gpu_seconds() if whole is not None else 0

    assert total == looks[-1] * len(GPUS)
    for keys in ((UsageKey.TENANT,), (UsageKey.MODEL, UsageKey.JOB)):
        assert sum(one.gpu_seconds() for one in sum_usage(spans, START, at(len(truth)), keys).values()) == total
    held = whole.gpu_seconds(*HELD) if whole is not None else 0
    assert (whole.cost_micros if whole is not None else 0) == held * 1000  # 3.60 USD an hour is 1000 micros a second


def test_a_clock_set_back_records_nothing_until_it_has_caught_up() -> None:
    """Looks at or before the last one change nothing; the next later one goes on where it stopped."""
    fact = held_fact("g0", TimeUse.USED, "p", 0)
    spans = {"g0": OpenSpan(fact, at(0))}
    back = advance(spans, {}, seen=at(10), now=at(4), gap_seconds=GAP_SECONDS)
    later = advance(spans, {}, seen=at(10), now=at(12), gap_seconds=GAP_SECONDS)

    assert (back.ended, back.begun) == ((), ())
    assert [(span.start, span.end) for span in later.ended] == [(at(0), at(12))]
