"""Constructs that fail today, with what is observed; a row that passes must leave this table."""

KNOWN_FAILURES: dict[str, str] = {
    "DetachedBranch": "the graph switches gradients on where a model's no_grad block ends",
    "UnfoldedPatches": "unfold keeps its channels, which could go",
    "DeadBranch": "a BatchNorm whose result nobody uses cannot be traced",
}
