"""The broker's addresses, its token, its socket, and errors on their way."""

import stat
from pathlib import Path

import pytest

from agent_r3.envs.broker import listen
from agent_r3.envs.broker_wire import error_from, error_header, parse_address, read_token
from agent_r3.errors import AgentR3Error, BrokerError, ConfigError, UserError


def test_tcp_needs_a_token() -> None:
    with pytest.raises(ConfigError, match=r"does not listen at http://127.0.0.1:0 without a token: give --token-file"):
        listen(parse_address("http://127.0.0.1:0", "x"), None)


def test_a_unix_socket_is_its_owners_alone_and_a_live_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    address = parse_address(f"unix://{path}", "x")
    first = listen(address, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UserError, match=f"a broker already listens at unix://{path}"):
        listen(address, None)
    first.close()
    listen(address, None).close()  # the one that nobody serves is replaced
    path.unlink()
    path.write_text("precious")
    with pytest.raises(UserError, match="is no socket"):
        listen(address, None)
    assert path.read_text() == "precious"
    for wrong in (f"unix://{tmp_path}/none/broker.sock", f"unix://{tmp_path}/{'x' * 200}"):
        with pytest.raises(UserError, match="cannot listen at"):
            listen(parse_address(wrong, "x"), None)


@pytest.mark.parametrize(
    "text",
    ["", "unix://", "unix://relative/path", "/run/x.sock", "http://host", "https://host:1", "http://host:x",
     "http://u:p@host:1", "http://host:1/path", "http://[::1"],
)  # fmt: skip
def test_an_address_that_is_none_is_the_users_to_mend(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.broker: .* is neither unix:///PATH nor http://HOST:PORT"):
        parse_address(text, "sandbox.broker")


@pytest.mark.parametrize("content", ["", "short", "two lines of\nsome length each", "\xff" * 20])
def test_a_token_that_is_none_is_the_users_to_mend(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ConfigError, match="must be one line of at least 16 ASCII characters"):
        read_token(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_every_error_of_ours_is_known_by_name() -> None:
    def kinds(kind: type[AgentR3Error]) -> list[type[AgentR3Error]]:
        return [kind, *(found for sub in kind.__subclasses__() for found in kinds(sub))]

    for kind in kinds(AgentR3Error):
        if kind.__module__ == "agent_r3.errors":
            assert type(error_from(error_header(kind("text")))) is kind
    assert type(error_from({"error": "OfALaterVersion", "text": "x"})) is BrokerError
