"""Arithmetic of the benchmarks: a number in a table matches its label."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import figures, load

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
