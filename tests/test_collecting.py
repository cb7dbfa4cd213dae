import gc

import pytest

from pdp_fx.collecting import collecting_new


class Thing:
    """A thing that the collector watches."""


def watched(thing: Thing) -> bool:
    """Whether a collection would look at a thing."""
    return any(other is thing for other in gc.get_objects())


def test_what_was_there_before_is_left_alone_and_given_back() -> None:
    before = Thing()
    with collecting_new():
        between = Thing()
        with collecting_new():
            assert watched(between)
            assert not watched(before)
        assert watched(between)
        assert not watched(before)
    assert watched(before)


def test_it_is_given_back_after_an_error() -> None:
    before = Thing()
    with pytest.raises(ValueError, match="x"), collecting_new():
        raise ValueError("x")
    assert watched(before)
