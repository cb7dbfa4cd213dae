"""Constructs that fail today, with what is observed; a row that passes must leave this table."""

KNOWN_FAILURES: dict[str, str] = {
    "DetachedBranch": "UserWarning: Converting a tensor with requires_grad=True to a scalar may lea",
    "SplitEmptied": "PassError: pass 'verify-equivalence' failed: RuntimeError: Expected 3D or 4D",
    "UnbindChannels": "0 channels gone; ( stem.0: %unbind : each of these channels becomes a tensor",
    "MultiheadModule": "4 channels gone; ('%attention : MultiheadAttention has sizes of its own that",
    "EncoderLayer": "SpecError: the model has no conv or linear weight that can be pruned",
    "DataDependentIf": "TraceError: cannot trace the forward of DataDependentIf itself: it uses the",
    "DataDependentIfInside": "('%branch : mean runs over these channels', '%output: the model returns thes",
    "DataDependentChoice": "PassError: pass 'shrink-channels' failed: KeyError: Slot(tensor='branch.righ",
}
