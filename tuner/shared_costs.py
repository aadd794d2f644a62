"""Cost models that the workers of a study share: whoever comes first measures, the others wait and take them.

They lie in the study's storage, beside its trials, under the fingerprint of the machine they were measured on. A worker
on another machine is refused: its trials would be scored by prices that hold nowhere but there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from time import sleep
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from specflow.cost import CostModel
from specflow.errors import DataError
from tuner.profile import Profiled
from tuner.storage import open_storage, shown, storage_errors
from tuner.workers import abandoned, wait_until, worker

if TYPE_CHECKING:
    import optuna

__all__ = ["SharedCosts"]

FINGERPRINT = "fingerprint"
LOOK_S = 0.5
"""Between two looks for what another worker measures."""


class SharedCosts:
    """Profiles of one study.

    Args:
        storage: A path of a journal, or any storage URL of Optuna.
        name: Of the study they belong to, and of the batches they are measured for.
        fingerprint: Facts about target and machine that decide speed.

    Raises:
        DataError: The storage cannot be reached, or the study was begun on another machine.
    """

    def __init__(self, storage: str, name: str, fingerprint: Mapping[str, Any]) -> None:
        self._storage, self._name = storage, name
        here = json.loads(json.dumps(fingerprint, default=str))
        with storage_errors(storage):
            self._study = self._open(here)
            there = self._study.user_attrs[FINGERPRINT]
        if facts := list(_differences(there, here)):
            raise DataError(
                f"--storage {shown(storage)}",
                f"study {name} was begun on another machine: {'; '.join(facts)}",
                "workers whose machine and target are the same, since they share measured prices",
                "give this machine a storage of its own; without --storage each directory has one",
            )

    def get(self, recipe: str, measure: Callable[[], Profiled], check: Callable[[], None]) -> Profiled:
        """What a worker of this study has measured for a recipe; where none has, measure it.

        Args:
            recipe: Its name in the study.
            measure: Measures it here.
            check: Called while another worker measures; raises where there is no more time to wait.

        Raises:
            DataError: The storage went away.
            SpecFlowError: It cannot be measured.
        """
        with storage_errors(self._storage):
            known = self._find(recipe)
            if known is not None:
                return known
            place = self._queue_up(recipe)
        state = "FAIL"
        try:
            with storage_errors(self._storage):
                while (known := self._find(recipe)) is None and self._others_before(recipe, place):
                    check()
                    sleep(LOOK_S)
                if known is None:  # whoever came before may have left between the two looks
                    known = self._find(recipe)
            if known is not None:
                return known
            found = measure()
            with storage_errors(self._storage):
                data = {"model": found.model.to_data(), "doubts": list(found.doubts)}
                self._study.set_user_attr(_key(recipe), data)
            state = "COMPLETE"
            return found
        finally:
            self._leave(place, state)

    def _open(self, here: Mapping[str, Any]) -> optuna.Study:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = open_storage(self._storage)
        try:
            study = optuna.create_study(storage=storage, study_name=self._name)
        except optuna.exceptions.DuplicatedStudyError:
            study = optuna.load_study(storage=storage, study_name=self._name)
            wait_until(lambda: FINGERPRINT in study.user_attrs)
        if FINGERPRINT not in study.user_attrs:
            study.set_user_attr(FINGERPRINT, here)
        return study

    def _find(self, recipe: str) -> Profiled | None:
        data = self._study.user_attrs.get(_key(recipe))
        return None if data is None else Profiled(CostModel.from_data(data["model"]), tuple(data["doubts"]))

    def _queue_up(self, recipe: str) -> int:
        """Say that this worker wants to measure. Trials are numbered as they come, so the first of them does."""
        from optuna.trial import TrialState, create_trial

        ticket = uuid4().hex
        facts = {"recipe": recipe, "worker": worker(), "ticket": ticket}
        self._study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=facts))
        return next(each.number for each in self._running() if each.user_attrs.get("ticket") == ticket)

    def _running(self) -> Iterator[optuna.trial.FrozenTrial]:
        from optuna.trial import TrialState

        yield from self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _others_before(self, recipe: str, place: int) -> bool:
        """Whether somebody who is still there measures it, or comes first."""
        before = [each for each in self._running() if each.number < place and each.user_attrs.get("recipe") == recipe]
        return any(not abandoned(each) for each in before)

    def _leave(self, place: int, state: str) -> None:
        """Let the next one in the queue go on."""
        from optuna.trial import TrialState

        with storage_errors(self._storage):
            values = 0.0 if state == "COMPLETE" else None
            self._study.tell(place, values, state=TrialState[state])


def _key(recipe: str) -> str:
    return f"costs of {recipe}"


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*there, *here)):
        if there.get(name) != here.get(name):
            yield f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
