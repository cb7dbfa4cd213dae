"""Converting compares on another batch, too, where the example does not show what views do to one."""

import logging

import pytest
import torch
from torch import nn

import pdp_fx
from pdp_fx import VerifyError
from pdp_fx.channels import elsewhere
from tests.channels.checks import halved
from tests.channels.nets_varying import FirstOfOneImage, one_image
from tests.channels.random_layouts import LayoutNet, View


def test_what_labels_do_not_show_is_shown_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_heed", lambda *_: None)
    prepared = halved(FirstOfOneImage(), one_image(1))
    with pytest.raises(VerifyError, match="of the output's scale on a batch of another size"):
        pdp_fx.convert(prepared)


def test_a_model_that_takes_no_other_batch_any_more_is_said(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    net = LayoutNet((View((("c",), ("b", "h", "w")), 1), View((("b",), ("c",), ("h",), ("w",)), 0)), 6, "chw")
    net.take_only(2, 6)
    prepared = halved(net, (torch.randn(1, 3, 2, 6, dtype=torch.float64),))
    with caplog.at_level(logging.WARNING):
        converted = pdp_fx.convert(prepared)
    assert "the converted model fails on a batch of another size" in caplog.text
    two = torch.randn(2, 3, 2, 6, dtype=torch.float64)
    assert prepared.eval()(two).shape == (2, 2, 6, 3)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(RuntimeError, match="invalid for input of size 72"):
        nn.Module.__call__(converted, two)
