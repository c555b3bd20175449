"""What the commands of all roles begin with."""

from pathlib import Path

from agent_r3.config import Config


def load_role_config(path: Path, overrides: list[str] | None) -> Config:
    """The config with the model's real folder; logs go to stderr from here on. Raises UserError."""
    from agent_r3.config import load_config
    from agent_r3.metrics import setup_logging

    setup_logging()
    return with_model_folder(load_config(path, overrides or []))


def with_model_folder(config: Config) -> Config:
    """The config with the folder of the tiny policy for `tiny`. Raises DataError when that was not made yet."""
    if config.model.path != "tiny":
        return config
    from agent_r3.tiny import model_folder  # needs what makes the model, which not every role's image has

    folder = str(model_folder(config.model.path))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
