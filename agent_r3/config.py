"""Typed configuration: one YAML file, the environment, dotted overrides (`train.lr=1e-6`). Each knob stands here once.

The later wins. `AGENT_R3__TRAIN__LR=1e-6` in the environment is `train.lr=1e-6`, for every command.
Unknown keys are refused with the nearest known name. A component takes its own section, never the whole tree.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent_r3.errors import ConfigError

ENVIRONMENT_PREFIX = "AGENT_R3__"


class Section(BaseModel):
    """Frozen, strict about unknown keys; the string under a field documents it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RunConfig(Section):
    name: str = "run"
    """Names the run's folder and its keys in the store."""
    dir: Path = Path("runs")
    """Parent of the run's folder."""
    seed: int = 0
    """Seeds sampling, data order and the trainer."""
    archive_trajectories: bool = True
    """Write every finished episode to `trajectories/` (tokens, rows, text)."""

    @property
    def folder(self) -> Path:
        return self.dir / self.name


class ModelConfig(Section):
    path: str
    """Folder with config.json, safetensors and tokenizer.json; `tiny` is what `agent-r3 model tiny` makes. Where
    `eval.endpoint` is set, the name that it knows the model by."""


class TasksConfig(Section):
    dataset: str
    """`offline`, a file of R2E-Gym, SWE-bench or SWE-smith rows (.parquet, .json, .jsonl), a hub id of such rows
    (`R2E-Gym/R2E-Gym-Lite`), or a folder of Harbor tasks."""
    split: str = "train"
    """Split of a hub dataset."""
    include: tuple[str, ...] = ()
    """Task ids to use; empty means all."""
    exclude: tuple[str, ...] = ()
    """Task ids to leave out."""
    verified: Path | None = None
    """File written by `agent-r3 tasks verify --out`; tasks that it does not call sound are left out."""


class SandboxConfig(Section):
    kind: Literal["auto", "docker", "bwrap"] = "auto"
    """Backend that runs the agent's commands; `auto` takes Docker where it answers, else bwrap."""
    broker: str | None = None
    """`unix:///PATH` or `http://HOST:PORT` of an `agent-r3 broker`, which then gives all sandboxes and grades."""
    broker_token_file: Path | None = None
    """File with the broker's token; null takes the variable AGENT_R3_BROKER_TOKEN."""
    memory: str = "1g"
    """Memory limit of a sandbox (swap is off)."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU limit of a sandbox."""
    pids: int = Field(default=256, gt=0)
    """Process limit of a sandbox."""
    file_size: str = "1g"
    """Largest single file a process may write."""
    disk: str = "10g"
    """Most that a sandbox may write in all; one that is found above it is ended as an infrastructure failure."""
    disk_floor: str = "2g"
    """Free space below which unused pulled images are removed and, where that is not enough, no sandbox is started."""
    docker_disk: Path | None = None
    """Folder on the disk that `disk_floor` is about, where the Docker engine's own data folder is out of sight: for a
    broker in a container, any of its named volumes."""
    watch_s: float = Field(default=30.0, gt=0)
    """Seconds between looks at disk use and left-over sandboxes."""
    network: bool = False
    """Give a network to tasks that ask for one, which are refused otherwise, and to gradings of SWE-bench. All others
    have none."""
    pull: bool = True
    """Pull images of a registry that are not here; otherwise a missing image is refused."""
    pull_timeout_s: float = Field(default=1_800.0, gt=0)
    """Wall time of one image pull."""
    rootfs: Path | None = None
    """Folder of unpacked images for bwrap (`agent-r3 tasks rootfs`); null takes the one in the cache."""
    warm: int = Field(default=0, ge=0)
    """Sandboxes of upcoming tasks kept started ahead of need, over all images; a quarter more wait for gradings."""
    max_starting: int = Field(default=4, gt=0)
    """Sandboxes that may be starting at the same time."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """A sandbox that has not answered by then is an infrastructure failure."""


class AgentConfig(Section):
    system_prompt: str = (
        "You are a programming agent. You are given a repository in {workdir} and an issue. "
        "Fix the issue by editing the source; do not edit tests. Call one tool per turn."
    )
    """System message; `{workdir}`, `{repo}` and `{tools}` (the tools' documentation) are filled in."""
    instance_prompt: str = "{problem_statement}"
    """User message; `{problem_statement}`, `{repo}` and `{workdir}` are filled in."""
    tools: tuple[str, ...] = ("file_editor", "execute_bash", "search", "finish")
    """Tools offered, by their registered names."""
    call_format: Literal["r2e_xml", "hermes", "qwen3_coder"] = "r2e_xml"
    """Syntax in which the model writes tool calls."""
    max_turns: int = Field(default=50, gt=0)
    """Turns after which the episode ends."""
    max_tokens: int = Field(default=65_536, gt=1)
    """Tokens of prompt, observations and samples together."""
    max_turn_tokens: int = Field(default=8_192, gt=0)
    """Sampled tokens of one turn."""
    timeout_s: float = Field(default=1_200.0, gt=0)
    """Wall time of an episode."""
    command_timeout_s: float = Field(default=90.0, gt=0)
    """Wall time of one command of the agent."""
    persistent_shell: bool = False
    """Working directory, variables and functions of `execute_bash` stay from call to call; else every call is fresh."""
    max_bad_calls: int | None = Field(default=None, gt=0)
    """End the episode after this many turns without a valid call; null means never."""
    observation_chars: int = Field(default=10_000, gt=0)
    """An observation is cut to this many characters, head and tail kept."""
    observation_lines: int = Field(default=80, gt=1)
    """A command's output is cut to this many lines, half head and half tail."""


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """The trainer applies the same temperature to its logits. 0 is greedy, for evaluation only."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Training refuses anything but 1: log-probs must be those of the sampled distribution."""
    top_k: int = -1
    """Training refuses anything but -1, for the same reason."""


class EngineConfig(Section):
    urls: tuple[str, ...] = ()
    """SGLang servers that already run; empty means that one is launched here."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where it answers."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of the rollout weights and KV cache."""
    host: str = "127.0.0.1"
    """Address the launched server listens on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port of the launched server; 0 takes a free one."""
    context_length: int = Field(default=65_536, gt=0)
    """Longest sequence served."""
    max_total_tokens: int | None = None
    """KV slots; null lets SGLang decide from free memory."""
    max_running_requests: int = Field(default=64, gt=0)
    """Requests decoded together."""
    chunked_prefill_size: int = Field(default=4_096, gt=0)
    """Prefill chunk in tokens; -1 overflows the routing buffer upstream and is refused."""
    tensor_parallel: int = Field(default=1, gt=0)
    """GPUs of one server."""
    routed_experts: bool = True
    """Ask the engine for routing rows. Off only where the model is not MoE or R3 is off."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """A server that is not healthy by then has failed to start."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Wall time of one generate request."""
    metrics: bool = False
    """Serve SGLang's own Prometheus metrics at `/metrics` of its port."""
    extra_args: tuple[str, ...] = ()
    """Further command-line arguments for `sglang.launch_server`."""


class StoreConfig(Section):
    url: str | None = None
    """Redis URL; null starts an embedded Redis-compatible server for this run."""
    password_file: Path | None = None
    """File with the password of the server at `store.url`, which then names none itself."""


class RolloutConfig(Section):
    groups_per_step: int = Field(default=8, gt=0)
    """Groups (tasks) sampled for one optimizer step."""
    samples_per_task: int = Field(default=8, gt=1)
    """n: episodes of one group."""
    concurrency: int = Field(default=64, gt=0)
    """Episodes in flight in one worker."""
    retries: int = Field(default=2, ge=0)
    """Times an episode is tried again after an infrastructure failure."""
    workers: int = Field(default=1, gt=0)
    """Rollout worker processes."""


class GradingConfig(Section):
    timeout_s: float = Field(default=300.0, gt=0)
    """Wall time of the hidden tests."""
    concurrency: int = Field(default=8, gt=0)
    """Gradings at the same time in one worker."""
    reuse: bool = True
    """Equal patches of the same task are graded once in a run and share the grade."""
    retries: int = Field(default=2, ge=0)
    """Times a grading is tried again after an infrastructure failure."""
    runs: int = Field(default=1, gt=0)
    """Runs of the hidden tests for one grade; all must pass, and runs that disagree mark the grade flaky."""
    max_patch_bytes: int = Field(default=4 << 20, gt=0)
    """A larger patch earns 0."""


class TrainConfig(Section):
    steps: int = Field(default=100, gt=0)
    """Optimizer steps of the run."""
    ranks: int = Field(default=1, gt=0)
    """Trainer processes on this machine (data parallel)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where it answers."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the trained weights' forward pass."""
    lr: float = Field(default=2e-6, gt=0)
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear learning-rate warm-up."""
    advantage: Literal["grpo"] = "grpo"
    """Advantage estimator (verl)."""
    normalize_advantage: bool = True
    """Divide a group's advantages by their standard deviation."""
    loss: Literal["grpo"] = "grpo"
    """Policy loss (verl `vanilla` with asymmetric clip)."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """verl's agg_loss mode."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower PPO clip."""
    clip_high: float = Field(default=0.27, gt=0)
    """Upper PPO clip (clip higher)."""
    mini_steps: int = Field(default=1, gt=0)
    """Optimizer steps made from one batch."""
    routing: Literal["none", "r3"] = "r3"
    """`r3` replays the rollout's routing rows; `none` lets the trainer route by itself."""
    dynamic_sampling: Literal["off", "filter", "refill"] = "refill"
    """Groups of equal rewards: kept, left out, or left out and replaced by further groups."""
    max_refills: int = Field(default=3, ge=0)
    """Rounds of further groups for one step before it trains with what it has."""
    mask_truncated: bool = False
    """Leave episodes cut by turns, tokens or time out of the loss (compact filtering)."""
    micro_batch_tokens: int = Field(default=65_536, gt=0)
    """Tokens packed into one forward pass of a rank; one longer trajectory goes alone."""
    diagnostics_trajectories: int = Field(default=32, ge=0)
    """Trajectories a step on which KL, F(2) and route mismatch are also computed without replay; 0 turns it off."""
    save_every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 saves the last one only."""
    keep_checkpoints: int = Field(default=2, gt=0)
    """Checkpoints kept."""
    recompute: bool = False
    """Full activation recomputation."""


class EvalConfig(Section):
    tasks: TasksConfig | None = None
    """What is evaluated, also in training (a held set); null takes the section `tasks`."""
    sampling: SamplingConfig | None = None
    """Sampling of evaluations; null takes the section `sampling`."""
    samples: int = Field(default=1, gt=0)
    """n: episodes of a task. A larger number adds to a finished evaluation."""
    concurrency: int = Field(default=16, gt=0)
    """Episodes in flight."""
    seed: int = 1_000
    """Seeds the order of tasks and, where the engine takes seeds, sampling; apart from training's `run.seed`."""
    gold: Path | None = None
    """Folder of `agent-r3 eval gold`; tasks whose gold patch fails there are left out of the report, which says so."""
    every: int = Field(default=0, ge=0)
    """Training steps between evaluations of the current policy, before the first step too; 0 makes none."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server (`http://HOST:PORT/v1`) to evaluate instead of an SGLang engine."""
    endpoint_key: str = "OPENAI_API_KEY"
    """Environment variable with the endpoint's API key; where it is not set a placeholder is sent."""
    native_calls: bool = True
    """Offer tools to the endpoint as functions; otherwise calls are read from its text in `agent.call_format`."""


class ServiceConfig(Section):
    """What a role that runs on its own (`agent-r3 serve`, `rollout`, `trainer`, `broker`) owes to who runs it."""

    host: str = "127.0.0.1"
    """Address on which `/healthz` and `/metrics` are served."""
    port: int | None = Field(default=None, ge=0, le=65_535)
    """Port of `/healthz` and `/metrics`; null serves neither, 0 takes a free one. One role, one port."""
    grace_s: float = Field(default=60.0, ge=0)
    """Seconds after SIGTERM in which a rollout worker may finish the groups that it has; the rest is dropped then."""


class TrackConfig(Section):
    """Where figures and traces go besides the run's folder; each needs the extra of its name."""

    wandb: bool = False
    """Write the run's figures to Weights & Biases too (extra `wandb`); the key comes from WANDB_API_KEY."""
    wandb_project: str = Field(default="agent-r3", min_length=1)
    """W&B project; WANDB_ENTITY and WANDB_BASE_URL choose the account and the server."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes files under the run's folder, which `wandb sync` uploads later."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+(/\S*)?$")
    """Base URL of an OpenTelemetry collector that takes OTLP over HTTP (`http://HOST:4318`), for traces of episodes and
    steps (extra `otel`); null makes none."""


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    tasks: TasksConfig
    sandbox: SandboxConfig = SandboxConfig()
    agent: AgentConfig = AgentConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    store: StoreConfig = StoreConfig()
    rollout: RolloutConfig = RolloutConfig()
    grading: GradingConfig = GradingConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    service: ServiceConfig = ServiceConfig()
    track: TrackConfig = TrackConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.agent.max_tokens > self.engine.context_length:
            raise ValueError(
                f"agent.max_tokens {self.agent.max_tokens} exceeds engine.context_length {self.engine.context_length}"
            )
        if self.train.routing == "r3" and not self.engine.routed_experts:
            raise ValueError("train.routing is r3 but engine.routed_experts is off; turn one of them")
        if self.store.password_file is not None and self.store.url is None:
            raise ValueError("store.password_file is set, but store.url names no server that it is for")
        return self


def require_trainable_sampling(sampling: SamplingConfig) -> None:
    """Training needs log-probs of the distribution that was sampled.

    Raises ConfigError for top-p or top-k, which change it, and for temperature 0, which has none.
    """
    if sampling.temperature == 0:
        raise ConfigError("sampling.temperature=0: training samples from a distribution; use 0 in `eval.sampling` only")
    if sampling.top_p != 1 or sampling.top_k != -1:
        raise ConfigError(
            f"sampling.top_p={sampling.top_p} top_k={sampling.top_k}: training needs top_p=1 and top_k=-1, "
            "since the engine reports log-probs of the unfiltered distribution; other values go in `eval.sampling`"
        )


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply the environment, then `section.key=value` overrides. Raises ConfigError with one line."""
    if not path.is_file():
        raise ConfigError(f"config file {path} is not there; see configs/ for examples")
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as `model:` and `tasks:`, found {type(tree).__name__}")
    return config_of(tree, overrides, str(path))


def config_of(tree: dict[str, Any], overrides: Sequence[str], where: str) -> Config:
    """The config of `tree`, which came from `where`, with environment and overrides applied.

    Both hold YAML values. Raises ConfigError with one line, which names the variable that a bad key came from.
    """
    variables: dict[str, str] = {}  # dotted key -> the variable that set it
    for variable, raw in sorted(os.environ.items()):
        if variable.startswith(ENVIRONMENT_PREFIX):
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _apply(tree, key, raw, f"environment variable {variable}")
            variables[key] = variable
    for override in overrides:
        key, equals, raw = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} is not of the form section.key=value")
        _apply(tree, key, raw, f"override {override!r}")
        variables.pop(key, None)
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        raise ConfigError(f"{where}: " + "; ".join(_explain(error, variables) for error in exc.errors())) from exc


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply(tree: dict[str, Any], key: str, raw: str, source: str) -> None:
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{source}: {parent!r} is a value, not a section")
        node = child
    try:
        # YAML 1.1 reads `1e-6` as a string; pydantic turns it into the field's number.
        node[leaf] = yaml.safe_load(raw)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source}: the value is not valid YAML") from exc


def _explain(error: Any, variables: Mapping[str, str]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    variable = next((name for key, name in variables.items() if f"{where}.".startswith(f"{key}.")), None)
    if variable is None and error["type"] == "extra_forbidden":  # a section that is not known came with its key
        variable = next((name for key, name in variables.items() if key.startswith(f"{where}.")), None)
    came_from = f" (from environment variable {variable})" if variable else ""
    if error["type"] == "extra_forbidden":
        *parents, key = error["loc"]
        known = _known_keys(parents)
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
        return f"unknown key `{where}`{came_from}; {hint}"
    if error["type"] == "missing":
        return f"missing key `{where}`"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"`{where}`{came_from}: {message} (got {error['input']!r})" if where else message


def _known_keys(parents: Sequence[object]) -> list[str]:
    section: type[BaseModel] = Config
    for parent in parents:
        annotation = section.model_fields[str(parent)].annotation
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        sections = [kind for kind in kinds if issubclass(kind, BaseModel)]
        if not sections:
            return []
        section = sections[0]
    return list(section.model_fields)
