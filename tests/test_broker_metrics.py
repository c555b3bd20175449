"""What the broker shows of its clients, over its real wire and real HTTP."""

import asyncio
import time
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from agent_r3.config import GradingConfig, SandboxConfig, ServiceConfig
from agent_r3.envs.backend import Backend, open_backend
from agent_r3.envs.broker import listen, serving
from agent_r3.envs.broker_quotas import Quotas
from agent_r3.envs.broker_wire import parse_address
from agent_r3.errors import BrokerError, DataError
from agent_r3.telemetry import Telemetry, serve_telemetry
from tests.support.broker import MemoryGrader, MemoryProvider
from tests.support.docker import make_task
from tests.support.telemetry import key, scrape, total

TASK = make_task("image", "task")


async def test_the_broker_counts_clients_sandboxes_grades_and_refusals(tmp_path: Path) -> None:
    address, telemetry = f"unix://{tmp_path}/b.sock", Telemetry("broker", "demo")
    listener = listen(parse_address(address, "test"), None)
    backend, audit = Backend(MemoryProvider(), MemoryGrader()), CapturingLogger()
    async with serving(backend, [TASK], listener, None, quotas=Quotas(sandboxes=2), audit=audit) as leases:
        leases.show(telemetry)
        with serve_telemetry(ServiceConfig(port=0), telemetry, lambda: None) as url:
            before = await asyncio.to_thread(scrape, url)
            config = SandboxConfig(broker=address)
            async with open_backend(config, GradingConfig(), run="demo", owner="w") as (provider, grader):
                sandbox = await provider.acquire(TASK)
                await provider.acquire(TASK)
                with pytest.raises(BrokerError, match="as many as this broker gives to one"):
                    await provider.acquire(TASK)
                with pytest.raises(DataError, match="the broker has no task other"):
                    await provider.acquire(make_task("image", "other"))
                await grader.grade(TASK, b"patch")
                full = await asyncio.to_thread(scrape, url)
                await sandbox.close()
                less = await asyncio.to_thread(scrape, url)
            deadline = time.monotonic() + 10
            while (after := await asyncio.to_thread(scrape, url))[key("agent_r3_broker_clients")]:
                assert time.monotonic() < deadline
    assert total(before, "agent_r3_broker_refusals_total") == total(before, "agent_r3_grades_total") == 0
    assert key("agent_r3_broker_refusals_total", reason="token") in before
    assert full[key("agent_r3_broker_clients")] == 1 and full[key("agent_r3_sandbox_starts_total")] == 2
    assert [samples[key("agent_r3_sandboxes")] for samples in (before, full, less, after)] == [0, 2, 1, 0]
    assert full[key("agent_r3_grades_total", outcome="failed")] == 1 == total(full, "agent_r3_grades_total")
    refused = {
        reason: full[key("agent_r3_broker_refusals_total", reason=reason)] for reason in ("sandbox_quota", "task")
    }
    assert refused == {"sandbox_quota": 1, "task": 1} and total(full, "agent_r3_broker_refusals_total") == 2
