"""The images of the stack: what each holds and what it must not hold."""

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import base
from tests.stack.stack import ROOT, TAG

ROLES = ("rollout", "broker", "trainer", "engine")
ALL = (*ROLES, "redis", "prometheus")
COMPILERS = ("gcc", "cc", "c++", "clang", "ld", "as", "make", "rustc", "go", "nvcc", "ptxas")

needs_images = [pytest.mark.docker, pytest.mark.timeout(1200), pytest.mark.usefixtures("stack_images")]


def run(image: str, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh container as the stack would: read-only root, no network, no capability."""
    safe = ("--read-only", "--tmpfs", "/tmp", "--network", "none", "--cap-drop", "ALL", *options)
    entry = ("--entrypoint", command[0]) if command else ()
    return subprocess.run(
        ["docker", "run", "--rm", *safe, *entry, f"agent-r3/{image}:{TAG}", *command[1:]],
        capture_output=True,
        text=True,
        timeout=280,  # SGLang and Megatron take their time on a busy machine
    )


def inspect(image: str) -> dict[str, object]:
    found = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True, check=True)
    facts: dict[str, object] = json.loads(found.stdout)[0]
    return facts


def test_the_locks_of_the_images_are_their_shares_of_the_pinned_stack() -> None:
    checked = subprocess.run([sys.executable, ROOT / "scripts" / "locks.py", "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


class TestBase:
    @pytest.fixture
    def shipped(self) -> Iterator[tarfile.TarFile]:
        files = {
            "usr/share/ca-certificates/mozilla/one.crt": b"ONE",
            "usr/share/ca-certificates/mozilla/two.crt": b"TWO\n",
            "etc/ssl/certs/ca-certificates.crt": b"ONE\nTWO\nCOMPANY\n",
            "etc/ssl/certs/company.pem": b"COMPANY\n",
            "etc/hostname-like": b"kept",
        }
        source, out = io.BytesIO(), io.BytesIO()
        with tarfile.open(fileobj=source, mode="w") as tar:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        source.seek(0)
        base.shippable(source, out)
        out.seek(0)
        with tarfile.open(fileobj=out) as tar:
            yield tar

    def test_a_certificate_that_only_this_host_trusts_stays_here(self, shipped: tarfile.TarFile) -> None:
        assert "etc/ssl/certs/company.pem" not in shipped.getnames()
        assert b"COMPANY" not in b"".join(
            file.read() for name in shipped.getnames() if (file := shipped.extractfile(name))
        )

    def test_the_distribution_s_certificates_and_all_other_files_are_kept(self, shipped: tarfile.TarFile) -> None:
        bundle = shipped.extractfile("etc/ssl/certs/ca-certificates.crt")
        assert bundle is not None and bundle.read() == b"ONE\nTWO\n"
        other = shipped.extractfile("etc/hostname-like")
        assert other is not None and other.read() == b"kept"


class TestEveryImage:
    pytestmark = needs_images

    @pytest.mark.parametrize("image", ALL)
    def test_runs_as_an_ordinary_user_who_owns_what_is_mounted(self, image: str) -> None:
        places = {"redis": "/data", "prometheus": "/prometheus"}.get(image, "/runs /cache /cache/pulled")
        done = run(image, "sh", "-c", f"id -u; stat -c %u {places}")
        assert set(done.stdout.split()) == {"10001"}, done.stderr

    @pytest.mark.parametrize("image", ALL)
    def test_holds_no_compiler(self, image: str) -> None:
        found = run(image, "sh", "-c", f"for tool in {' '.join(COMPILERS)}; do command -v $tool; done; echo searched")
        assert found.stdout == "searched\n", found.stdout + found.stderr
        anywhere = run(image, "find", "/usr", "/opt", "-name", "ptxas", "-o", "-name", "cc1", "-o", "-name", "*-gcc*")
        assert not [line for line in anywhere.stdout.split() if "/doc/" not in line and not line.endswith(".py")]

    @pytest.mark.parametrize("image", ALL)
    def test_trusts_no_one_whom_the_distribution_does_not(self, image: str) -> None:
        """In the system's store, and in what packages bring along; certificates of this host are looked for in both."""
        found = run(image, "sh", "-c", "cat /etc/ssl/certs/* /usr/local/share/ca-certificates/* 2>/dev/null; echo read")
        assert found.stdout.endswith("read\n")
        packaged = run(image, "sh", "-c", "find /usr/share/ca-certificates -name '*.crt' -exec cat {} +").stdout
        assert certificates(found.stdout) <= certificates(packaged)
        own = certificates(Path("/etc/ssl/certs/ca-certificates.crt").read_text()) - certificates(packaged)
        everywhere = "find / -xdev '(' -name '*.pem' -o -name '*.crt' ')' 2>/dev/null | xargs cat"
        bundles = run(image, "sh", "-c", everywhere).stdout
        assert not own & certificates(bundles)

    @pytest.mark.parametrize("image", ROLES)
    def test_starts_the_command(self, image: str) -> None:
        done = run(image)
        assert done.returncode == 0 and "agent-r3" in done.stdout, done.stderr


def certificates(text: str) -> set[str]:
    """Digests of the certificates in a text."""
    bodies = re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END", text, re.S)
    return {hashlib.sha256("".join(body.split()).encode()).hexdigest() for body in bodies}


class TestRoles:
    pytestmark = needs_images

    def modules(self, image: str, *names: str) -> list[str]:
        """Those of the modules that can be found in the image."""
        code = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n)))"
        done = run(image, "python", "-c", code, *names)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def test_rollout_has_no_torch_and_stays_under_400_mb_above_its_base(self) -> None:
        assert self.modules("rollout", "torch", "sglang", "megatron", "tokenizers") == ["tokenizers"]
        facts = inspect(f"agent-r3/rollout:{TAG}")
        config = facts["Config"]
        assert isinstance(config, dict)
        below = inspect(config["Labels"]["agent-r3.base"])["Size"]
        assert isinstance(facts["Size"], int) and isinstance(below, int)
        assert facts["Size"] - below < 400e6

    @pytest.mark.parametrize("image", ROLES)
    def test_only_the_broker_can_talk_to_docker(self, image: str) -> None:
        assert self.modules(image, "docker") == (["docker"] if image == "broker" else [])
        assert run(image, "sh", "-c", "command -v docker dockerd").stdout == ""

    def test_a_worker_behind_a_broker_imports(self) -> None:
        done = run("rollout", "python", "-c", "import agent_r3.rollout.service, pyarrow.parquet; print('ok')")
        assert done.stdout == "ok\n", done.stderr

    def test_the_broker_imports_with_the_harness_that_grades(self) -> None:
        done = run("broker", "python", "-c", "import agent_r3.envs.broker, swebench.harness.grading; print('ok')")
        assert done.stdout == "ok\n", done.stderr

    def test_the_trainer_imports_with_replay_losses_and_reports(self) -> None:
        code = "import agent_r3.trainer.loop as loop, agent_r3.trainer.losses as losses, agent_r3.report_page"
        done = run("trainer", "python", "-c", f"{code}; losses.load_verl(); print('ok')")
        assert done.stdout.endswith("ok\n"), done.stderr

    def test_the_engine_imports_sglang_with_bytecode_of_its_own(self) -> None:
        code = (
            "import agent_r3.rollout.sglang_server, sglang.srt.managers.scheduler as scheduler, pathlib;"
            "print(pathlib.Path(scheduler.__cached__).is_file())"
        )
        done = run("engine", "python", "-c", code, options=("-e", "SGLANG_USE_CPU_ENGINE=1"))
        assert done.stdout.endswith("True\n"), done.stderr


class TestServices:
    pytestmark = needs_images

    def test_redis_answers(self) -> None:
        serve = "redis-server --dir /tmp --save '' --daemonize yes >/tmp/log"
        done = run("redis", "sh", "-c", f"{serve}; until redis-cli ping 2>&1 | grep PONG; do :; done")
        assert done.stdout == "PONG\n", done.stderr

    def test_prometheus_and_its_tool_are_there(self) -> None:
        assert run("prometheus").returncode != 0  # no configuration is mounted, and it says so
        assert "prometheus.yml" in run("prometheus").stderr
        checked = run("prometheus", "promtool", "--version")
        assert checked.returncode == 0, checked.stderr
        serve = "echo >/tmp/p.yml; prometheus --config.file=/tmp/p.yml --storage.tsdb.path=/tmp/d 2>/tmp/log &"
        ask = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
        pages = f"until python3 -c '{ask}' http://127.0.0.1:9090/classic/targets 2>/dev/null; do sleep 0.2; done"
        script = f"python3 -c '{ask}' http://127.0.0.1:9090/classic/static/jquery/jquery.min.js"
        shown = run("prometheus", "sh", "-c", f"{serve} {pages}; {script}")
        assert "<title>Prometheus" in shown.stdout and "jQuery" in shown.stdout, shown.stderr


@pytest.mark.docker
def test_compose_and_buildx_are_there_after_the_script_and_a_second_run_changes_nothing() -> None:
    script = ROOT / "scripts" / "docker-plugins.sh"
    for _ in range(2):
        done = subprocess.run([script], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
    for plugin in ("compose", "buildx"):
        assert subprocess.run(["docker", plugin, "version"], capture_output=True).returncode == 0
