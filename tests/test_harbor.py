"""Harbor task folders: read, built, set up for the agent, graded by their own test.sh."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_r3.cli.tasks import app
from agent_r3.config import GradingConfig, SandboxConfig, TasksConfig
from agent_r3.envs.datasets import load_tasks
from agent_r3.envs.grading import Grader
from agent_r3.envs.harbor_grading import gold_patch
from agent_r3.envs.images import ImageBuilder
from agent_r3.envs.local import open_pool
from agent_r3.envs.pool import SandboxPool
from agent_r3.errors import DataError, GradingError
from agent_r3.types import Source, Task

RUNNER = CliRunner()

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 60.0
env = { WORD = "it's fine" }
[environment]
cpus = 1
"""
DOCKERFILE = """
FROM {base}
COPY app.sh /app/app.sh
WORKDIR /app
RUN ldconfig && git init -q -b main . && git add -A && git -c user.name=a -c user.email=a@localhost commit -q -m base
"""
TEST = """
[ "$WORD" = "it's fine" ] || exit 9
case "$(sh app.sh)" in
    hello) echo 1 ;;
    hell*) echo 0.5 ;;
    nothing) exit 3 ;;
    json) echo '{"reward": 0.25, "other": 7}' >/logs/verifier/reward.json; exit ;;
    word) echo well done ;;
    nan) echo nan ;;
    late) sleep 60 ;;
    *) echo 0.0 ;;
esac >/tmp/reward
mv /tmp/reward /logs/verifier/reward.txt
exit 1
"""
SOLVE = "echo 'echo hello' >app.sh\nprintf '\\0\\377' >data.bin\n"


@pytest.fixture
def make_folder(tmp_path: Path, docker_engine: object) -> Callable[..., Path]:
    """Writes a sound task folder `greeting` below a dataset folder; each file given replaces one, None removes it."""
    base = ImageBuilder().base()

    def make(name: str = "greeting", **files: str | None) -> Path:
        folder = tmp_path / "dataset" / name
        sound = {
            "task.toml": TOML,
            "instruction.md": "Make app.sh say hello.\n\nNothing else.\n",
            "environment/Dockerfile": DOCKERFILE.replace("{base}", base),
            "environment/app.sh": "echo bye\n",
            "tests/test.sh": TEST,
            "solution/solve.sh": SOLVE,
        }
        for path, text in (
            sound | {key.replace("__", "/").replace("_dot_", "."): v for key, v in files.items()}
        ).items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return make


def build(folder: Path) -> Task:
    result = RUNNER.invoke(app, ["build", str(folder)])
    assert result.exit_code == 0, result.output
    return load_tasks(TasksConfig(dataset=str(folder)))[0]


@pytest.fixture
def task(make_folder: Callable[..., Path]) -> Task:
    return build(make_folder().parent)


def says(text: str) -> bytes:
    return f"diff --git a/app.sh b/app.sh\n--- a/app.sh\n+++ b/app.sh\n@@ -1 +1 @@\n-echo bye\n+{text}\n".encode()


@pytest.mark.docker
def test_a_folder_becomes_a_task_of_its_image(task: Task, tmp_path: Path) -> None:
    assert (task.id, task.dataset) == ("greeting", str(tmp_path / "dataset"))
    assert (task.source, task.workdir) == (Source.HARBOR, "/app")
    assert task.image.startswith("agent-r3/harbor:greeting-")
    assert task.problem_statement == "Make app.sh say hello.\n\nNothing else."
    assert (task.test_timeout_s, task.network) == (60.0, False)


@pytest.mark.docker
def test_building_again_builds_only_what_changed(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    first = build(folder)
    again = json.loads(RUNNER.invoke(app, ["build", str(folder.parent), "--json"]).stdout)
    assert again["images"] == {"greeting": first.image} and again["reused"] == 1
    (folder / "tests" / "test.sh").write_text(TEST + "#\n")
    assert load_tasks(TasksConfig(dataset=str(folder)))[0].image == first.image
    (folder / "environment" / "app.sh").chmod(0o755)
    with pytest.raises(
        DataError, match=f"the image of task greeting is not built here; run `agent-r3 tasks build {folder}"
    ):
        load_tasks(TasksConfig(dataset=str(folder)))


@pytest.mark.docker
def test_list_and_show_know_harbor_tasks(task: Task, tmp_path: Path) -> None:
    dataset = str(tmp_path / "dataset")
    assert "Make app.sh say hello." in RUNNER.invoke(app, ["list", dataset]).stdout
    assert "bash /tests/test.sh" in RUNNER.invoke(app, ["show", "greeting", "--dataset", dataset]).stdout


@pytest.mark.docker
async def test_the_agent_has_one_commit_and_no_tests_or_solution(task: Task, pool: SandboxPool) -> None:
    sandbox = await pool.acquire(task)
    found = await sandbox.exec("pwd; git log --oneline | wc -l; ls -d /tests /solution /logs", timeout_s=60)
    assert found.text.startswith("/app\n1\nls: cannot access '/tests'") and found.exit_code == 2


@pytest.mark.docker
@pytest.mark.parametrize(
    ("text", "reward", "outcome", "reason"),
    [
        ("echo hello", 1.0, "passed", "the verifier's reward is 1"),
        ("echo hell", 0.5, "failed", "the verifier's reward is 0.5"),
        ("echo no", 0.0, "failed", "the verifier's reward is 0"),
        ("echo json", 0.25, "failed", "the verifier's reward is 0.25"),
        ("echo nothing", 0.0, "ended_early", "test.sh ended with 3 and wrote no reward"),
        ("echo word", 0.0, "ended_early", "reward.txt holds no reward: b'well done"),
        ("echo nan", 0.0, "ended_early", "reward.txt holds no reward: b'nan"),
    ],
)
async def test_the_verifiers_reward_is_the_grade(
    task: Task, pool: SandboxPool, text: str, reward: float, outcome: str, reason: str
) -> None:
    grade = await Grader(pool, GradingConfig(retries=0)).grade(task, says(text))
    assert (grade.reward, grade.outcome) == (reward, outcome)
    assert grade.reason.startswith(reason)


@pytest.mark.docker
async def test_a_change_that_does_not_apply_or_takes_too_long_earns_nothing(task: Task, pool: SandboxPool) -> None:
    grader = Grader(pool, GradingConfig(retries=0))
    unapplied = await grader.grade(task, says("echo hello").replace(b"-echo bye", b"-echo good"))
    assert (unapplied.reward, unapplied.outcome) == (0, "unapplied")
    late = await grader.grade(replace(task, test_timeout_s=2.0), says("echo late"))
    assert (late.reward, late.outcome, late.reason) == (0, "timeout", "timed out after 2 s")


@pytest.mark.docker
@pytest.mark.parametrize("patch", [b"", says("echo hello")])
async def test_a_verifier_that_fails_by_itself_is_no_grade(
    make_folder: Callable[..., Path], pool: SandboxPool, patch: bytes
) -> None:
    task = build(make_folder(tests__test_dot_sh="uvx pytest /tests || exit 1"))
    with pytest.raises(GradingError, match=r"the verifier fails without any change: test\.sh ended with 1"):
        await Grader(pool, GradingConfig(retries=0)).grade(task, patch)


@pytest.mark.docker
async def test_the_solution_gives_the_gold_patch(task: Task, pool: SandboxPool) -> None:
    patch = await gold_patch(pool, task)
    assert b"+echo hello" in patch and b"GIT binary patch" in patch and b"solution" not in patch
    assert (await Grader(pool, GradingConfig(retries=0)).grade(task, patch)).reward == 1


@pytest.mark.docker
async def test_a_solution_that_fails_is_said(make_folder: Callable[..., Path], pool: SandboxPool) -> None:
    task = build(make_folder(solution__solve_dot_sh="echo cannot; exit 4"))
    with pytest.raises(DataError, match="task greeting: its solution ended with exit status 4: cannot"):
        await gold_patch(pool, task)


@pytest.mark.docker
def test_verify_takes_the_solution_as_gold(task: Task, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["verify", str(tmp_path / "dataset"), "--sandbox", "docker", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["tasks"][0]
    assert (found["verdict"], found["noop"][0]["reward"], found["gold"][0]["reward"]) == ("sound", 0.0, 1.0)


@pytest.mark.docker
async def test_a_task_that_asks_for_the_internet_gets_it_only_where_the_config_says_so(
    make_folder: Callable[..., Path], run_name: str
) -> None:
    task = build(make_folder(task_dot_toml=TOML + "allow_internet = true\n"))
    assert task.network
    async with open_pool(SandboxConfig(), run=run_name) as pool:
        with pytest.raises(DataError, match="task greeting asks for a network"):
            await pool.acquire(task)


@pytest.mark.docker
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"environment__Dockerfile": "FROM nothing-of-that-name-here:1\n"}, "build agent-r3/harbor:greeting-.* failed"),
        ({"environment__Dockerfile": "FROM {base}\nWORKDIR /\n"}, "its image must set a WORKDIR"),
        ({"environment__Dockerfile": None}, "neither environment/Dockerfile nor `environment.docker_image`"),
        ({"environment__docker-compose_dot_yaml": "services: {}\n"}, "tasks of several containers"),
    ],
)
def test_an_image_that_cannot_be_built_is_told_in_one_line(
    make_folder: Callable[..., Path], files: dict[str, str | None], message: str
) -> None:
    base = ImageBuilder().base()
    folder = make_folder(**{name: text and text.replace("{base}", base) for name, text in files.items()})
    result = RUNNER.invoke(app, ["build", str(folder)])
    assert result.exit_code != 0 and result.exception is not None
    with pytest.raises(type(result.exception), match=message):
        raise result.exception
    assert "\n" not in str(result.exception)


@pytest.mark.docker
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tests__test_dot_sh": None}, "read .*greeting/tests/test.sh: FileNotFoundError"),
        ({"instruction_dot_md": None}, "read .*greeting/instruction.md: FileNotFoundError"),
        ({"instruction_dot_md": " \n"}, "greeting/instruction.md is empty"),
        ({"solution__solve_dot_sh": None, "solution__other": "x"}, "read .*greeting/solution/solve.sh: FileNotFound"),
        ({"task_dot_toml": "[verifier\n"}, "read .*greeting/task.toml: TOMLDecodeError"),
        (
            {"task_dot_toml": "[verifier]\ntimeout_sec = 0\n"},
            "greeting/task.toml: not supported here: `verifier.timeout",
        ),
        ({"task_dot_toml": "verifier = 7\n"}, "greeting/task.toml: not supported here: `verifier`"),
        ({"task_dot_toml": "[[steps]]\nname = 'a'\n"}, "task.toml: not supported here: `steps`"),
        ({"task_dot_toml": "[verifier]\nenv = {KEY = '${KEY}'}\n"}, "`verifier.env.KEY` asks for a variable of this"),
        ({"task_dot_toml": "[verifier]\nenvironment_mode = 'separate'\n"}, "`verifier.environment_mode`"),
        ({"task_dot_toml": "[environment]\nenv = {A = 'b'}\n"}, "`environment.env`"),
        ({"task_dot_toml": "[environment]\nnetwork_mode = 'allowlist'\n"}, "`environment.network_mode`"),
        ({"task_dot_toml": "[verifier]\nnetwork_mode = 'public'\n"}, "its verifier asks for a network"),
    ],
)
def test_a_malformed_folder_is_told_with_file_and_key(
    make_folder: Callable[..., Path], files: dict[str, str | None], message: str
) -> None:
    folder = make_folder(**files)
    with pytest.raises(DataError, match=message) as caught:
        load_tasks(TasksConfig(dataset=str(folder.parent)))
    assert "\n" not in str(caught.value)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no Harbor task: neither task\.toml nor folders with one"):
        load_tasks(TasksConfig(dataset=str(tmp_path)))
    with pytest.raises(DataError, match="neither `offline`"):
        load_tasks(TasksConfig(dataset=str(tmp_path / "missing")))
    shutil.rmtree(tmp_path)
