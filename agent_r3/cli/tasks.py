"""`agent-r3 tasks`: list, show, build, unpack and verify task datasets."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_r3.envs.harbor_build import Progress
    from agent_r3.envs.images import ImageBuilder
    from agent_r3.envs.verify import Verification
    from agent_r3.types import Task

app = typer.Typer(help="Task datasets: list, show, build, unpack, verify.", no_args_is_help=True)

Dataset = Annotated[
    str,
    typer.Argument(help="`offline`, a .parquet/.json/.jsonl file, a task file, a folder of Harbor tasks, or a hub id."),
]
Split = Annotated[str, typer.Option(help="Split of a hub dataset.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="Task id; may be given several times. Default: all.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


@app.command("list")
def list_tasks(dataset: Dataset = "offline", split: Split = "train", as_json: AsJson = False) -> None:
    """One line a task.

    Example: agent-r3 tasks list offline
    """
    from rich.console import Console
    from rich.table import Table

    tasks = _load(dataset, split, None)
    if as_json:
        _print_json({"tasks": [_facts(task) for task in tasks]})
        return
    table = Table("id", "repo", "tests", "issue", title=f"{dataset}: {len(tasks)} tasks")
    for task in tasks:
        table.add_row(task.id, task.repo, str(len(task.expected)), task.problem_statement.splitlines()[0][:80])
    Console().print(table)


@app.command()
def show(
    task_id: Annotated[str, typer.Argument(help="Id of the task.")],
    dataset: Annotated[str, typer.Option(help="Dataset that holds it; see `tasks list`.")] = "offline",
    split: Split = "train",
    as_json: AsJson = False,
) -> None:
    """The issue, the gold patch and how the task is graded.

    Example: agent-r3 tasks show pathspec__0.12.1
    """
    task = _load(dataset, split, [task_id])[0]
    facts = _facts(task) | {
        "test_command": task.test_command,
        "problem_statement": task.problem_statement,
        "gold_patch": task.gold_patch,
        "expected": dict(task.expected),
    }
    if as_json:
        _print_json(facts)
        return
    for key in ("id", "repo", "image", "tests", "test_command"):
        print(f"{key}: {facts[key]}")
    print(f"\n{task.problem_statement}\n\n{task.gold_patch}")


@app.command()
def build(
    source: Annotated[
        str, typer.Argument(help="`offline`, a task file of the same shape (JSON), or a folder of Harbor tasks.")
    ] = "offline",
    only: Only = None,
    config: Annotated[
        Path | None, typer.Option("--for", help="Training config: build what its tasks section names, instead.")
    ] = None,
    base_image: Annotated[
        str | None,
        typer.Option(help="Image to build on, with git and Python, such as python:3.11. Default: made here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the sources, build the images, run the fixed releases' tests. What is there is not built again.

    Example: agent-r3 tasks build offline --only pathspec__0.12.1
    """
    import asyncio
    import sys
    import time

    from agent_r3.config import SandboxConfig, load_config
    from agent_r3.envs.build import Built, build_tasks
    from agent_r3.envs.images import ImageBuilder
    from agent_r3.envs.local import open_pool
    from agent_r3.envs.offline import offline_spec_path, rows_path

    if config is not None:
        wanted = load_config(config).tasks
        source, only = wanted.dataset, [*wanted.include]
    spec, started = offline_spec_path(source), time.perf_counter()

    def progress(task_id: str, stage: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {task_id}: {stage}", file=sys.stderr)

    if Path(source).is_dir():
        _build_folder(Path(source), only or (), ImageBuilder(base_image), progress, as_json)
        return

    async def work() -> list[Built]:
        builder = ImageBuilder(base_image)
        async with open_pool(SandboxConfig(), run="tasks-build") as pool:
            return await build_tasks(spec, only or (), builder, pool, progress)

    built = asyncio.run(work())
    seconds, reused = time.perf_counter() - started, sum(task.reused for task in built)
    if as_json:
        images = {task.task_id: task.row["docker_image"] for task in built}
        _print_json({"images": images, "reused": reused, "rows": str(rows_path(spec)), "seconds": round(seconds, 1)})
    else:
        print(f"{len(built)} tasks ready, {reused} of them already there, in {seconds:.1f} s; rows: {rows_path(spec)}")


def _build_folder(
    folder: Path, only: "Sequence[str]", builder: "ImageBuilder", progress: "Progress", as_json: bool
) -> None:
    import time

    from agent_r3.envs.harbor_build import build_harbor

    started = time.perf_counter()
    built = build_harbor(folder, only, builder, progress)
    reused, seconds = sum(image.reused for image in built), time.perf_counter() - started
    if as_json:
        tags = {image.task_id: image.image for image in built}
        _print_json({"images": tags, "reused": reused, "seconds": round(seconds, 1)})
    else:
        print(f"{len(built)} images ready, {reused} of them already there, in {seconds:.1f} s")


@app.command()
def verify(
    dataset: Dataset = "offline",
    split: Split = "train",
    only: Only = None,
    times: Annotated[int, typer.Option(min=1, help="Runs of nothing and of gold; several show flaky tests.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Sandboxes at the same time.")] = 4,
    timeout_s: Annotated[float, typer.Option(min=1, help="Wall time of one run of the hidden tests.")] = 300.0,
    slow_s: Annotated[float, typer.Option("--slow", min=0.1, help="Seconds above which a sound task is slow.")] = 120.0,
    out: Annotated[
        Path | None,
        typer.Option(help="File to append each verdict to; tasks it has a verdict on already are not run again."),
    ] = None,
    sandbox: Annotated[str, typer.Option(help="`auto`, `docker` or `bwrap`.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Grade doing nothing (must give 0) and the gold patch (must give 1) of every task; exit code 1 if one is unsound.

    A training config leaves out what FILE does not call sound with `tasks.verified: FILE`.

    Example: agent-r3 tasks verify offline --times 3 --out verified.jsonl
    """
    import asyncio
    import functools
    import sys

    from agent_r3.config import GradingConfig, SandboxConfig
    from agent_r3.envs.grading import Grader
    from agent_r3.envs.harbor_grading import gold_patch
    from agent_r3.envs.local import open_pool
    from agent_r3.envs.verify import VERDICTS, Verification, append_verification, known_verifications, verify_tasks
    from agent_r3.errors import ConfigError

    if sandbox not in ("auto", "docker", "bwrap"):
        raise ConfigError(f"--sandbox {sandbox!r}: must be auto, docker or bwrap")
    tasks = _load(dataset, split, only)
    known: dict[str, Verification] = known_verifications(tasks, out) if out is not None and out.exists() else {}
    missing = [task for task in tasks if task.id not in known]
    done = len(known)

    def on_done(found: Verification) -> None:
        nonlocal done
        done += 1
        if out is not None:
            append_verification(out, found)
        verdict = f"{found.verdict}: {found.problem}" if found.problem else found.verdict
        print(f"[{done:>{len(str(len(tasks)))}}/{len(tasks)}] {found.task_id}: {verdict}", file=sys.stderr)

    async def work() -> list[Verification]:
        config = SandboxConfig(kind=sandbox, max_starting=workers)  # type: ignore[arg-type]
        async with open_pool(config, run="tasks-verify") as pool:
            grader = Grader(pool, GradingConfig(timeout_s=timeout_s, concurrency=workers, reuse=False))
            gold_of = functools.partial(gold_patch, pool)
            return await verify_tasks(
                missing, grader, on_done, times=times, slow_s=slow_s, at_once=workers, gold_of=gold_of
            )

    fresh = asyncio.run(work()) if missing else []
    known.update((one.task_id, one) for one in fresh)
    found = [known[task.id] for task in tasks]
    counts: dict[str, int] = {verdict: sum(one.verdict == verdict for one in found) for verdict in VERDICTS}
    if as_json:
        from dataclasses import asdict

        _print_json({"tasks": [asdict(one) for one in found], **counts, "total": len(found)})
    else:
        _print_verifications(found)
        others = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count and verdict != "sound")
        print(f"{counts['sound']} of {len(found)} sound{', ' + others if others else ''}")
    if counts["sound"] < len(found):
        raise typer.Exit(1)


@app.command()
def rootfs(
    image: Annotated[
        str | None,
        typer.Argument(help="Image of the local Docker engine, or a .tar file of `docker save` or of OCI layout."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Argument(help="Where to unpack; default: the cache, where `sandbox.kind: bwrap` looks.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--for", help="Unpack the images of this dataset instead; the argument is then DIR.")
    ] = None,
    split: Split = "train",
    only: Only = None,
    name: Annotated[str | None, typer.Option(help="Reference of the image in a .tar file that holds no name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Unpack images for bwrap sandboxes. Files that several images share take their space once.

    Example: agent-r3 tasks rootfs --for offline
    """
    import sys
    import time

    from agent_r3.envs.docker import connect
    from agent_r3.envs.rootfs import RootfsStore
    from agent_r3.errors import ConfigError

    if dataset is not None:
        if folder is not None:
            raise ConfigError("give IMAGE or --for DATASET, not both")
        folder = Path(image) if image else None
    elif image is None:
        raise ConfigError("give IMAGE, a .tar file or --for DATASET")
    started, unpacked, reused = time.perf_counter(), list[str](), list[str]()

    def on_image(done: str, there: bool) -> None:
        (reused if there else unpacked).append(done)
        print(f"{time.perf_counter() - started:6.1f} s  {done}{' is there' if there else ''}", file=sys.stderr)

    store = RootfsStore(folder, on_image)
    if dataset is not None:
        store.unpack_images(connect(), [task.image for task in _load(dataset, split, only)])
    elif image is not None and image.endswith(".tar"):
        store.unpack_archive(Path(image), name)
    elif image is not None:
        store.unpack_images(connect(), [image])
    seconds = time.perf_counter() - started
    if as_json:
        facts = {"folder": str(store.folder), "unpacked": unpacked, "reused": reused, "seconds": round(seconds, 1)}
        _print_json(facts)
    else:
        print(
            f"{len(unpacked)} images unpacked in {seconds:.1f} s, {len(reused)} already there; folder: {store.folder}"
        )


def _load(dataset: str, split: str, only: list[str] | None) -> "list[Task]":
    from agent_r3.config import TasksConfig
    from agent_r3.envs.datasets import load_tasks

    return load_tasks(TasksConfig(dataset=dataset, split=split, include=tuple(only or ())))


def _facts(task: "Task") -> dict[str, Any]:
    return {"id": task.id, "dataset": task.dataset, "repo": task.repo, "image": task.image, "tests": len(task.expected)}


def _print_verifications(found: "list[Verification]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "nothing", "gold", "longest s", "verdict")
    for one in found:
        rewards = [" ".join(f"{run.reward:g}" for run in runs) or "-" for runs in (one.noop, one.gold)]
        longest = max((run.seconds for run in (*one.noop, *one.gold)), default=0.0)
        verdict = f"{one.verdict}: {one.problem}" if one.problem else one.verdict
        table.add_row(one.task_id, *rewards, f"{longest:.2f}", verdict)
    Console().print(table)


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, ensure_ascii=False))
