"""`agent-r3 serve` in a run: an engine that is started again has the run's policy, and shows itself."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_r3.config import Config
from agent_r3.rollout.engine_service import current_policy
from agent_r3.store import GroupReader, Policy
from tests.support.engine import engine_config, write_config
from tests.support.telemetry import fetch, free_port, key, scrape


async def test_the_current_policy_is_the_stores_unless_its_weights_are_gone(embedded_url: str, tmp_path: Path) -> None:
    sections = {
        "model": {"path": "m"},
        "tasks": {"dataset": "d"},
        "run": {"name": "run"},
        "store": {"url": embedded_url},
    }
    config = Config.model_validate(sections)
    assert await current_policy(config) is None
    with GroupReader.connect(embedded_url, "run") as reader:
        reader.set_policy(7, str(tmp_path))
        assert await current_policy(config) == Policy(7, str(tmp_path))
        reader.set_policy(8, str(tmp_path / "gone"))
        assert await current_policy(config) is None


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_an_engine_started_in_a_run_serves_its_policy_and_shows_itself(
    tiny_moe: Path, embedded_url: str, tmp_path: Path
) -> None:
    weights, port = shutil.copytree(tiny_moe, tmp_path / "weights" / "v000004"), free_port()
    config = write_config(tmp_path / "config.yaml", tiny_moe, tmp_path, engine_config(metrics=True))
    command = [sys.executable, "-m", "agent_r3.cli", "serve", str(config), f"store.url={embedded_url}", "--name", "e"]
    url = f"http://127.0.0.1:{port}"
    with GroupReader.connect(embedded_url, "served") as reader:
        reader.set_policy(4, str(weights))
        serve = subprocess.Popen([*command, f"service.port={port}"], stdout=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 60
            while (answer := fetch(f"{url}/healthz")) != (503, "starting\n"):
                assert serve.poll() is None and time.monotonic() < deadline, answer
                time.sleep(0.02)
            assert serve.stdout is not None
            line = serve.stdout.readline()
            assert line.startswith("serving at http://")
            engine = line.split()[-1]
            assert fetch(f"{url}/healthz") == (200, "ok\n")
            served = json.loads(fetch(f"{engine}/model_info")[1])
            assert (served["weight_version"], served["model_path"]) == ("4", str(weights))
            found = scrape(url)
            assert found[key("agent_r3_up", role="engine", run="served")] == 1
            assert found[key("agent_r3_policy_version")] == 4
            status, text = fetch(f"{engine}/metrics")
            assert status == 200 and "sglang" in text
            deadline = time.monotonic() + 10
            while (payload := reader.roles()["engine/e"].payload)["state"] != "serving":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert payload["policy_version"] == 4 and payload["url"] == engine

            # The trainer published one while nobody pushed it here.
            newer = shutil.copytree(tiny_moe, tmp_path / "weights" / "v000005")
            reader.set_policy(5, str(newer))
            deadline = time.monotonic() + 60
            while (served := json.loads(fetch(f"{engine}/model_info")[1]))["weight_version"] != "5":
                assert time.monotonic() < deadline, served
                time.sleep(0.2)
            assert served["model_path"] == str(newer)
            serve.terminate()
            assert serve.wait(30) == 0
        finally:
            serve.kill()
        assert reader.roles()["engine/e"].payload["state"] == "stopped"
