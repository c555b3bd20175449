"""What a client of the broker may have, and the audit log: who was refused and why, in a file that may be moved."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import CapturingLogger

from agent_r3.config import SandboxConfig
from agent_r3.envs.backend import Backend
from agent_r3.envs.broker import listen, serving
from agent_r3.envs.broker_audit import AuditFile, Reason, Refused, audit_logger
from agent_r3.envs.broker_client import BrokerClient
from agent_r3.envs.broker_quotas import Quotas, Usage
from agent_r3.envs.broker_wire import LARGEST_BODY, LEASE_HEADER, frame, parse_address, unframe
from agent_r3.errors import BrokerError, QuotaError
from tests.support.broker import MemoryGrader, MemoryProvider, broker_at, broker_process, memory_grade
from tests.support.docker import make_task
from tests.support.r2e_rows import r2e_row

TOKEN = "a-token-of-some-length"
ONE = make_task("image-one", name="one")


class Broker:
    """A broker over memory at a unix socket, with its token."""

    def __init__(self, folder: Path) -> None:
        token = folder / "token"
        token.write_text(TOKEN)
        self.config = SandboxConfig(broker=f"unix://{folder}/broker.sock", broker_token_file=token)
        self.provider, self.grader = MemoryProvider(), MemoryGrader()
        self.audit = CapturingLogger()

    @asynccontextmanager
    async def serving(self, quotas: Quotas, usage: Usage | None = None) -> AsyncIterator[None]:
        backend = Backend(self.provider, self.grader)
        async with broker_at(self.config, backend, [ONE], quotas=quotas, usage=usage) as self.audit:
            yield

    def client(self, name: str = "client", **options: Any) -> BrokerClient:
        return BrokerClient(parse_address(str(self.config.broker), "x"), TOKEN, name=name, **options)

    def raw(self, token: str = TOKEN) -> aiohttp.ClientSession:
        """HTTP by hand, as a client that is not ours could speak it."""
        path = parse_address(str(self.config.broker), "x").path
        assert path is not None
        headers = {"Authorization": f"Bearer {token}"}
        return aiohttp.ClientSession("http://broker", connector=aiohttp.UnixConnector(path), headers=headers)

    def refusals(self) -> list[tuple[str, str | None]]:
        """Reason and client of every refused request, in order."""
        lines = [call.kwargs for call in self.audit.calls]
        return [(line["refused"], line.get("client")) for line in lines if "refused" in line]


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return Broker(tmp_path)


async def until(condition: str, holds: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        await asyncio.sleep(0.01)


def test_starts_are_counted_over_any_minute_and_for_each_client() -> None:
    now = 1_000.0
    usage = Usage(Quotas(starts_per_minute=3), clock=lambda: now)
    for moment in (0.0, 10.0, 20.0):
        now = 1_000.0 + moment
        usage.start("a")
    usage.start("b")
    now = 1_045.0
    with pytest.raises(Refused) as refused:
        usage.start("a")
    assert refused.value.reason is Reason.STARTS
    error = refused.value.error
    assert isinstance(error, QuotaError) and error.retry_after_s == pytest.approx(15)
    assert "client a has started 3 sandboxes in a minute" in str(error) and "--max-starts-per-minute" in str(error)
    now = 1_060.0
    usage.start("a")  # the one of 1,000 is a minute ago, the one of 1,010 is not
    with pytest.raises(Refused):
        usage.start("a")


async def test_a_client_with_too_many_gradings_waits_and_gets_every_grade(broker: Broker) -> None:
    broker.grader.go.clear()
    async with broker.serving(Quotas(gradings=2)), broker.client("busy") as busy, broker.client("calm") as calm:
        asked = [asyncio.create_task(busy.grade(ONE, b"x" * size)) for size in range(4)]
        await until("two are refused", lambda: len(broker.refusals()) >= 2)
        assert set(broker.refusals()) == {("grading_quota", "busy")}
        other = asyncio.create_task(calm.grade(ONE, b"calm"))
        await until("another client is not held up", lambda: broker.grader.asked == 3)
        broker.grader.go.set()
        assert await asyncio.gather(*asked) == [memory_grade(ONE, b"x" * size) for size in range(4)]
        assert (await other).reason == "4 bytes"
    assert broker.grader.asked == 5


async def test_a_refusal_for_the_quota_is_typed_and_says_when_to_ask_again(broker: Broker) -> None:
    broker.grader.go.clear()
    async with (
        broker.serving(Quotas(gradings=1)),
        broker.raw() as http,
        http.ws_connect("/v1/lease", params={"client": "raw"}) as lease,
    ):
        headers = {LEASE_HEADER: (await lease.receive_json())["lease"]}
        first = asyncio.create_task(http.post("/v1/grade", data=frame({"task": "one"}), headers=headers).__aenter__())
        await until("one is under way", lambda: broker.grader.asked == 1)
        async with http.post("/v1/grade", data=frame({"task": "one"}), headers=headers) as answer:
            header, _ = unframe(await answer.read())
        assert (answer.status, header["error"], header["retry_after_s"]) == (422, "QuotaError", 1.0)
        assert header["text"].startswith("client raw has 1 gradings under way") and "--max-gradings" in header["text"]
        broker.grader.go.set()
        assert (await first).status == 200


async def test_a_client_that_starts_too_fast_is_slowed_down(broker: Broker) -> None:
    quotas = Quotas(starts_per_minute=2)
    async with broker.serving(quotas, Usage(quotas, minute_s=0.6)):
        async with broker.client("fast") as fast:
            began = time.monotonic()
            for _ in range(5):
                await fast.acquire(ONE)
            assert time.monotonic() - began > 1.1  # two, two more after 0.6 s, the last after 1.2 s
        assert ("start_quota", "fast") in broker.refusals()
    assert len(broker.provider.sandboxes) == 5


async def test_a_new_lease_brings_no_new_starts_and_others_have_their_own(broker: Broker) -> None:
    quotas = Quotas(starts_per_minute=1)
    async with broker.serving(quotas, Usage(quotas, minute_s=1_000)):
        async with broker.client("one") as client:
            await client.acquire(ONE)
        async with broker.client("one") as again, broker.client("another") as another:
            await another.acquire(ONE)
            waiting = asyncio.create_task(again.acquire(ONE))
            await until("it is refused", lambda: broker.refusals() == [("start_quota", "one")])
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await asyncio.sleep(0)
            assert not [task for task in asyncio.all_tasks() if "_acquire" in repr(task.get_coro())]
    assert len(broker.provider.sandboxes) == 2


async def test_every_refused_request_is_in_the_audit_log_with_client_and_reason(broker: Broker) -> None:
    async with (
        broker.serving(Quotas(sandboxes=1)),
        broker.raw() as http,
        broker.raw("wrong") as stranger,
        http.ws_connect("/v1/lease", params={"client": "raw"}) as lease,
    ):
        own = {LEASE_HEADER: (await lease.receive_json())["lease"]}

        async def refused(path: str, data: bytes, reason: Reason, client: str | None = "raw", **options: Any) -> None:
            before = len(broker.refusals())
            options = {"headers": own, **options}
            async with options.pop("session", http).post(path, data=data, **options) as answer:
                assert answer.status >= 400
            assert broker.refusals()[before:] == [(reason.value, client)]

        one = frame({"task": "one"})
        claimed = {"session": stranger, "headers": {}, "params": {"client": "claimed"}}
        await refused("/v1/acquire", one, Reason.TOKEN, "claimed", **claimed)
        await refused("/v1/images", one, Reason.OPERATION)
        await refused("/elsewhere", one, Reason.OPERATION)
        await refused("/healthz", one, Reason.OPERATION)  # not by POST
        await refused("/v1/acquire", b"\xff" * 8, Reason.MALFORMED)
        await refused("/v1/acquire", frame({"task": "one", "image": "x"}), Reason.MALFORMED)
        await refused("/v1/put", bytes(LARGEST_BODY + 1), Reason.TOO_LARGE)
        await refused("/v1/acquire", one, Reason.LEASE, None, headers={LEASE_HEADER: "made-up"})
        await refused("/v1/acquire", frame({"task": "three"}), Reason.TASK)
        await refused("/v1/diff", frame({"sandbox": "of-another"}), Reason.SANDBOX)
        async with http.post("/v1/acquire", data=one, headers=own) as answer:
            assert answer.status == 200
        await refused("/v1/acquire", one, Reason.SANDBOXES)
        await lease.send_str("end")
        await until("the lease has ended", lambda: broker.audit.calls[-1].args == ("lease ended",))
        await refused("/v1/acquire", one, Reason.LEASE)


async def test_a_lease_that_is_refused_since_the_broker_closes_is_in_the_audit_log(broker: Broker) -> None:
    from agent_r3.envs.broker_leases import Leases

    audit = CapturingLogger()
    leases = Leases(Backend(broker.provider, broker.grader), [ONE], quotas=Quotas(), audit=audit)
    await leases.close()
    with pytest.raises(BrokerError, match="closing"):
        leases.open("late")
    assert audit.calls[-1].kwargs == {"refused": "closing", "client": "late"}


async def test_an_audit_log_on_a_full_disk_makes_the_broker_unhealthy_and_stops_no_work(broker: Broker) -> None:
    file = AuditFile(Path("/dev/full"))
    backend = Backend(broker.provider, broker.grader)
    listener = listen(parse_address(str(broker.config.broker), "x"), TOKEN)
    audit = audit_logger(file)
    async with (
        serving(backend, [ONE], listener, TOKEN, quotas=Quotas(), audit=audit, problem=lambda: file.problem),
        broker.raw() as http,
    ):
        async with http.get("/healthz") as answer:
            assert answer.status == 200
        async with broker.client() as client:
            await client.acquire(ONE)
        async with http.get("/healthz") as answer:
            told = (answer.status, await answer.text())
        assert told == (503, "the audit log /dev/full cannot be written: No space left on device\n")
    file.close()


def test_the_audit_log_is_healthy_again_when_it_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    file = AuditFile(path)
    audit = audit_logger(file)
    audit.info("lost")
    assert file.problem is not None
    path.unlink()
    file.reopen()
    audit.info("kept", client="x")
    assert file.problem is None
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["kept"]
    path.rename(tmp_path / "audit.jsonl.1")
    path.mkdir()  # so that it cannot be opened again
    file.reopen()
    audit.info("still kept")
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl.1").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["kept", "still kept"]
    assert lines[0]["client"] == "x" and lines[0]["timestamp"].endswith("Z")


@pytest.mark.docker
async def test_sighup_opens_the_audit_log_again_and_ends_nothing(
    tmp_path: Path, run_name: str, sandbox_image: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(r2e_row(docker_image=sandbox_image, instance_id="task")))
    sections = {"run": {"name": run_name}, "tasks": {"dataset": str(rows)}, "sandbox": {"kind": "docker"}}
    with broker_process(tmp_path, sections, "--max-starts-per-minute", "5", "--max-gradings", "2") as started:
        address = parse_address(started.address, "x")
        log, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
        async with BrokerClient(address, None, name="client") as client:
            sandbox = await client.acquire(make_task("x", name="task"))
            log.rename(moved)
            await sandbox.exec("true", timeout_s=20)  # goes on in the file that was moved
            started.process.send_signal(signal.SIGHUP)
            await until("a new file is there", log.exists)
            assert (await sandbox.exec("echo unharmed", timeout_s=20)).output == b"unharmed\n"
            assert started.process.poll() is None
    old, new = ([json.loads(line) for line in path.read_text().splitlines()] for path in (moved, log))
    assert [line["event"] for line in old] == ["listening", "lease", "acquire", "exec"]
    assert [line["event"] for line in new] == ["exec", "lease ended", "stopped"]
