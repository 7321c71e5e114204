"""The checksum of a model: what differs from it is never loaded."""

import hashlib
from pathlib import Path

import pytest

from worker import ModelMismatch, verify_model
from worker.models import CHECKSUM

SHA256 = hashlib.sha256(b"weights").hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with a model."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


@pytest.mark.parametrize("checksum", ["", f"sha256:{SHA256}", f"sha256:{SHA256.upper()}"])
def test_the_model_that_the_job_wants_is_accepted(model: Path, checksum: str) -> None:
    """So is any model, where the job gives no checksum."""
    verify_model(model, {CHECKSUM: checksum})


@pytest.mark.parametrize(
    ("checksum", "error", "told"),
    [
        pytest.param(f"sha256:{'0' * 64}", ModelMismatch, f"has sha256 {SHA256}, and the job wants 000", id="differs"),
        pytest.param(f"sha256:{SHA256[:-1]}", ModelMismatch, "do not load it", id="a digit is missing"),
        pytest.param(f"sha512:{SHA256}", ModelMismatch, "has sha512", id="of another algorithm"),
        pytest.param("crc:1", ValueError, "such as sha256", id="unknown algorithm"),
        pytest.param(SHA256, ValueError, "such as sha256", id="no algorithm"),
    ],
)
def test_any_other_is_refused_in_words(model: Path, checksum: str, error: type[Exception], told: str) -> None:
    """The process that does not catch it ends, and so the job fails before anything of the file is loaded."""
    with pytest.raises(error, match=told):
        verify_model(model, {CHECKSUM: checksum})
