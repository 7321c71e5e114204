"""Arithmetic of the benchmarks: a number in a table matches its label."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import figures, load, scale

MOMENTS = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [([5.0], 50, 5.0), ([5.0], 99, 5.0), ([4.0, 1.0, 3.0, 2.0], 50, 2.0), (list(range(1, 101)), 99, 99)],
    ids=["one sample", "one sample, high", "unsorted, even", "of a hundred"],
)
def test_percentile_is_the_nearest_rank(samples: list[float], percent: float, expected: float) -> None:
    """A percentile is one of the samples, never a number in between."""
    assert figures.percentile(samples, percent) == expected


@given(MOMENTS, st.floats(min_value=0, max_value=100))
def test_percentile_covers_its_share(samples: list[float], percent: float) -> None:
    """At least that share of the samples is not above it."""
    found = figures.percentile(samples, percent)

    assert found in samples
    assert sum(sample <= found for sample in samples) >= len(samples) * percent / 100 - 1e-9


def test_too_few_samples_are_refused() -> None:
    """Nothing is told of nothing."""
    with pytest.raises(ValueError, match="no samples"):
        figures.percentile([], 50)
    with pytest.raises(ValueError, match="two events"):
        figures.rate([1.0])


def test_rate_counts_intervals() -> None:
    """Three events in two seconds are one per second."""
    assert figures.rate([12.0, 10.0, 11.0]) == pytest.approx(1.0)


def test_delays_pair_in_order_of_time() -> None:
    """The first cause goes with the first effect, and a missing effect is no number."""
    assert figures.delays([2.0, 1.0], [1.5, 3.0]) == [0.5, 1.0]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        figures.delays([1.0], [])


def test_a_torn_line_of_the_log_is_left() -> None:
    """The proxy may be in the middle of a line."""
    assert figures.read_calls("filter 0.001\nbind 0.5\nfilter 0.002\nbind 0.") == {
        "filter": [0.001, 0.002],
        "bind": [0.5],
    }


def test_cpu_time_of_a_process_with_an_odd_name() -> None:
    """The name in /proc/PID/stat may hold blanks and brackets."""
    assert figures.cpu_seconds("7 (a ) b) S 1 1 1 0 -1 0 0 0 0 0 150 50 0 0", ticks_per_second=100) == 2.0


def test_cpu_per_pod_of_processes_in_both_readings() -> None:
    """A process that came in between has used nothing that can be told."""
    assert figures.per_pod({"a": 1.0, "b": 1.0}, {"a": 1.2, "b": 3.0, "c": 9.0}, 10) == pytest.approx(
        {"b": 200.0, "a": 20.0}
    )


def test_requests_of_the_api_server_are_summed_by_kind() -> None:
    """Status codes and scopes of one kind count together; watches and paths without a resource do not."""
    page = """# TYPE apiserver_request_total counter
apiserver_request_total{code="201",resource="pods",subresource="binding",verb="POST",scope="resource"} 40
apiserver_request_total{code="409",resource="pods",subresource="binding",verb="POST",scope="resource"} 2
apiserver_request_total{code="200",resource="leases",subresource="",verb="PUT",scope="resource"} 7
apiserver_request_total{code="200",resource="pods",subresource="",verb="WATCH",scope="cluster"} 9
apiserver_request_total{code="200",resource="",subresource="/healthz",verb="GET",scope=""} 5
apiserver_request_duration_seconds_count{resource="pods",subresource="",verb="POST"} 3
"""
    assert figures.read_requests(page)["POST pods/binding"] == 42
    assert figures.read_requests(page).keys() == {"POST pods/binding", "PUT leases"}


def test_requests_per_pod_are_of_the_time_between() -> None:
    """A kind that was not seen before began at nothing, and rare ones are not told."""
    asked = figures.each_pod(
        {"PUT leases": 7.0, "GET pods": 1.0}, {"PUT leases": 17.0, "GET pods": 1.2, "POST a": 20.0}, 10
    )
    assert list(asked.items()) == [("POST a", 2.0), ("PUT leases", 1.0)]


def test_ratios_pair_contenders_of_one_round() -> None:
    """The median of the ratios of rounds, not the ratio of medians: each round met another load of the machine."""
    rates: dict[str, list[float]] = {
        "plain": [100.0, 10.0, 50.0],
        "noop": [80.0, 8.0, 40.0],
        "unhinted": [50.0, 5.0, 30.0],
        "atoll": [60, 9, 30],
    }
    bursts = {
        name: scale.Burst(list(each), [{"kube-scheduler": 2.0, "extender": 1.0}] * 3, [{}] * 3)
        for name, each in rates.items()
    }
    shown = {row.what: row.value for row in scale.burst_rows(bursts, 10)}

    assert shown["rate, Atoll against no-op extender"].startswith("0.75 ")
    assert shown["rate, Atoll against no extender"] == "0.60"
    assert shown["CPU per pod, Atoll"] == "3.00 ms, Atoll's 1.00"


def test_a_reading_that_a_round_lacks_is_none() -> None:
    """A kind of request that only one round saw is not told as if every one had."""
    assert scale.medians([{"a": 1.0}, {"a": 3.0, "b": 6.0}, {"a": 2.0}]) == {"a": 2.0, "b": 0.0}


def test_longest_block_is_the_greatest() -> None:
    """A part whose loop was never kept busy has a row too."""
    rows = scale.block_rows({"extender": [0.005, 0.012, 0.007]})
    assert [row.value for row in rows] == ["12 ms", "0 ms"]


def test_table_is_aligned() -> None:
    """Columns begin at the same place in every line."""
    rows = [figures.Row("short", "1", "x"), figures.Row("much longer", "22222", "y")]

    assert figures.table(rows) == "short        1      x\nmuch longer  22222  y"


def test_requests_are_counted_by_program_and_kind() -> None:
    """An answer counts once, whoever its account; what a watch began and a line that is being written do not."""

    def line(agent: str, verb: str, resource: str, stage: str = "ResponseComplete") -> str:
        event = {"userAgent": agent, "verb": verb, "objectRef": {"resource": resource}, "stage": stage}
        return json.dumps(event) + "\n"

    lines = [
        line("kube-scheduler/v1.37.2 (linux/amd64)", "patch", "events"),
        line("atoll-controllers/0.1.0", "patch", "leases"),
        line("atoll-controllers/0.1.0", "patch", "leases"),
        line("atoll-extender/0.1.0", "watch", "pods", "ResponseStarted"),
        json.dumps({"verb": "get", "stage": "ResponseComplete"}) + "\n",
        line("atoll-extender/0.1.0", "get", "pods")[:-9],
    ]
    assert load.asked(lines) == {
        ("kube-scheduler", "patch events"): 1,
        ("atoll-controllers", "patch leases"): 2,
        ("unknown", "get other paths"): 1,
    }
