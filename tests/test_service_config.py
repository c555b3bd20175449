"""Configuration of services: keys from the environment, secrets from files."""

import os
import sys
from pathlib import Path

import pytest

from agent_r3.config import Config, StoreConfig, config_of, dump_config, load_config
from agent_r3.errors import ConfigError, UserError
from agent_r3.process import spawn
from agent_r3.store import GroupReader, TrajectoryWriter, check_url, connection_url
from tests.support.store import RedisServer

BASE = "model: {path: m}\ntasks: {dataset: d}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"{BASE}train: {{lr: 1.0e-3, steps: 7}}\n")
    return path


def test_the_environment_stands_between_the_file_and_the_command_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R3__TRAIN__LR", "1e-5")
    monkeypatch.setenv("AGENT_R3__TRAIN__STEPS", "9")
    monkeypatch.setenv("AGENT_R3__ENGINE__URLS", "[http://a:1, http://b:2]")
    monkeypatch.setenv("AGENT_R3__EVAL__TASKS", "{dataset: held}")
    monkeypatch.setenv("AGENT_R3__STORE__URL", "")
    config = load_config(file, ["train.steps=11"])
    assert (config.train.lr, config.train.steps) == (1e-5, 11)
    assert config.engine.urls == ("http://a:1", "http://b:2")
    assert config.eval.tasks is not None and config.eval.tasks.dataset == "held"
    assert config.store.url is None


def test_variables_that_only_look_alike_are_none_of_ours(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R3_TRAIN__STEPS", "9")
    monkeypatch.setenv("AGENT_R3_LOG", "json")
    assert load_config(file).train.steps == 7


def test_commands_without_a_config_file_take_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R3__SANDBOX__MEMORY", "3g")
    assert config_of({"model": {"path": "m"}, "tasks": {"dataset": "d"}}, [], "x").sandbox.memory == "3g"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRAIN__STPES", "9", r"unknown key `train\.stpes` \(from environment variable {}\); did you mean `steps`\?"),
        ("TRIAN__STEPS", "9", r"unknown key `trian` \(from environment variable {}\); did you mean `train`\?"),
        ("EVAL__TASKS__DATSET", "9", r"unknown key `eval\.tasks\.datset` \(from .* {}\); did you mean `dataset`\?"),
        ("TRAIN__STEPS", "many", r"`train\.steps` \(from environment variable {}\): .*integer.* \(got 'many'\)"),
        ("TRAIN__STEPS", "[1", r"environment variable {}: the value is not valid YAML"),
        ("MODEL__PATH__X", "1", r"environment variable {}: 'path' is a value, not a section"),
    ],
)
def test_a_bad_variable_is_one_line_that_names_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"AGENT_R3__{variable}", value)
    with pytest.raises(ConfigError, match=message.format(f"AGENT_R3__{variable}")) as error:
        load_config(file)
    assert "\n" not in str(error.value)


def test_a_bad_key_of_the_file_is_not_blamed_on_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_R3__TRAIN__STEPS", "9")
    file.write_text(f"{BASE}train: {{stpes: 3}}\n")
    with pytest.raises(ConfigError, match="did you mean `steps`") as error:
        load_config(file)
    assert "environment" not in str(error.value)


def test_children_do_not_see_the_variables_since_their_config_has_them_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_R3__TRAIN__STEPS", "9")
    monkeypatch.setenv("AGENT_R3_LOG", "json")
    code = "import os; print(sorted(name for name in os.environ if name.startswith('AGENT_R3_')))"
    log = tmp_path / "log"
    assert spawn([sys.executable, "-c", code], log=log).wait(30) == 0
    names = log.read_text()
    assert "'AGENT_R3_LOG'" in names and "AGENT_R3__" not in names


def test_train_refuses_one_port_for_all_its_roles() -> None:
    from agent_r3.supervise import preflight

    sections = {"model": {"path": "m"}, "tasks": {"dataset": "d"}, "service": {"port": 9464}}
    with pytest.raises(ConfigError, match=r"service\.port=9464: the roles .* cannot share a port"):
        preflight(Config.model_validate(sections))


async def test_the_password_comes_from_its_file_and_is_shown_nowhere(tmp_path: Path) -> None:
    server, secret = RedisServer(tmp_path, password="wrong%20/@:s?#"), tmp_path / "secret"
    server.start()
    try:
        secret.write_text("wrong%20/@:s?#\n")
        store = StoreConfig(url=f"redis://127.0.0.1:{server.port}", password_file=secret)
        check_url(connection_url(store))
        with GroupReader.connect(connection_url(store), "run") as reader:
            reader.set_policy(0, "w")
        async with TrajectoryWriter.connect(connection_url(store), "run") as writer:
            assert (await writer.policy()).weights == "w"
        config = Config.model_validate({"model": {"path": "m"}, "tasks": {"dataset": "d"}, "store": store.model_dump()})
        assert "wrong" not in dump_config(config) and "wrong" not in repr(config)
        secret.write_text("another-secret")
        with pytest.raises(
            UserError, match=r"store\.url redis://:\*\*\*@.* refuses the password.*password_file"
        ) as error:
            check_url(connection_url(store))
        assert "\n" not in str(error.value) and "another" not in str(error.value)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("url", "content", "message"),
    [
        ("redis://h", None, "cannot be read"),
        ("redis://h", b" \n", "is empty"),
        ("redis://h", b"\xff\xfe", "cannot be read"),
        ("redis://:known@h", b"secret", "names a password, and store.password_file another one"),
    ],
)
def test_a_password_file_that_cannot_be_meant_is_one_line(
    tmp_path: Path, url: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        connection_url(StoreConfig(url=url, password_file=path))
    assert "\n" not in str(error.value) and "known" not in str(error.value)


def test_a_user_name_stays_beside_the_password(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("p")
    assert connection_url(StoreConfig(url="rediss://me@h:1/2?x=3", password_file=secret)) == "rediss://me:p@h:1/2?x=3"
    assert connection_url(StoreConfig(url="unix:///a/b.sock", password_file=secret)) == "unix://:p@/a/b.sock"


def test_a_password_without_a_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.password_file is set, but store\.url names no server"):
        config_of(
            {"model": {"path": "m"}, "tasks": {"dataset": "d"}}, [f"store.password_file={os.fspath(tmp_path)}"], "x"
        )
