"""The table of constructs: one tiny net for each thing that real models do with channels."""

from tests.channels.construct import Construct
from tests.channels.nets_aliasing import ALIASING
from tests.channels.nets_attention import ATTENTION
from tests.channels.nets_borrowed import BORROWED
from tests.channels.nets_choices import CHOICES
from tests.channels.nets_constants import CONSTANTS
from tests.channels.nets_convolutions import CONVOLUTIONS
from tests.channels.nets_gradients import GRADIENTS
from tests.channels.nets_heads import HEAD_CONSTRUCTS
from tests.channels.nets_indexing import INDEXING
from tests.channels.nets_layout import LAYOUT
from tests.channels.nets_modes import MODES
from tests.channels.nets_norms import NORMS
from tests.channels.nets_pictures import PICTURES
from tests.channels.nets_products import PRODUCTS
from tests.channels.nets_refusals import REFUSALS
from tests.channels.nets_regions import REGIONS
from tests.channels.nets_reshaping import RESHAPING
from tests.channels.nets_sharing import SHARING
from tests.channels.nets_sizes import SIZES
from tests.channels.nets_slices import SLICES
from tests.channels.nets_unmoved import UNMOVED
from tests.channels.nets_varying import VARYING
from tests.channels.nets_weights import WEIGHTS

CONSTRUCTS: tuple[Construct, ...] = (
    *CONVOLUTIONS,
    *SHARING,
    *LAYOUT,
    *RESHAPING,
    *ATTENTION,
    *PRODUCTS,
    *CHOICES,
    *GRADIENTS,
    *HEAD_CONSTRUCTS,
    *ALIASING,
    *NORMS,
    *UNMOVED,
    *BORROWED,
    *CONSTANTS,
    *INDEXING,
    *SLICES,
    *WEIGHTS,
    *SIZES,
    *REGIONS,
    *VARYING,
    *MODES,
    *PICTURES,
    *REFUSALS,
)
