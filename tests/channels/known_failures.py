"""Constructs that fail today, with what is observed; a row that passes must leave this table."""

KNOWN_FAILURES: dict[str, str] = {
    "DetachedBranch": "the graph switches gradients on where a model's no_grad block ends",
    "LowRankAdapter": "a weight that is a product of two parameters has no channels",
    "SumOfKernels": "channels of a weight that is a sum of parameters are neither pruned nor listed",
    "MaskedKernel": "channels of a weight that is a product of parameters are neither pruned nor listed",
    "CatOfWeights": "channels of a weight that is joined from parameters are neither pruned nor listed",
    "HalfOfWeight": "a weight that is cut out of a parameter is not found",
    "ScaledWeight": "channels of a weight that is scaled by a parameter are neither pruned nor listed",
    "UnfoldedPatches": "unfold keeps its channels, which could go",
    "DeadBranch": "a BatchNorm whose result nobody uses cannot be traced",
}
