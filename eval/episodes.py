"""The episodes of an evaluation and their gradings.

Everything that was paid for is on disk before the next thing is begun: the transcript, then the prediction, then its
verdict. Infrastructure failures end here: an episode is tried again in a fresh sandbox, then left out and said.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from agent_r3.archive import EpisodeInfo, TurnText, patch_text, write_transcript
from agent_r3.config import Config
from agent_r3.envs.sandbox import SandboxProvider
from agent_r3.errors import DataError, EngineError, InfraError, SandboxError
from agent_r3.eval.folder import EvaluationFolder, episode_id
from agent_r3.eval.model import Model
from agent_r3.eval.plan import Work
from agent_r3.eval.progress import EvaluationProgress
from agent_r3.eval.records import EpisodeFacts, Failure, Prediction
from agent_r3.eval.verdicts import BAD_DATA
from agent_r3.rollout.episode import Episode, run_episode
from agent_r3.rollout.seeds import sampling_seed
from agent_r3.tracing import span
from agent_r3.types import Task

log = structlog.get_logger(__name__)

_POLL_S = 1.0


class EpisodeRunner:
    """Runs episodes, `eval.concurrency` at a time, and hands each prediction that is written to `predicted`."""

    def __init__(
        self,
        config: Config,
        folder: EvaluationFolder,
        model: Model,
        provider: SandboxProvider,
        progress: EvaluationProgress,
        predicted: Callable[[Task, Prediction], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._model = model
        self._provider = provider
        self._progress = progress
        self._predicted = predicted
        self._model_gone = False

    async def run(self, work: Sequence[Work]) -> None:
        """Until all is done, or the model has gone for good: then what was not begun is left."""
        places = asyncio.Semaphore(self._config.eval.concurrency)
        async with asyncio.TaskGroup() as episodes:
            for number, item in enumerate(work):
                await places.acquire()
                if self._model_gone:
                    break
                await self._announce(work[number : number + 1 + self._config.sandbox.warm])
                episode = episodes.create_task(self._run_one(item))
                episode.add_done_callback(lambda _: places.release())

    async def _announce(self, work: Sequence[Work]) -> None:
        """Say which sandboxes come next. It only saves time: where it fails, the episodes will hear of it."""
        try:
            await self._provider.prefetch([item.task for item in work])
        except (SandboxError, DataError) as exc:
            log.warning("sandboxes are not started ahead of need", error=str(exc))

    async def _run_one(self, work: Work) -> None:
        prediction = await self._predict(work)
        if prediction is not None:
            self._progress.predicted()
            self._predicted(work.task, prediction)

    async def _predict(self, work: Work) -> Prediction | None:
        """One episode, tried again after infrastructure failures; None when it is left out."""
        for attempt in range(1, self._config.rollout.retries + 2):
            try:
                with span("episode", episode=episode_id(work.key), task=work.task.id, attempt=attempt):
                    return await self._attempt(work, attempt)
            except DataError as exc:
                kind, problem = BAD_DATA, str(exc)
                break
            except InfraError as exc:
                kind, problem = exc.kind, str(exc)
                log.warning("episode failed", episode=episode_id(work.key), attempt=attempt, kind=kind, error=problem)
                if isinstance(exc, EngineError) and not await self._model_answers(work.task):
                    break
        failure = Failure(*work.key, "episode", kind, problem, attempt, time.time())
        self._folder.add_failure(failure)
        self._progress.failed(failure)
        return None

    async def _model_answers(self, task: Task) -> bool:
        """Wait until it does, at most `engine.start_timeout_s`: a server that died may be started again."""
        waited_s = self._config.engine.start_timeout_s
        try:
            async with asyncio.timeout(waited_s):
                while not self._model_gone:
                    try:
                        await self._model.require_answer(task.id)
                        return True
                    except EngineError:
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            if not self._model_gone:
                self._progress.say(f"the model did not answer for {waited_s:g} s; no further episode is begun")
            self._model_gone = True
        return False

    async def _attempt(self, work: Work, attempt: int) -> Prediction:
        began = time.monotonic()
        speaker = self._model.speaker(work.task.id, sampling_seed(self._config.eval.seed, *work.key))
        sandbox = await self._provider.acquire(work.task)
        waited = time.monotonic() - began
        try:
            episode = await run_episode(speaker, work.task, sandbox, _nothing)
        finally:
            await sandbox.close()
        seconds = _seconds(episode, sandbox=waited, total=time.monotonic() - began)
        prediction = self._prediction(work, episode, seconds, attempt)
        if self._config.run.archive_trajectories:
            write_transcript(self._folder.path, self._transcript(work, episode, prediction))
        self._folder.add_prediction(prediction)
        return prediction

    def _prediction(
        self, work: Work, episode: Episode[TurnText], seconds: Mapping[str, float], attempts: int
    ) -> Prediction:
        facts = EpisodeFacts(
            ending=episode.ending,
            turns=len(episode.turns),
            prompt_tokens=sum(turn.start + turn.prompt for turn in episode.turns),
            cached_tokens=sum(turn.cached_tokens for turn in episode.turns),
            sampled_tokens=sum(turn.sampled for turn in episode.turns),
            seconds=seconds,
            attempts=attempts,
        )
        patch = episode.patch.decode(errors="surrogateescape")
        return Prediction(work.task.id, self._model.name, patch, work.sample, facts)

    def _transcript(self, work: Work, episode: Episode[TurnText], prediction: Prediction) -> EpisodeInfo:
        facts = prediction.episode
        assert facts is not None
        again = sum(max(0, turn.start - 1 - turn.cached_tokens) for turn in episode.turns)
        return EpisodeInfo(
            id=episode_id(work.key),
            group_id=work.task.id,
            task_id=work.task.id,
            reward=None,
            reason="",
            ending=episode.ending,
            patch=patch_text(episode.patch),
            turns=episode.turns,
            prompt_tokens=facts.prompt_tokens,
            cached_tokens=facts.cached_tokens,
            reprefilled_tokens=again if self._model.cache_known else 0,
            outcome=None,
            left_out=(),
            flaky=False,
        )


def _seconds(episode: Episode[TurnText], *, sandbox: float, total: float) -> dict[str, float]:
    stages = {
        "generate": sum(turn.seconds["generate"] for turn in episode.turns),
        "tools": sum(turn.seconds["tools"] for turn in episode.turns),
        "sandbox": sandbox,
        "total": total,
    }
    return {name: round(value, 3) for name, value in stages.items()}


async def _nothing(turn: TurnText) -> None:
    """The turns are kept together, when the episode has ended."""
