"""The two pipelines, in order."""

from pdp_fx.compiler import Pipeline
from pdp_fx.passes.check_order import CheckOrder
from pdp_fx.passes.choose_targets import ChooseTargets
from pdp_fx.passes.expose_parameters import ExposeParameters
from pdp_fx.passes.find_sites import FindSites
from pdp_fx.passes.fix_mode import FixMode
from pdp_fx.passes.fold_batch_norm import FoldBatchNorm
from pdp_fx.passes.harden_masks import HardenMasks
from pdp_fx.passes.label_channels import LabelChannels
from pdp_fx.passes.mask_channels import MaskChannels
from pdp_fx.passes.mask_weights import MaskWeights
from pdp_fx.passes.restore_modules import RestoreModules
from pdp_fx.passes.shrink_channels import ShrinkChannels
from pdp_fx.passes.verify_equivalence import VerifyEquivalence
from pdp_fx.passes.write_weights import WriteWeights

PREPARE = Pipeline(
    (
        FindSites(),
        LabelChannels(),
        ChooseTargets(),
        ExposeParameters(),
        MaskWeights(),
        MaskChannels(),
    )
)

CONVERT = Pipeline(
    (
        WriteWeights(),
        FixMode(),
        HardenMasks(),
        RestoreModules(),
        ShrinkChannels(),
        CheckOrder(),
        FoldBatchNorm(),
        VerifyEquivalence(),
    )
)
