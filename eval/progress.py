"""Progress of an evaluation: rich bars on a terminal, one plain line a verdict in a log."""

from collections import defaultdict
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console

from agent_r3.eval.folder import EvaluationFolder
from agent_r3.eval.records import Failure, Graded, Key, Prediction
from agent_r3.progress import ProgressLines
from agent_r3.statistics import instance_means


class EvaluationProgress(ProgressLines):
    """`with EvaluationProgress(folder, episodes) as progress:`, where `episodes` is how many there are to be in all."""

    def __init__(self, folder: EvaluationFolder, episodes: int, console: Console | None = None) -> None:
        self._predicted = len(folder.predictions)
        graded = [folder.grade_of(prediction) for prediction in folder.predictions.values()]
        self._resolved = {verdict.key: verdict.verdict == "resolved" for verdict in graded if verdict is not None}
        self._total = episodes
        super().__init__(console)
        self._episodes = self._bar.add_task("episodes", total=episodes)
        self._verdicts = self._bar.add_task("verdicts", total=episodes)

    def __enter__(self) -> "EvaluationProgress":
        self._bar.start()
        self._count()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def predicted(self) -> None:
        """An episode has ended; its verdict is to come."""
        self._predicted += 1
        self._count()

    def graded(self, prediction: Prediction, graded: Graded) -> None:
        self._resolved[graded.key] = graded.verdict == "resolved"
        self._count()
        self.say(verdict_line(prediction, graded, len(self._resolved), self._total, pass_at_1(self._resolved)))

    def failed(self, failure: Failure) -> None:
        times = f", {failure.attempts} times" if failure.attempts > 1 else ""
        self.say(
            f"{failure.instance_id} #{failure.sample}: left out, its {failure.stage} failed "
            f"({failure.kind}{times}): {failure.error}"
        )

    def _count(self) -> None:
        self._bar.update(self._episodes, completed=self._predicted)
        self._bar.update(self._verdicts, completed=len(self._resolved))


def verdict_line(prediction: Prediction, graded: Graded, done: int, total: int, so_far: float) -> str:
    """One finished episode in one line. `so_far`: Pass@1 of all verdicts until now. Pure."""
    parts = [f"{done}/{total} {graded.instance_id} #{graded.sample}: {graded.verdict}"]
    if (episode := prediction.episode) is not None:
        turns = f"{episode.turns} turn" + "s" * (episode.turns != 1)
        parts += [turns, episode.ending.value, f"{episode.seconds.get('total', 0):.1f} s"]
    return " | ".join([*parts, f"Pass@1 so far {so_far:.3f}"])


def pass_at_1(resolved: Mapping[Key, bool]) -> float:
    """The mean over instances of the mean over their samples; 0 where there is none. Pure."""
    samples: dict[str, list[bool]] = defaultdict(list)
    for (instance_id, _), verdict in resolved.items():
        samples[instance_id].append(verdict)
    return float(instance_means(list(samples.values())).mean()) if samples else 0.0
