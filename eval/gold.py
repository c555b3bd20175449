"""What a folder of `agent-r3 eval gold` says: where the gold patch fails here, no agent can do better here."""

from pathlib import Path

from agent_r3.errors import DataError
from agent_r3.eval.dataset import read_dataset
from agent_r3.eval.folder import EvaluationFolder

MODEL = "gold"  # model_name_or_path of its predictions, as in SWE-bench's own harness
_NO_PATCH = "it has no gold patch that text can say"


def gold_failures(folder: Path) -> dict[str, str]:
    """{instance id: reason} of those whose gold patch did not resolve it. Infrastructure failures are no verdict.

    Raises DataError for a folder that holds no evaluation of gold patches.
    """
    evaluation = _gold_evaluation(folder)
    return {
        graded.instance_id: _NO_PATCH if graded.verdict == "empty_patch" else graded.reason
        for prediction in evaluation.predictions.values()
        if (graded := evaluation.grade_of(prediction)) is not None and graded.verdict != "resolved"
    }


def gold_unknown(folder: Path) -> tuple[str, ...]:
    """The instances without a verdict on their gold patch. Raises DataError as `gold_failures` does."""
    evaluation = _gold_evaluation(folder)
    judged = {one.instance_id for one in evaluation.predictions.values() if evaluation.grade_of(one) is not None}
    return tuple(instance_id for instance_id in read_dataset(folder) if instance_id not in judged)


def _gold_evaluation(folder: Path) -> EvaluationFolder:
    evaluation = EvaluationFolder(folder)
    if {one.model_name_or_path for one in evaluation.predictions.values()} != {MODEL}:
        raise DataError(
            f"{folder} holds no evaluation of gold patches; `agent-r3 eval gold DATASET --out FOLDER` makes one"
        )
    return evaluation
