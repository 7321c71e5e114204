"""The documentation: the site builds, commands exist, generated pages are current, alerts are explained."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from atoll.cluster.consistency import PROMISES
from atoll.cluster.release import Proof
from atollctl.__main__ import app
from atollctl.reference import PARTS, pages
from atollctl.reference import main as write_reference
from tests.docs_blocks import COMMANDS, PAGES, REASONS, REPOSITORY, Block, blocks, commands

OPERATIONS = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
RULES = yaml.safe_load((REPOSITORY / "deploy/monitoring/rules.yaml").read_text(encoding="utf-8"))
ALERTS = sorted(rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule)

LINE_MAX = 300


def name_of(value: object) -> str:
    """Return a readable test id."""
    return str(value.relative_to(REPOSITORY)) if isinstance(value, Path) else str(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that `make docs` builds; a warning fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = ["make", f"--old-file={sys.prefix}/.ready", "docs", f"VENV={sys.prefix}", f"SITE={folder}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_target_that_is_named_exists() -> None:
    """`make TARGET` on a page, in `make help` or in .PHONY is a rule of the Makefile."""
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    rules = set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", makefile, re.MULTILINE))
    phony = re.search(r"^\.PHONY: ((?:.+\\\n)*.+)", makefile, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].replace("\\", " ").split()) == rules
    helped = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make ([a-z0-9-]+)", helped, re.MULTILINE)) == rules - {"tools"}
    others = [REPOSITORY / name for name in ("CHANGELOG.md", "mkdocs.yml", "Makefile", "bench/README.md")]
    for page in {*PAGES, *others, *(REPOSITORY / "docs").rglob("*.md")}:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"(?:`|^ *|--no-print-directory )make ([a-z][a-z0-9-]*)", text, re.MULTILINE)
        assert set(named) <= rules, page.name


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """Every page opens from a folder without a network: scripts, styles, fonts and pictures are beside it."""
    told = sorted(site.rglob("*.html"))
    assert len(told) > 25
    for page in told:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preload|preconnect|icon)[^>]* href=\"?([^\s\">]+)", text)
        assert [url for url in loaded if url.startswith(("http:", "https:", "//"))] == [], page.name
        assert 'class="mermaid"' not in text, f"{page.name}: only a script from elsewhere would draw it"


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """Whoever reads the site finds every page; `strict` lets none be forgotten, and this proves that it looks."""
    home = (site / "index.html").read_text(encoding="utf-8")
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert f"{page.stem}.html" in home or page.stem == "index", page.name


def test_decisions_are_numbered_once() -> None:
    """A number names one decision: in the name of its file and in its title."""
    files = sorted((REPOSITORY / "docs/decisions").glob("*.md"))
    numbers = [int(path.name.partition("-")[0]) for path in files]
    assert len(numbers) == len(set(numbers))
    for path, number in zip(files, numbers, strict=True):
        assert path.read_text(encoding="utf-8").startswith(f"# {number}. "), path.name


def test_architecture_lists_every_proof() -> None:
    """The table names the proofs that the code accepts, in their order."""
    page = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    rows = page.partition("| proof |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(Proof)


def test_links_outside_the_site_lead_somewhere() -> None:
    """What `make docs` does not build links to files that exist."""
    rooms = (REPOSITORY, *(REPOSITORY / name for name in ("bench", "deploy/kind", "examples")))
    for page in (page for room in rooms for page in room.glob("*.md")):
        links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def test_every_number_of_a_finding_is_explained() -> None:
    """`atoll audit` numbers what it finds by the promise that is broken."""
    table = OPERATIONS.partition("Findings are numbered by the promise")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert {int(row.split("|")[1]) for row in table.splitlines()[2:]} == set(PROMISES.values())


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CHANGELOG.md"], ids=name_of)
def test_pages_stand_for_themselves(page: Path) -> None:
    """No line is too long to review, and no page names a case or a promise by a number from a list elsewhere."""
    text = page.read_text(encoding="utf-8")
    assert [line[:60] for line in text.splitlines() if len(line) > LINE_MAX and not line.startswith(("|", "!["))] == []
    assert re.findall(r"(?:^|\W)[A-M]\d{1,2}:|promises? \d+\b|\.\./shared", text) == []


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_its_meaning_check_and_cure(alert: str) -> None:
    """Whoever is woken finds what it means, a command that shows it, and what to do."""
    section = OPERATIONS.partition(f"\n### {alert}\n")[2].partition("\n### ")[0]
    for word in ("**Means.**", "**Check.**", "**Cure.**"):
        assert word in section, word
    assert "```sh" in section


def test_no_alert_is_told_that_does_not_exist() -> None:
    """An alert that was renamed takes its section along."""
    assert sorted(re.findall(r"^### (Atoll\w+)$", OPERATIONS, re.MULTILINE)) == ALERTS


def test_generated_pages_are_fresh(tmp_path: Path) -> None:
    """Settings, commands and fields stand on the pages as the code has them; `make verify` fails of the same."""
    assert write_reference(["--check"]) == 0
    assert write_reference(["--docs", str(tmp_path)]) == 0
    for name, text in pages().items():
        (tmp_path / name).write_text(text[:-1])
    assert write_reference(["--check", "--docs", str(tmp_path)]) == 1
    assert write_reference(["--docs", str(tmp_path)]) == 0
    assert write_reference(["--check", "--docs", str(tmp_path)]) == 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_block_is_marked(page: Path) -> None:
    """Commands stand in blocks marked `sh`, which tests run, or above them stands one of the known reasons why not."""
    text = page.read_text(encoding="utf-8")
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?<=\n\n) {4,7}(\S+)", outside)
    assert [word for word in indented if word in COMMANDS] == []
    for block in blocks(page):
        first = (block.text.split() or [""])[0]
        assert block.kind == "sh" or first not in COMMANDS, f"{page.name}:{block.line} is no block of `sh`"
        assert not block.reason or block.reason in REASONS, f"{page.name}:{block.line}"
        assert not block.reason or block.kind == "sh", f"{page.name}:{block.line}"
    assert text.count("not run here:") == len([block for block in blocks(page) if block.reason])


def shown_outputs() -> list[tuple[str, str]]:
    """Return the commands of README's first minute, each with the output that stands below it."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(atoll [^\n]*)\n```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_first_minute_draws_chooses_and_explains() -> None:
    """A newcomer sees all three without Kubernetes."""
    assert [command.split()[1] for command, _ in shown_outputs()] == ["topo", "choose", "explain"]


@pytest.mark.parametrize(("command", "output"), shown_outputs(), ids=["topo", "choose", "explain"])
def test_output_in_readme_is_true(command: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What README shows below a command is what the command prints on the files in examples/."""
    monkeypatch.chdir(REPOSITORY)
    assert CliRunner().invoke(app, shlex.split(command)[1:]).stdout == output


def calls(block: Block) -> list[list[str]]:
    """Return the calls of `atoll` in a block, as words."""
    lines = re.sub(r"\\\n", " ", block.text).splitlines()
    found = (re.search(r"(?:^|[;&|] *|bin/|= *)(atoll [^;&|#]*)", line) for line in lines)
    return [shlex.split(match[1]) for match in found if match]


CALLS = [call for page in PAGES for block in commands(page) for call in calls(block)]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_every_call_of_atoll_is_one_that_it_takes(call: list[str]) -> None:
    """Commands and options on the pages exist: the command line reads each without running it."""
    command, words = typer.main.get_command(app), call[1:]
    while hasattr(command, "commands"):
        assert words[0] in command.commands, call
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    if command.context_settings.get("ignore_unknown_options"):  # passed on to a part, whose settings they are
        part = PARTS[call[1]]
        known |= {"--" + name.replace("_", "-") for name in part.model_fields}
    assert used <= known, call
