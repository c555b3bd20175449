"""Evaluation in training: what the trainer and the rollout workers must agree on.

An evaluation is a run of its own in the store, named `<run>/eval`: the trainer publishes the policy there and asks for
every task of the held set once; a second worker in each rollout process answers. The training's own data order, groups
and trajectories lie under another name and never hear of it.
"""

import hashlib
import json
from collections.abc import Mapping

from agent_r3.config import Config
from agent_r3.errors import ConfigError
from agent_r3.store import RoleState


def evaluation_config(config: Config) -> Config:
    """The config of the run that the evaluations of a training run are. Raises ConfigError where it can make none.

    Its folder is `<run folder>/eval`. A group is the `eval.samples` episodes of one task.
    """
    held = config.eval
    if held.endpoint is not None:
        raise ConfigError(
            f"eval.every={held.every} evaluates the policy that is trained, but eval.endpoint names another model; "
            "leave eval.endpoint out, or set eval.every=0"
        )
    rollout = {"samples_per_task": held.samples, "concurrency": held.concurrency}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": f"{config.run.name}/eval", "seed": held.seed}),
            "tasks": held.tasks or config.tasks,
            "sampling": held.sampling or config.sampling,
            "rollout": config.rollout.model_copy(update=rollout),
        }
    )


def is_due(config: Config, step: int) -> bool:
    """Whether the policy is evaluated after `step` steps: before the first, every `eval.every`, and after the last."""
    every = config.eval.every
    return every > 0 and (step % every == 0 or step == config.train.steps)


def fingerprint(evaluation: Config) -> str:
    """Equal for equal evaluations: tasks, agent, sampling, number of samples, seed."""
    parts = (
        *(evaluation.tasks.model_dump_json(), evaluation.agent.model_dump_json()),
        *(evaluation.sampling.model_dump_json(), evaluation.rollout.samples_per_task, evaluation.run.seed),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def announcement(evaluation: Config, tasks: int) -> dict[str, object]:
    """A worker's heartbeat in the evaluation's run: it has the held set, of so many tasks."""
    return {"evaluation": fingerprint(evaluation), "tasks": tasks}


def announced_tasks(roles: Mapping[str, RoleState], evaluation: Config) -> int | None:
    """Tasks of the held set by the latest announcement of this very evaluation; None while there is none."""
    found = [
        (state.age_s, tasks)
        for state in roles.values()
        if state.payload.get("evaluation") == fingerprint(evaluation)
        and isinstance(tasks := state.payload.get("tasks"), int)
    ]
    return min(found)[1] if found else None
