import gc

import pytest

from pdp_fx.collecting import collecting_new


def test_what_was_there_before_is_left_alone_and_given_back() -> None:
    with collecting_new():
        inside = gc.get_freeze_count()
        with collecting_new():
            assert gc.get_freeze_count() == inside
        assert gc.get_freeze_count() == inside > 0
    assert gc.get_freeze_count() == 0


def test_it_is_given_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="x"), collecting_new():
        raise ValueError("x")
    assert gc.get_freeze_count() == 0
