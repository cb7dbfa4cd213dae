"""The compiler's passes, one in each file, and the pipelines that run them in order.

`pdp_fx.api.prepare` runs `PREPARE` on a traced graph, and `pdp_fx.proving` runs `CONVERT` on a copy of a
prepared one. Passes leave their results for later ones in the `pdp_fx.compiler.Context`.
"""

from pdp_fx.compiler import Pipeline
from pdp_fx.passes.check_order import CheckOrder
from pdp_fx.passes.choose_targets import ChooseTargets
from pdp_fx.passes.expose_parameters import ExposeParameters
from pdp_fx.passes.find_sites import FindSites
from pdp_fx.passes.fix_mode import FixMode
from pdp_fx.passes.fold_batch_norm import FoldBatchNorm
from pdp_fx.passes.harden_masks import HardenMasks
from pdp_fx.passes.hold_ranks import HoldRanks
from pdp_fx.passes.label_channels import LabelChannels
from pdp_fx.passes.mask_channels import MaskChannels
from pdp_fx.passes.mask_weights import MaskWeights
from pdp_fx.passes.restore_modules import RestoreModules
from pdp_fx.passes.shrink_channels import ShrinkChannels
from pdp_fx.passes.verify_equivalence import VerifyEquivalence
from pdp_fx.passes.write_weights import WriteWeights

PREPARE = Pipeline(
    (
        FindSites(),  # which weights can be pruned one by one
        LabelChannels(),  # which channels depend on each other
        ChooseTargets(),  # what the spec prunes of both
        ExposeParameters(),  # parameters become values of the graph
        MaskWeights(),  # a mask behind every planned weight
        MaskChannels(),  # a mask for every planned group of channels
    )
)

CONVERT = Pipeline(
    (
        WriteWeights(),  # computed weights become parameters
        FixMode(),  # eval mode becomes the only mode
        HardenMasks(),  # masked values become parameters
        RestoreModules(),  # modules read their own parameters again
        ShrinkChannels(),  # pruned channels leave every tensor
        CheckOrder(),  # channels still meet the same channels
        FoldBatchNorm(),  # BatchNorm goes into the layer before it
        HoldRanks(),  # inputs have as many axes as the example, if that matters
        VerifyEquivalence(),  # outputs are those of the prepared model
    )
)

CONVERT_UNFOLDED = Pipeline(tuple(each for each in CONVERT.passes if not isinstance(each, FoldBatchNorm)))
"""The same with every BatchNorm where it was."""
