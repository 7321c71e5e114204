"""`atoll choose`: output for a choice, and messages for invalid input."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from atollctl.__main__ import app
from atollctl.choose import answer
from atollctl.topo_source import source_of_profile
from tests.atollctl.matrices import saved
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.profiles import profile_names

RUNNER = CliRunner()
WEAK_GPU = """
        GPU0  GPU1  GPU2  GPU3  CPU Affinity  NUMA Affinity
GPU0     X    NV4   NV4   NV1   0-7           0
GPU1    NV4    X    NV4   NV1   0-7           0
GPU2    NV4   NV4    X    NV1   0-7           0
GPU3    NV1   NV1   NV1    X    0-7           0
"""
SIX_AND_TWO = "\n".join(
    ["\t" + "\t".join(f"GPU{column}" for column in range(8)) + "\tCPU Affinity\tNUMA Affinity"]
    + [
        "\t".join(
            [f"GPU{row}"]
            + ["X" if row == column else "NV2" if (row < 6) == (column < 6) else "SYS" for column in range(8)]
            + ["0-7", "0"]
        )
        for row in range(8)
    ]
)


def chosen(folder: Path, matrix: str, *options: str) -> dict[str, object]:
    """Ask the command line for JSON about a saved matrix."""
    file = folder / "topo.txt"
    file.write_text(matrix)
    result = RUNNER.invoke(app, ["choose", "--from", str(file), "-o", "json", *options])
    assert result.exit_code in (0, 1), result.output
    answered: dict[str, object] = json.loads(result.stdout)
    assert (result.exit_code == 0) == bool(answered["devices"])
    return answered


@pytest.mark.parametrize(
    ("matrix", "options", "devices", "ring", "quality"),
    [
        pytest.param(
            saved("h100-nvl-8"),
            "--free 0,1,2,4,5 --count 1 --model nvidia-h100-nvl",
            [2],
            0.0,
            1.0,
            id="a-single-gpu-takes-the-widow-and-leaves-bridged-pairs-whole",
        ),
        pytest.param(
            saved("dgx1-v100"),
            "--count 5 --model nvidia-v100",
            [0, 2, 3, 4, 7],
            60.0,
            1.0,
            id="five-on-the-cube-mesh-are-not-a-quad-plus-one",
        ),
        pytest.param(
            saved("dgx1-v100"),
            "--free 0,1,3 --count 2 --model V100",
            [0, 3],
            40.0,
            1.0,
            id="the-double-link-of-three-free-ones",
        ),
        pytest.param(
            saved("dgx1-v100"),
            "--free 0,1,3,4,7 --count 3 --model V100",
            [0, 1, 3],
            40.0,
            1.0,
            id="three-of-five-free-are-a-triangle-of-links",
        ),
        pytest.param(WEAK_GPU, "--count 1", [3], None, 1.0, id="the-weak-gpu-serves-single-pods-first"),
        pytest.param(
            saved("dgx-h100"),
            "--free 1,4,6 --count 2 --model H100",
            [4, 6],
            370.8,
            1.0,
            id="behind-a-switch-any-two-are-the-best-and-sockets-stay-whole",
        ),
        pytest.param(
            saved("pcie8-allsys-4090"),
            "--free 0,4,5 --count 2",
            [4, 5],
            None,
            1.0,
            id="where-all-is-sys-the-numa-node-decides",
        ),
        pytest.param(
            saved("dgx1-v100"),
            "--free 0,2,4,5 --required 4 --count 2 --model V100",
            [0, 4],
            40.0,
            1.0,
            id="the-required-gpu-is-in-the-set",
        ),
    ],
)
def test_choices_that_users_understand(
    tmp_path: Path, matrix: str, options: str, devices: list[int], ring: float | None, quality: float
) -> None:
    """The examples of the documentation come out of the command as promised, with honest bandwidths."""
    answered = chosen(tmp_path, matrix, *options.split())

    assert answered["devices"] == devices
    assert answered["ringGBps"] == (ring if ring is None else pytest.approx(ring))
    assert answered["relativeQuality"] == pytest.approx(quality)
    assert answered["bounded"] is False
    assert set(answered) == {"devices", "ringGBps", "relativeQuality", "bounded", "why"}


@pytest.mark.parametrize(
    ("matrix", "options", "why"),
    [
        pytest.param(
            SIX_AND_TWO,
            "--count 8 --policy island",
            "no island of the requested size: asked for 8 GPUs, 8 of 8 free; it would not fit the empty machine either",
            id="six-and-two-are-not-eight",
        ),
        pytest.param(
            saved("dgx1-v100"),
            "--free 0,1,3 --count 4 --model V100",
            "too few free GPUs: asked for 4 GPUs, 3 of 8 free; the empty machine would give GPUs 0, 1, 2, 3 "
            "with a ring of 80 GB/s",
            id="three-free-are-not-four",
        ),
        pytest.param(
            saved("l40s-4"),
            "--count 2 --interconnect nvlink",
            "no NVLink island of the requested size: asked for 2 GPUs, 4 of 4 free; it would not fit the empty machine "
            "either",
            id="no-nvlink-anywhere",
        ),
        pytest.param(
            saved("dgx1-v100"),
            "--free 0,1 --required 1 --count 2 --min-bandwidth 40 --model V100",
            "no set reaches the asked bandwidth: asked for 2 GPUs with GPU 1, 2 of 8 free; the empty machine would "
            "give GPUs 0, 3 with a ring of 40 GB/s",
            id="one-link-is-too-slow",
        ),
    ],
)
def test_a_refusal_says_why_and_what_would_help(tmp_path: Path, matrix: str, options: str, why: str) -> None:
    """Status 1, no devices, the reason that the scheduler would give, and whether waiting can help."""
    answered = chosen(tmp_path, matrix, *options.split())

    assert answered == {
        "devices": [],
        "ringGBps": None,
        "relativeQuality": None,
        "bounded": False,
        "why": why,
    }


def test_the_answer_for_people(tmp_path: Path) -> None:
    """People read which GPUs, how good they are, what the best would be, and why."""
    file = tmp_path / "topo.txt"
    file.write_text(saved("dgx1-v100"))

    result = RUNNER.invoke(
        app, ["choose", "--from", str(file), "--model", "V100", "--free", "0,1,2,4,5", "--count", "4"]
    )

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "GPUs     0, 1, 2, 4",
        "Ring     40 GB/s",
        "Quality  50% of the best set of that size",
        "Best     GPUs 0, 1, 2, 3 with a ring of 80 GB/s, when all are free",
        (
            "Why      the best-connected set that is free; it lies inside nvlink-group-0; its ring runs over NVLink "
            "or xGMI alone; on the empty machine the best would be GPUs 0, 1, 2, 3 with a ring of 80 GB/s"
        ),
        "Traffic between sockets counts at the slowest known rate, because a saved matrix does not show its speed.",
    ]


def test_without_a_generation_bandwidths_are_relative_and_said_to_be(tmp_path: Path) -> None:
    """A saved matrix does not tell the generation: no GB/s are made up."""
    file = tmp_path / "topo.txt"
    file.write_text(saved("dgx1-v100"))

    text = RUNNER.invoke(app, ["choose", "--from", str(file), "--count", "4"]).stdout
    answered = chosen(tmp_path, saved("dgx1-v100"), "--count", "4")

    assert "Ring     2 x the best pair" in text
    assert "GB/s" not in text
    assert answered["ringGBps"] is None
    assert "relative" in str(answered["why"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param("--count 0", "--count must be 1 to 64, got 0", id="count-zero"),
        pytest.param("--count -3", "--count must be 1 to 64, got -3", id="count-negative"),
        pytest.param("--count 9999999999999999999999", "--count must be 1 to 64", id="count-huge"),
        pytest.param("--count 2 --free 0,9", "the machine has no GPU 9; it has 0, 1, 2", id="gpu-not-there"),
        pytest.param("--count 2 --free 0,x", "--free needs GPU numbers", id="no-number"),
        pytest.param("--count 2 --free 0,-1", "--free needs GPU numbers", id="negative-number"),
        pytest.param("--count 2 --free 0,²", "--free needs GPU numbers", id="a-digit-that-is-no-number"),
        pytest.param("--count 2 --free 0,,1", "--free needs GPU numbers", id="two-commas"),
        pytest.param("--count 2 --free 0,1,1", "--free names GPU 1 twice", id="twice"),
        pytest.param(f"--count 2 --free {'1' * 5000}", "--free is longer than", id="endless-number"),
        pytest.param("--count 2 --free 0,1 --required 2", "GPU 2 is required and not free", id="required-not-free"),
        pytest.param("--count 1 --required 0,1", "2 GPUs are required and only 1", id="more-required-than-asked"),
        pytest.param("--count 2 --required 77", "GPU 77 is required and not free", id="required-not-there"),
        pytest.param("--count 2 --min-bandwidth nan --model V100", "--min-bandwidth must be", id="bandwidth-nan"),
        pytest.param("--count 2 --min-bandwidth -1 --model V100", "--min-bandwidth must be", id="bandwidth-negative"),
        pytest.param("--count 2 --min-bandwidth 40", "name the GPUs by --model", id="bandwidth-without-generation"),
        pytest.param("--count 2 --model nonsense", "no GPU model 'nonsense' is known", id="model-unknown"),
        pytest.param("--count 2 --model nvidia", "the model 'nvidia' is ambiguous", id="model-ambiguous"),
        pytest.param("--count 2 --profile dgx-h100", "leave out --from and --model", id="two-machines"),
    ],
)
def test_a_question_without_sense_gets_one_sentence(tmp_path: Path, options: str, sentence: str) -> None:
    """Status 2, one line on standard error, nothing on standard output, never a traceback."""
    file = tmp_path / "topo.txt"
    file.write_text(saved("dgx1-v100"))

    result = RUNNER.invoke(app, ["choose", "--from", str(file), *options.split()])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("options", ["--count 2 --policy best", "--count two", "--count 2 -o svg", ""])
def test_an_unknown_word_gets_the_usage(options: str) -> None:
    """Words that no option knows end with status 2 as well."""
    result = RUNNER.invoke(app, ["choose", "--profile", "l4-8", *options.split()])

    assert result.exit_code == 2
    assert "Traceback" not in result.output


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_answers_lie_within_what_is_free(data: st.DataObject) -> None:
    """Whatever is asked of a known machine: that many free GPUs, the required ones among them, or a reason."""
    source = source_of_profile(data.draw(st.sampled_from(profile_names())))
    free = tuple(sorted(data.draw(st.sets(st.sampled_from(source.ids), min_size=1))))
    count = data.draw(st.integers(1, len(free)))
    required = tuple(sorted(data.draw(st.sets(st.sampled_from(free), max_size=count))))
    ask = DeviceRequest(
        count,
        policy=data.draw(st.sampled_from(Policy)),
        interconnect=data.draw(st.sampled_from(Interconnect)),
        min_bandwidth_gbps=data.draw(st.sampled_from([0.0, 20.0, 1e6])),
    )

    found = answer(source, ask, free=free, required=required)

    assert found.why
    if found.devices:
        assert len(set(found.devices)) == count
        assert set(required) <= set(found.devices) <= set(free)
        assert found.relative_quality is not None
        assert 0 <= found.relative_quality <= 1
    else:
        assert found.as_json()["relativeQuality"] is None
