"""The tests' browser is unpacked, never installed."""

from pathlib import Path

import pytest

from devcluster import system_programs
from devcluster.errors import BuildError
from devcluster.system_programs import find_browser


def test_a_machine_without_apt_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the packages, and nothing half-done is left in the cache."""
    monkeypatch.setattr(system_programs.shutil, "which", lambda _name: None)

    with pytest.raises(BuildError, match="chromium-headless-shell"):
        find_browser(tmp_path, report=lambda _text: None)
    assert list(tmp_path.iterdir()) == []


def test_what_was_unpacked_is_found_with_its_libraries_and_fonts(tmp_path: Path) -> None:
    """A second start downloads nothing; the browser is told where its libraries and its fonts lie."""
    unpacked = tmp_path / "debian-browser"
    for name in ("complete", "usr/lib/chromium/chromium-headless-shell", "usr/lib/x86_64-linux-gnu/libx.so.1"):
        (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / name).touch()

    browser = find_browser(tmp_path, report=lambda text: pytest.fail(text))

    assert browser.program == unpacked / "usr/lib/chromium/chromium-headless-shell"
    assert str(unpacked / "usr/lib/x86_64-linux-gnu") in browser.environment["LD_LIBRARY_PATH"].split(":")
    assert str(unpacked) in Path(browser.environment["FONTCONFIG_FILE"]).read_text()
