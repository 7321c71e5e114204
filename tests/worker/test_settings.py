"""Variables of a job: their meaning, defaults and refusals."""

from pathlib import Path

import pytest

from worker import CheckpointSettings

MINIMUM = {
    "ATOLL_JOB_ID": "job",
    "ATOLL_CHECKPOINT_URI": "s3://bucket/run/",
    "ATOLL_CHECKPOINT_PREFIXES": "s3://bucket/ file:///checkpoints/",
}


def test_defaults() -> None:
    """300 seconds between checkpoints, three of them kept."""
    assert CheckpointSettings.from_environment(MINIMUM) == CheckpointSettings(
        job_id="job",
        uri="s3://bucket/run/",
        prefixes=("s3://bucket/", "file:///checkpoints/"),
        interval_seconds=300,
        kept=3,
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[pytest.param(name, "", f"{name} is not set", id=name) for name in MINIMUM],
        ("ATOLL_CHECKPOINT_MAX_COUNT", "0", "a whole number from 1 to 1000"),
        ("ATOLL_CHECKPOINT_MAX_COUNT", "1001", "a whole number from 1 to 1000"),
        ("ATOLL_CHECKPOINT_INTERVAL_SECONDS", "5m", "'5m': a whole number"),
        ("ATOLL_CHECKPOINT_INTERVAL_SECONDS", "9" * 5000, "a whole number"),
        ("ATOLL_CHECKPOINT_INTERVAL_SECONDS", "٣", "a whole number"),
    ],
)
def test_mistakes_name_the_variable(name: str, value: str, message: str) -> None:
    """Each is told with its name, its value and what it may be."""
    with pytest.raises(ValueError, match=message):
        CheckpointSettings.from_environment({**MINIMUM, name: value})


def test_it_opens_what_it_says(tmp_path: Path) -> None:
    """The place, the job and the count of the variables are those of the checkpoints."""
    uri = f"file://{tmp_path}/"
    variables = {
        **MINIMUM,
        "ATOLL_CHECKPOINT_URI": uri,
        "ATOLL_CHECKPOINT_PREFIXES": uri,
        "ATOLL_CHECKPOINT_MAX_COUNT": "1",
    }
    checkpoints = CheckpointSettings.from_environment(variables).open()
    for step in (1, 2):
        record = checkpoints.save(step, {"model": b"w"})
    assert record.job_id == "job"
    assert len(list((tmp_path / "committed").iterdir())) == 1
