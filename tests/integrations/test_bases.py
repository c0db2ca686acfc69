"""Which orders of a class's bases lose the part that resumes. Plain classes stand for the frameworks' trainers."""

from __future__ import annotations

import pytest

from trainer_sidecar.integrations.bases import refuse_behind


class Trainer:
    def train(self) -> str:
        return "theirs"


class Part:
    def __init_subclass__(cls) -> None:
        refuse_behind(cls, Part, lambda kind: kind is Trainer)

    def train(self) -> str:
        return "ours"


class Resumable(Part, Trainer):
    pass


class OwnLoss(Trainer):
    def compute_loss(self) -> float:
        return 0.0


class OwnTrain(Trainer):
    def train(self) -> str:
        return f"own, then {super().train()}"


def test_a_trainer_in_front_that_hides_nothing_of_the_part_is_a_trainer_as_any() -> None:
    mine = type("Mine", (OwnLoss, Resumable), {})
    assert mine().train() == "ours"


@pytest.mark.parametrize(
    ("bases", "said"),
    [
        (
            (Trainer, Part),
            r"Mine\(Trainer, Part\): Trainer .* hides everything .* class Mine\(Part, Trainer\)",
        ),
        ((OwnLoss, Part), r"OwnLoss comes before Part, and hides everything .* class Mine\(Part, OwnLoss\)"),
        (
            (OwnTrain, Resumable),
            r"OwnTrain comes before Part, and hides train .* class Mine\(Resumable, OwnTrain\)",
        ),
    ],
)
def test_one_that_comes_first_or_has_its_own_is_refused_with_the_line_to_write(
    bases: tuple[type, ...], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        type("Mine", bases, {})
