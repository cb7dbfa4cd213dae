import pickle

import pytest

from pdp_fx.errors import PassError, PdpError, SpecError, StateError, TraceError, VerifyError

KINDS = [SpecError, TraceError, PassError, VerifyError, StateError]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_caught_as_a_pdp_error(kind: type[PdpError]) -> None:
    with pytest.raises(PdpError, match="expected 4, got 3"):
        raise kind("expected 4, got 3")


@pytest.mark.parametrize("kind", KINDS)
def test_catching_one_kind_of_error_lets_the_others_through(kind: type[PdpError]) -> None:
    assert [other for other in KINDS if issubclass(kind, other)] == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_docstring_says_in_one_line_when_the_error_is_raised(kind: type[PdpError]) -> None:
    text = kind.__doc__ or ""
    assert text.startswith("Raised when ")
    assert "\n" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_travels_between_processes_with_its_message_and_notes(kind: type[PdpError]) -> None:
    error = kind("expected 4, got 3")
    error.add_note("%conv1 : conv2d(%x)")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert str(copied) == "expected 4, got 3"
    assert copied.__notes__ == ["%conv1 : conv2d(%x)"]
