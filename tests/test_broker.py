"""The broker's wire and rules, over sandboxes of memory: who may ask for what, and what ends with a client."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import pytest
from structlog.testing import CapturingLogger

from agent_r3.config import SandboxConfig
from agent_r3.envs.backend import Backend
from agent_r3.envs.broker_client import BrokerClient, check_broker
from agent_r3.envs.broker_quotas import Quotas
from agent_r3.envs.broker_wire import (
    LARGEST_BODY,
    LEASE_HEADER,
    frame,
    parse_address,
    read_token,
    unframe,
)
from agent_r3.envs.sandbox import FileMissingError
from agent_r3.errors import (
    BrokerError,
    ContractError,
    DaemonError,
    DataError,
    DiskFullError,
    GradingError,
    SandboxDeadError,
    SandboxError,
    UserError,
)
from tests.support.broker import MemoryGrader, MemoryProvider, broker_at, memory_grade
from tests.support.docker import make_task

TOKEN = "a-token-of-some-length"
TASKS = [make_task(f"image-{name}", name=name) for name in ("one", "two")]
ONE, TWO = TASKS


async def until(condition: str, holds: Callable[[], bool], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)
    assert holds(), condition


@dataclass
class Served:
    """A broker over memory, and how to get at it."""

    config: SandboxConfig
    provider: MemoryProvider
    grader: MemoryGrader
    audit: CapturingLogger

    def client(self, name: str = "client", **options: Any) -> BrokerClient:
        return BrokerClient(
            parse_address(str(self.config.broker), "x"), read_token(self.config.broker_token_file), name=name, **options
        )


@pytest.fixture(params=["unix", "tcp"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> SandboxConfig:
    """An address with a token, over each of the two kinds of socket."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"unix://{tmp_path}/broker.sock" if request.param == "unix" else f"http://127.0.0.1:{port}"
    return SandboxConfig(broker=address, broker_token_file=token)


@pytest.fixture
async def served(config: SandboxConfig) -> AsyncIterator[Served]:
    provider, grader = MemoryProvider(), MemoryGrader()
    async with broker_at(config, Backend(provider, grader), TASKS, quotas=Quotas(sandboxes=3)) as audit:
        yield Served(config, provider, grader, audit)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[BrokerClient]:
    async with served.client() as made:
        yield made


def raw_session(config: SandboxConfig, token: str | None = TOKEN) -> aiohttp.ClientSession:
    """HTTP by hand, as a client that is not ours could speak it."""
    address = parse_address(str(config.broker), "x")
    connector = aiohttp.UnixConnector(address.path) if address.path else aiohttp.TCPConnector()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return aiohttp.ClientSession(address.base_url, connector=connector, headers=headers)


async def test_everything_crosses_as_it_is(client: BrokerClient, served: Served) -> None:
    sandbox = await client.acquire(ONE)
    command = "echo 'ü' \udcff\n"
    result = await sandbox.exec(command, timeout_s=2.5, stdin=b"\0\xff", max_report_bytes=10)
    assert (result.output, result.report) == (command.encode(errors="surrogateescape"), b"\0\xff")
    assert (result.total_bytes, result.exit_code, result.timed_out, result.seconds) == (
        len(result.output),
        0,
        False,
        2.5,
    )
    data = bytes(range(256)) * 80_000
    await sandbox.put("/tmp/\udcfe", data)
    assert served.provider.sandboxes[0].files == {"/tmp/\udcfe": data}
    assert await sandbox.get("/tmp/\udcfe") == data
    assert await sandbox.diff() == b"a change"
    assert sandbox.protected and sandbox.id == "memory-0"
    patch = b"\0" * 3_000_000
    assert await client.grade(TWO, patch) == memory_grade(TWO, patch)
    await sandbox.close()
    assert served.provider.sandboxes[0].closed


@pytest.mark.parametrize(
    "error",
    [
        SandboxDeadError("container x of y has died"),
        DiskFullError("x outgrew 10g"),
        DaemonError("no engine"),
        GradingError("grade one: no"),
        DataError("image x is not there"),
        FileMissingError("/nowhere: no such file"),
        PermissionError(13, "Permission denied", "/etc/shadow"),
        OSError(27, "larger than 5 bytes", "/tmp/\udcfe"),
        ValueError("60001 bytes for stdin"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_keeps_its_type_and_text(client: BrokerClient, served: Served, error: Exception) -> None:
    sandbox = await client.acquire(ONE)
    served.provider.sandboxes[0].failure = error
    with pytest.raises(type(error)) as raised:
        await sandbox.exec("fail", timeout_s=5)
    assert type(raised.value) is type(error) and str(raised.value) == str(error)
    assert served.audit.calls[-1].kwargs["outcome"] == type(error).__name__
    assert (await sandbox.exec("still here", timeout_s=5)).output == b"still here"


@pytest.mark.parametrize("error", [KeyError("a bug"), TimeoutError(), type("NewError", (DaemonError,), {})("new")])
async def test_any_other_failure_of_the_broker_is_the_infrastructures(
    client: BrokerClient, served: Served, error: Exception
) -> None:
    sandbox = await client.acquire(ONE)
    served.provider.sandboxes[0].failure = error
    with pytest.raises(DaemonError if isinstance(error, DaemonError) else BrokerError):
        await sandbox.exec("fail", timeout_s=5)
    assert (await sandbox.exec("still here", timeout_s=5)).output == b"still here"


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "\xff" * 20])
async def test_without_the_token_nothing_is_answered_but_that_it_lives(served: Served, token: str | None) -> None:
    async with raw_session(served.config, token) as http:
        for method, path in [
            ("GET", "/v1/lease"),
            *(
                ("POST", f"/v1/{name}")
                for name in ("health", "acquire", "exec", "put", "get", "diff", "close", "grade")
            ),
            ("POST", "/v1/prefetch"),
            ("GET", "/"),
            ("GET", "/elsewhere"),
            ("GET", "/healthz/../v1/lease"),
        ]:
            async with http.request(method, path, data=frame({"task": "one"})) as answer:
                assert answer.status == 401, (method, path)
                assert "one" not in await answer.text()
        async with http.get("/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
    assert {(call.args[0], call.kwargs["peer"] is not None) for call in served.audit.calls} == {("refused", True)}


async def test_clients_can_name_tasks_only(client: BrokerClient, served: Served) -> None:
    with pytest.raises(DataError, match="has no task image-one; the config"):
        await client.acquire(make_task("image-one", name="image-one"))
    for call in (client.prefetch([ONE, make_task("x", name="x")]), client.grade(make_task("x", name="x"), b"")):
        with pytest.raises(DataError, match="has no task x;"):
            await call
    with pytest.raises(ContractError, match="gives no sandbox for grading"):
        await client.acquire_for_grading(ONE)
    assert (await client.acquire(make_task("another-image", name="one"))).id == "memory-0"
    assert served.provider.sandboxes[0].task is ONE  # with the broker's image, whatever the client's task says
    async with raw_session(served.config) as http, http.ws_connect("/v1/lease") as lease:
        headers = {LEASE_HEADER: (await lease.receive_json())["lease"]}
        async with http.post("/v1/acquire", data=frame({"task": "one", "image": "x"}), headers=headers) as answer:
            header, _ = unframe(await answer.read())
            assert (answer.status, header["error"]) == (422, "ValueError") and "image: Extra inputs" in header["text"]
        for name in ("acquire_for_grading", "kill", "start", "images", "containers", "__init__"):
            async with http.post(f"/v1/{name}", data=frame({"task": "one"}), headers=headers) as answer:
                assert answer.status == 404
        for body in (b"", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\3{a}", b'\0\0\0\4"\xff\xff"'):
            async with http.post("/v1/acquire", data=body, headers=headers) as answer:
                assert answer.status == 400
    assert len(served.provider.sandboxes) == 1


async def test_a_client_cannot_touch_the_sandboxes_of_another(served: Served, client: BrokerClient) -> None:
    victim = await client.acquire(ONE)
    async with raw_session(served.config) as http, http.ws_connect("/v1/lease") as connection:
        own = (await connection.receive_json())["lease"]
        command = {"command": "x", "timeout_s": 1, "cwd": None, "persistent": False}
        command |= {"max_output_bytes": 1, "max_report_bytes": 0}
        for lease, refusal in (
            (own, (422, "SandboxError")),
            ("", (410, "BrokerError")),
            (victim.id, (410, "BrokerError")),
        ):
            for name, fields in {
                "exec": command,
                "put": {"path": "/x", "mode": 0},
                "get": {"path": "/x", "max_bytes": 1},
                "diff": {},
            }.items():
                request = frame({"sandbox": victim.id, **fields})
                async with http.post(f"/v1/{name}", data=request, headers={LEASE_HEADER: lease}) as answer:
                    assert (answer.status, unframe(await answer.read())[0]["error"]) == refusal, (lease, name)
            await (
                await http.post("/v1/close", data=frame({"sandbox": victim.id}), headers={LEASE_HEADER: lease})
            ).read()
    assert not served.provider.sandboxes[0].closed
    assert (await victim.exec("still mine", timeout_s=5)).output == b"still mine"


async def test_a_client_has_a_quota_of_sandboxes(client: BrokerClient, served: Served) -> None:
    held = await asyncio.gather(*(client.acquire(ONE) for _ in range(3)))
    with pytest.raises(BrokerError, match="has 3 sandboxes, as many as this broker gives to one; raise its --max-sand"):
        await client.acquire(ONE)
    async with served.client("another") as another:
        await another.acquire(ONE)
    await held[0].close()
    await client.acquire(ONE)


async def test_when_a_client_goes_its_sandboxes_close_and_its_work_stops(served: Served) -> None:
    served.grader.go.clear()
    async with served.client("goes") as goes, served.client("stays") as stays:
        mine, other = await goes.acquire(ONE), await stays.acquire(ONE)
        running = [asyncio.create_task(mine.exec("hang", timeout_s=99)), asyncio.create_task(goes.grade(ONE, b""))]
        await until("both run", lambda: served.provider.sandboxes[0].hanging and served.grader.asked == 1)
        await goes.close()
        assert served.provider.sandboxes[0].closed and served.provider.sandboxes[0].cancelled
        assert served.grader.cancelled == 1
        for call in running:
            with pytest.raises(BrokerError):
                await call
        for request in (mine.exec("x", timeout_s=1), mine.get("/x"), goes.acquire(ONE)):
            with pytest.raises(BrokerError):
                await request
        await mine.close()
        assert (await other.exec("unharmed", timeout_s=5)).output == b"unharmed"


async def test_a_client_that_no_longer_answers_loses_its_lease(config: SandboxConfig) -> None:
    provider = MemoryProvider()
    async with (
        broker_at(config, Backend(provider, MemoryGrader()), TASKS, heartbeat_s=0.2),
        raw_session(config) as http,
    ):
        connection = await http.ws_connect("/v1/lease", autoping=False)
        headers = {LEASE_HEADER: (await connection.receive_json())["lease"]}
        await (await http.post("/v1/acquire", data=frame({"task": "one"}), headers=headers)).read()
        await until("it is closed", lambda: provider.sandboxes[0].closed)


async def test_a_broker_that_no_longer_answers_is_lost(tmp_path: Path) -> None:
    """It hangs: connections stay, and nobody would ever say anything."""
    config = SandboxConfig(broker=f"unix://{tmp_path}/broker.sock")
    silent = aiohttp.web.Application()

    async def lease(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        connection = aiohttp.web.WebSocketResponse(autoping=False)
        await connection.prepare(request)
        await connection.send_json({"lease": "x"})
        await asyncio.sleep(30)
        return connection

    async def hang(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        await asyncio.sleep(30)
        return aiohttp.web.Response()

    silent.add_routes([aiohttp.web.get("/v1/lease", lease), aiohttp.web.post("/v1/acquire", hang)])
    runner = aiohttp.web.AppRunner(silent, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await aiohttp.web.UnixSite(runner, f"{tmp_path}/broker.sock").start()
    async with BrokerClient(parse_address(str(config.broker), "x"), None, name="client", heartbeat_s=0.3) as client:
        with pytest.raises(BrokerError, match=r"acquire: the broker at unix://.* gave no answer"):
            async with asyncio.timeout(10):
                await client.acquire(ONE)
    await runner.cleanup()


async def test_after_a_restart_the_next_call_takes_a_new_lease(config: SandboxConfig) -> None:
    first, second = (Backend(MemoryProvider(), MemoryGrader()) for _ in range(2))
    async with broker_at(config, first, TASKS):
        client = await Served(config, MemoryProvider(), MemoryGrader(), CapturingLogger()).client().__aenter__()
        lost = await client.acquire(ONE)
        running = asyncio.create_task(lost.exec("hang", timeout_s=99))
        await asyncio.sleep(0.05)
    with pytest.raises(BrokerError):
        await running
    waiting = asyncio.create_task(client.acquire(ONE))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    async with broker_at(config, second, TASKS):
        found = await waiting
        assert (await found.exec("new", timeout_s=5)).output == b"new"
        with pytest.raises(BrokerError, match="was lost"):
            await lost.exec("old", timeout_s=5)
        await lost.close()
        await client.close()


async def test_a_client_that_is_started_first_waits_for_its_broker(config: SandboxConfig) -> None:
    provider = MemoryProvider()
    served = Served(config, provider, MemoryGrader(), CapturingLogger())
    client = served.client()
    starting = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(0.3)
    async with broker_at(config, Backend(provider, served.grader), TASKS):
        await starting
        await client.acquire(ONE)
        await client.close()


async def test_a_broker_that_stays_away_is_an_infrastructure_failure(config: SandboxConfig) -> None:
    provider = MemoryProvider()
    async with broker_at(config, Backend(provider, MemoryGrader()), TASKS):
        served = Served(config, provider, MemoryGrader(), CapturingLogger())
        client = await served.client(patience_s=0.2, grade_retries=1).__aenter__()
    for call in (client.acquire(ONE), client.grade(ONE, b""), client.prefetch([ONE])):
        with pytest.raises(BrokerError, match="no broker answers at"):
            await call
    await client.close()


async def test_a_grading_that_was_lost_with_its_broker_is_asked_for_again(config: SandboxConfig) -> None:
    first, second = (Backend(MemoryProvider(), MemoryGrader()) for _ in range(2))
    assert isinstance(first.grader, MemoryGrader)
    first.grader.go.clear()
    async with broker_at(config, first, TASKS):
        served = Served(config, MemoryProvider(), first.grader, CapturingLogger())
        client = await served.client(grade_retries=1).__aenter__()
        grading = asyncio.create_task(client.grade(ONE, b"patch"))
        await until("it was asked", lambda: served.grader.asked == 1)
    async with broker_at(config, second, TASKS):
        assert (await grading).reason == "5 bytes"
        await client.close()


async def test_a_cancelled_call_is_cancelled_in_the_broker(client: BrokerClient, served: Served) -> None:
    sandbox = await client.acquire(ONE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await sandbox.exec("hang", timeout_s=99)
    await until("it stopped there", lambda: served.provider.sandboxes[0].cancelled)
    assert (await sandbox.exec("still here", timeout_s=5)).output == b"still here"
    assert [call.kwargs["outcome"] for call in served.audit.calls if call.args == ("exec",)] == ["cancelled", "ok"]


async def test_a_sandbox_that_comes_after_its_caller_was_cancelled_is_closed(
    client: BrokerClient, served: Served
) -> None:
    served.provider.start.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.acquire(ONE)
    served.provider.start.set()
    await until("it came and went", lambda: bool(served.provider.sandboxes) and served.provider.sandboxes[0].closed)


async def test_close_is_shielded_and_idempotent(client: BrokerClient, served: Served) -> None:
    sandbox = await client.acquire(ONE)
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    await until("it is closed", lambda: served.provider.sandboxes[0].closed)
    await sandbox.close()
    with pytest.raises(SandboxError, match="memory-0: this client has no such sandbox"):
        await sandbox.exec("x", timeout_s=1)


async def test_the_plans_of_all_clients_take_turns(served: Served) -> None:
    async with served.client("a") as a:
        async with served.client("b") as b:
            await a.prefetch([ONE, ONE, ONE])
            await b.prefetch([TWO])
            assert served.provider.plans[-1] == ["one", "two", "one", "one"]
            await a.acquire(ONE)
            await b.prefetch([TWO, TWO])
            assert served.provider.plans[-1] == ["one", "two", "one", "two"]
        assert served.provider.plans[-1] == ["one", "one"]


async def test_what_is_too_large_is_refused(client: BrokerClient, served: Served) -> None:
    sandbox = await client.acquire(ONE)
    with pytest.raises(OSError, match="more than the broker takes"):
        await sandbox.put("/x", bytes(LARGEST_BODY))
    async with raw_session(served.config) as http, http.post("/v1/put", data=bytes(LARGEST_BODY + 1)) as answer:
        assert answer.status == 413
    with pytest.raises(ValueError, match="max_output_bytes"):
        await sandbox.exec("x", timeout_s=1, max_output_bytes=LARGEST_BODY + 1)


async def test_the_audit_log_names_every_operation_and_no_contents(client: BrokerClient, served: Served) -> None:
    sandbox = await client.acquire(ONE)
    await sandbox.exec("secret command", timeout_s=5, stdin=b"secret input")
    await sandbox.put("/secret/path", b"secret data")
    await client.grade(TWO, b"secret patch")
    await sandbox.close()
    lines = [(call.args[0], call.kwargs) for call in served.audit.calls]
    assert [event for event, _ in lines] == ["lease", "acquire", "exec", "put", "grade", "close"]
    for event, fields in lines[1:]:
        assert fields["client"] == "client" and fields["outcome"] == "ok" and 0 <= fields["seconds"] < 5
        assert fields["task"] == ("two" if event == "grade" else "one")
        assert "secret" not in str(fields)


async def test_at_start_a_missing_broker_or_a_wrong_token_is_the_users_to_mend(served: Served, tmp_path: Path) -> None:
    def check(**changes: Any) -> None:
        check_broker(served.config.model_copy(update=changes), TASKS)

    wrong = tmp_path / "wrong"
    wrong.write_text("another-token-of-some-length")
    nobody = f"unix://{tmp_path}/nobody.sock"
    await asyncio.to_thread(check)
    with pytest.raises(UserError, match=r"^sandbox\.broker: no broker answers at unix://.*; start one with"):
        await asyncio.to_thread(check, broker=nobody)
    with pytest.raises(UserError, match=r"^sandbox\.broker: the broker at .* refuses the token; sandbox.broker_token"):
        await asyncio.to_thread(check, broker_token_file=wrong)
    with pytest.raises(DataError, match=r"^sandbox\.broker: the broker has no task three"):
        await asyncio.to_thread(check_broker, served.config, [ONE, make_task("x", name="three")])
    for changes, words in (({"broker": nobody}, "no broker answers"), ({"broker_token_file": wrong}, "refuses the to")):
        config = served.config.model_copy(update=changes)
        with pytest.raises(UserError, match=words):
            await Served(config, served.provider, served.grader, served.audit).client(patience_s=0.2).__aenter__()
