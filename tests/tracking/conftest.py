import pytest


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """W&B without a key, which then records offline, and without settings from anyone's home."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
