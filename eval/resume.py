"""May an evaluation go on in a folder: only where nothing has changed that what is measured depends on."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agent_r3.config import Config, dump_config, load_config
from agent_r3.errors import ConfigError
from agent_r3.eval.folder import EvaluationFolder
from agent_r3.journal import write_whole

# What decides where and how fast an evaluation runs, but not what comes out of it. All other keys must stay.
_FREE = {
    *("run", "store", "rollout", "train"),
    *("eval.tasks", "eval.sampling"),  # in force as `tasks` and `sampling`
    *("eval.samples", "eval.concurrency", "eval.gold", "eval.every", "eval.endpoint_key"),
    *("engine.urls", "engine.device", "engine.host", "engine.port", "engine.context_length"),
    *("engine.max_total_tokens", "engine.max_running_requests", "engine.chunked_prefill_size"),
    *("engine.tensor_parallel", "engine.routed_experts", "engine.start_timeout_s", "engine.request_timeout_s"),
    *("sandbox.kind", "sandbox.broker", "sandbox.broker_token_file", "sandbox.disk_floor", "sandbox.watch_s"),
    *("sandbox.pull", "sandbox.pull_timeout_s", "sandbox.rootfs"),
    *("sandbox.warm", "sandbox.max_starting", "sandbox.start_timeout_s"),
    *("grading.concurrency", "grading.retries", "grading.reuse"),
}


def settle_config(folder: EvaluationFolder, config: Config) -> None:
    """Take `config` for the folder's, and write it down there.

    Raises ConfigError when the folder's own differs in what is measured, or has more samples.
    """
    path = folder.path / "config.yaml"
    if path.is_file():
        require_agreement(load_config(path), config, str(folder.path))
    elif folder.predictions:
        raise ConfigError(f"{folder.path} has predictions but no config.yaml; choose another --out")
    write_whole(path, dump_config(config))


def require_agreement(there: Config, now: Config, where: str) -> None:
    """Raises ConfigError that names the first key that differs, with both values."""
    old, new = measured(there), measured(now)
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            was, is_now = (_shown(values.get(key)) for values in (old, new))
            raise ConfigError(f"{where} was evaluated with {key}={was}, now it is {is_now}; choose another --out")
    if now.eval.samples < there.eval.samples:
        raise ConfigError(
            f"{where} has eval.samples={there.eval.samples}, now it is {now.eval.samples}: "
            "it can only grow; choose another --out"
        )


def measured(config: Config) -> dict[str, Any]:
    """Dotted key -> value of all that the outcome depends on, with the tasks and the sampling that are in force."""
    tree = config.model_dump(mode="json")
    tree["tasks"] = tree["eval"]["tasks"] or tree["tasks"]
    tree["sampling"] = tree["eval"]["sampling"] or tree["sampling"]
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], parent: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{parent}{name}"
        if key in _FREE:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
