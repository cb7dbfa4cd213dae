"""The errors pdp_fx raises on purpose; catch `PdpError` to catch them all.

A message says what is wrong, where, what was expected against what was found, and what to write instead.
Longer evidence, such as the printed graph, travels as an exception note.
"""


class PdpError(Exception):
    """Base of every error that pdp_fx raises on purpose; never raised itself."""


class SpecError(PdpError):
    """Raised when a pruning spec is impossible: a bad key or value, an unfinished ramp, an unmatched key."""


class TraceError(PdpError):
    """Raised when a model cannot be turned into a graph, or its example inputs are missing or do not fit."""


class PassError(PdpError):
    """Raised when a compiler pass fails or leaves an invalid graph behind; the graph is added as a note."""


class VerifyError(PdpError):
    """Raised when a converted model's outputs differ from those of the prepared model in eval mode."""


class StateError(PdpError):
    """Raised when a model is in the wrong state: prepared twice, never prepared, schedule never advanced."""
