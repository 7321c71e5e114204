"""docs/checkpoints.md and the example work as described; the distribution contains everything a container needs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from devcluster.programs import DEFAULT_KUBERNETES
from tests.docs_blocks import blocks, commands
from tests.kubernetes_schemas import validate
from tests.worker.conftest import REPOSITORY, Run
from worker import models, preemption, settings, termination

PAGE = REPOSITORY / "docs/checkpoints.md"
JOB = REPOSITORY / "examples/worker/job.yaml"
VARIABLES = {
    settings.JOB_ID,
    settings.URI,
    settings.PREFIXES,
    settings.INTERVAL,
    settings.MAX_COUNT,
    settings.KEY_FILE,
    preemption.FILE_VARIABLE,
    preemption.GRACE_VARIABLE,
    "ATOLL_TERMINATION_LOG",
    models.CACHE,
    models.HOSTS,
}


def test_its_commands_work(tmp_path: Path) -> None:
    """A reader who copies them one after the other sees a training resumed."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    script = "set -e\n" + "".join(block.text for block in commands(PAGE) if not block.reason)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={"PATH": path, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Resumed from a checkpoint: step" in done.stderr
    assert "preempted after step" in done.stdout
    assert f"done: weight {sum(range(1, 101))}" in done.stdout
    assert '"step":100' in done.stdout


class PageModel:
    """Stands for a model and an optimizer of the reader's."""

    def __init__(self) -> None:
        self.state = {"weight": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_its_code_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that a reader takes over train to the end, with a notice in the midst of it."""
    [code] = [block.text for block in blocks(PAGE) if block.kind == "python"]
    uri = f"file://{tmp_path}/run/"
    for name, value in {"JOB_ID": "page", "CHECKPOINT_URI": uri, "CHECKPOINT_PREFIXES": uri}.items():
        monkeypatch.setenv(f"ATOLL_{name}", value)
    monkeypatch.setenv(preemption.FILE_VARIABLE, str(tmp_path / "notice"))

    def trained(name: dict[str, object]) -> list[int]:
        steps: list[int] = []

        def train(step: int) -> float:
            steps.append(step)
            name["model"].state["weight"] += step
            if step == 3 and not (tmp_path / "notice").exists():
                (tmp_path / "notice").write_text("60")
                name["preemption"].wait(60)
            return 0.5

        name.update(train=train, steps=5, model=PageModel(), optimizer=PageModel())
        try:
            exec(compile(code, PAGE, "exec"), name)
        finally:
            name["preemption"].close()
        return steps

    first: dict[str, object] = {}
    with pytest.raises(SystemExit) as ended:
        trained(first)
    assert ended.value.code == 143
    (tmp_path / "notice").write_text("")
    second: dict[str, object] = {}
    assert trained(second) == [4, 5]
    assert second["model"].state == {"weight": 15}


def test_its_variables_are_those_that_are_read() -> None:
    """The table names each variable of the code, with its default, and no other."""
    rows = dict(re.findall(r"^\| `(ATOLL_\w+)` \| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows.keys() == VARIABLES
    assert rows[settings.INTERVAL] == str(settings.INTERVAL_SECONDS)
    assert rows[settings.MAX_COUNT] == str(settings.KEPT)
    assert rows[preemption.GRACE_VARIABLE] == f"{preemption.GRACE_SECONDS:.0f}"
    assert rows[preemption.FILE_VARIABLE] == f"`{preemption.NOTICE_FILE}`"
    assert rows[models.CACHE] == f"`{models.CACHE_FOLDER}`"
    assert rows["ATOLL_TERMINATION_LOG"] == f"`{termination.PATH}`"


def test_the_job_is_one_that_kubernetes_takes() -> None:
    """The manifest is valid, sets only variables that are read, and gives as much time as it says."""
    documents = list(yaml.safe_load_all(JOB.read_text(encoding="utf-8")))
    for document in documents:
        validate(document, ".".join(DEFAULT_KUBERNETES.split(".")[:2]), strict=True)
    pod = documents[1]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables.keys() <= VARIABLES
    assert variables[preemption.GRACE_VARIABLE] == str(pod["terminationGracePeriodSeconds"])
    assert settings.CheckpointSettings.from_environment(variables).uri == "file:///checkpoints/"
    [item] = pod["volumes"][1]["downwardAPI"]["items"]
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{preemption.ANNOTATION}']"
    assert f"{container['volumeMounts'][1]['mountPath']}/{item['path']}" == preemption.NOTICE_FILE


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from worker import Checkpoints
uri = f"file://{sys.argv[1]}/run/"
Checkpoints.open(uri, job_id="alone", allowed=[uri]).save(1, {"model": b"w"})
with Checkpoints.open(uri, job_id="alone", allowed=[uri]).restore() as restored:
    print(restored.next_step, sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
"""


def test_the_wheel_needs_python_alone(tmp_path: Path, run: Run) -> None:
    """The distribution is built, unpacked beside nothing else, and saves and resumes in a folder."""
    shutil.copytree(
        REPOSITORY / "worker", tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    wheel = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, tmp_path / "source")
    built = run(*wheel)
    assert built.returncode == 0, built.stderr
    [path] = tmp_path.glob("atoll_worker-*.whl")
    shutil.unpack_archive(path, tmp_path / "alone", "zip")
    done = run("-I", "-S", "-c", ALONE, tmp_path / "alone")
    assert done.stdout.strip() == "2 ['__main__', 'worker']", done.stderr
