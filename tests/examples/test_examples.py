"""The examples run, on little data and for few epochs, and do what their text says."""

import re
from pathlib import Path

import pytest
import torch

from examples import distillation, plain_recipe
from pdp_fx.data import Digits, Subset, split_digits


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = split_digits()
    little = Digits(*(Subset(part.images[:256], part.labels[:256]) for part in vars(digits).values()))
    for example in (plain_recipe, distillation):
        monkeypatch.setattr(example, "split_digits", lambda: little)


def test_the_plain_recipe_prunes_to_the_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_recipe.main(["--epochs", "8", "--ratio", "0.8", "--checkpoint", str(tmp_path / "last.pt")])
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.search(r"accuracy (0\.\d+|1\.0+) on the test set, 80\.0% of the weights are 0", last)
    assert found, last
    assert float(found[1]) > 0.5


def test_the_plain_recipe_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_recipe.main(["--epochs", "6", "--checkpoint", str(tmp_path / "whole.pt")])
    expected = capsys.readouterr().out.splitlines()
    save, path = plain_recipe.save, tmp_path / "parts.pt"

    def killed_after_three(target: Path, **parts: object) -> None:
        save(target, **parts)
        if parts["epoch"] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(plain_recipe, "save", killed_after_three)
    with pytest.raises(KeyboardInterrupt):
        plain_recipe.main(["--epochs", "6", "--checkpoint", str(path)])
    plain_recipe.main(["--epochs", "6", "--checkpoint", str(path)])
    found = capsys.readouterr().out.splitlines()
    assert found == expected[:2] + expected[3:]
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    assert all(
        tensor.equal(whole[name]) for name, tensor in torch.load(path, weights_only=True)["model"].items()
    )


def test_distillation_teaches_the_pruned_model(capsys: pytest.CaptureFixture[str]) -> None:
    distillation.main(["--dense-epochs", "8", "--epochs", "8", "--ratio", "0.8"])
    teacher, student = (float(value) for value in re.findall(r"accuracy (\d\.\d+)", capsys.readouterr().out))
    assert teacher > 0.7
    assert student > teacher - 0.1


def test_the_distillation_loss_is_least_at_the_teacher() -> None:
    teacher, labels = torch.randn(5, 10), torch.randint(0, 10, (5,))
    at_teacher = distillation.distillation_loss(teacher, teacher, labels)
    expected = (1 - distillation.FROM_TEACHER) * torch.nn.functional.cross_entropy(teacher, labels)
    torch.testing.assert_close(at_teacher, expected)
    assert distillation.distillation_loss(torch.randn(5, 10), teacher, labels) > at_teacher
