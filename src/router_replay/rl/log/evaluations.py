"""Write evaluation.jsonl: one line per evaluation, with the policy version that it is of."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Self

from router_replay.errors import TrainError
from router_replay.rl.rollout.evaluation import EvaluationResult

FILE = "evaluation.jsonl"


class EvaluationLog:
    """Write the evaluations of the run in `folder`. Lines of later versions than `version` are removed.

    These versions are trained again. `versions` has those that are in the file.
    """

    def __init__(self, folder: pathlib.Path, version: int) -> None:
        self._path = folder / FILE
        kept = [one for one in read_evaluations(folder) if one.version <= version]
        self.versions = {one.version for one in kept}
        try:
            beside = self._path.with_suffix(".new")
            beside.write_text("".join(map(_line, kept)), encoding="utf-8")
            beside.replace(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise TrainError(f"{self._path} could not be written: {error.strerror or error}") from error

    def add(self, result: EvaluationResult) -> None:
        """Write the line of an evaluation."""
        try:
            self._file.write(_line(result))
            self._file.flush()
        except OSError as error:
            raise TrainError(f"{self._path} could not be written: {error.strerror or error}") from error
        self.versions.add(result.version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_evaluations(folder: pathlib.Path) -> list[EvaluationResult]:
    """Return the evaluations in the output folder of a run, in order; a last line that a kill cut off is left out."""
    path = folder / FILE
    if not path.exists():
        return []
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    try:
        return [EvaluationResult(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise TrainError(f"{path} is damaged ({error}): move it away to continue without its lines") from error


def _line(result: EvaluationResult) -> str:
    return json.dumps(dataclasses.asdict(result)) + "\n"
