"""A made-up run on disk, with figures of known pooled values and a few archived episodes."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from agent_r3.archive import write_episode
from agent_r3.metrics import MetricsWriter
from agent_r3.types import Ending, Grade, MoEShape, Observation
from tests.support.store import make_turns

_SHAPE = MoEShape(num_layers=4, num_experts=16, top_k=2)


def make_run(folder: Path, steps: int = 12, *, episodes: int = 3) -> Path:
    """A run of `steps` steps whose reward rises, with config.yaml, metrics and `episodes` episodes a step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"run: {{name: {folder.name}, seed: 7}}\nmodel: {{path: models/tiny}}\ntasks: {{dataset: offline}}\n"
        "engine: {dtype: bfloat16}\ntrain: {routing: r3, lr: 1.5e-4, dtype: float32}\n"
        "rollout: {groups_per_step: 8, samples_per_task: 8}\n"
    )
    rng = np.random.default_rng(0)
    with MetricsWriter(folder, first_step=0) as metrics:
        for step in range(steps):
            metrics.write(step, _figures(rng, step, steps))
            for number in range(episodes):
                _episode(rng, folder, step, number)
    return folder


def _figures(rng: np.random.Generator, step: int, steps: int) -> dict[str, float]:
    progress = step / max(steps - 1, 1)
    prompt = 64 * 5 * 260.0
    kl_native = 4e-5 * float(np.exp(rng.normal(0, 0.8)))
    return {
        "train/reward_mean": 0.3 + 0.55 * progress + 0.03 * float(rng.normal()),
        "train/loss": 0.01,
        "train/entropy": 0.5 - 0.2 * progress,
        "train/grad_norm": 0.1 + 0.05 * float(rng.random()),
        "train/groups_kept": 8.0,
        "train/groups_equal": float(round(6 * progress)),
        "rollout/episodes": 64.0,
        "rollout/turns_mean": 4.5,
        "rollout/tokens": 64 * 370.0,
        "rollout/sampled_tokens": 64 * 105.0,
        "rollout/prompt_tokens": prompt,
        "rollout/cached_tokens": 0.83 * prompt,
        "rollout/reprefilled_tokens": 0.0,
        "rollout/ending/finish": 40 + 20 * progress,
        "rollout/ending/bad_calls": 16 - 14 * progress,
        "rollout/ending/max_turns": 8 - 6 * progress,
        "rollout/infra/sandbox": float(step == 3),
        "rollout/seconds/generate": 210.0,
        "rollout/seconds/tools": 35.0,
        "rollout/seconds/grade": 60.0,
        "r3/coverage": 1.0,
        "r3/rows_missing": 0.0,
        "r3/kl_replay": 1.5e-5 * float(np.exp(rng.normal(0, 0.3))),
        "r3/kl_native": kl_native,
        "r3/f2_replay": 0.0,
        "r3/f2_native": float(rng.random() < 0.4) * 3e-4,
        "r3/max_ratio_replay": 1.1 + 0.1 * float(rng.random()),
        "r3/max_ratio_native": 1.5 + float(rng.random()),
        "r3/mismatch_routers": 0.014,
        "r3/mismatch_tokens": 0.05,
        "r3/mismatch_sequences": 0.98,
        "r3/diagnosed_tokens": 3000.0 + step,
        "perf/wait_s": 6.0 - progress,
        "perf/load_s": 0.1,
        "perf/logprobs_s": 0.6,
        "perf/diagnostics_s": 0.5,
        "perf/update_s": 1.4,
        "perf/push_s": 0.05,
        "perf/checkpoint_s": 0.4 if step % 5 == 4 else 0.0,
        "perf/step_s": 9.0,
    }


def _episode(rng: np.random.Generator, folder: Path, step: int, number: int) -> None:
    good = number % 2 == 0
    turns = make_turns(rng, 2 + number % 3, version=step, shape=_SHAPE)
    turns[0] = replace(
        turns[0],
        text="<function=execute_bash>\n<parameter=cmd>grep -rn 'def parse' src | head</parameter>\n</function>",
        observations=(Observation("src/x.py:12:def f(a):\n<script>alert('&')</script> [bold]not markup[/bold]"),),
    )
    turns[1] = replace(turns[1], text="I will call something odd", observations=(Observation("unknown tool", True),))
    write_episode(
        folder,
        step,
        trajectory_id=f"g{step:06d}-{number:02d}",
        group_id=f"g{step:06d}",
        task_id="more-itertools-chunked",
        turns=turns,
        ending=Ending.FINISH if good else Ending.BAD_CALLS,
        grade=Grade(float(good), {}, "all 68 as expected" if good else "2 of 68 differ: test_a <b>", 1.0),
        patch=b"--- a/src/x.py\n+++ b/src/x.py\n@@ -1 +1 @@\n-a < b\n+a <= b\n" if good else b"",
    )
