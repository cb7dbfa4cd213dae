import pytest
from torch import nn

from pdp_fx import Unstructured
from pdp_fx.compiler import Context
from pdp_fx.errors import PassError
from pdp_fx.granularity import Rule
from pdp_fx.passes.restore_modules import RestoreModules
from pdp_fx.trace import trace
from tests.nets import NETS, RULES, at_once, convert_until, difference, listing, net, pruned

PLAIN = """\
x = input
conv = conv(x)
bn = bn(conv)
relu = relu(bn)
head = head(relu)"""


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_graph_reads_as_the_user_wrote_it(rule: Rule) -> None:
    model, x = net("small")
    gm, _ = convert_until(pruned(model, rule, x), "restore-modules")
    assert listing(gm) == PLAIN
    assert [type(gm.get_submodule(name)) for name in ("conv", "bn", "head")] == [
        nn.Conv2d,
        nn.BatchNorm2d,
        nn.Conv2d,
    ]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_outputs_stay_bit_for_bit(name: str, rule: Rule) -> None:
    model, x = net(name)
    prepared = pruned(model, rule, x).eval()
    gm, _ = convert_until(prepared, "restore-modules")
    assert difference(prepared, gm, x) == 0
    assert not [module for module in gm.modules() if "Explicit" in type(module).__name__]


def test_a_parameter_that_is_not_the_modules_own_is_refused() -> None:
    model, x = net("small")
    gm, ctx = convert_until(pruned(model, Unstructured(0.5), x), "harden-masks")
    read = gm.graph.find_nodes(op="get_attr")[0]
    read.target = "head.weight"
    with pytest.raises(PassError, match="%conv is given a weight that is not its own"):
        RestoreModules().run(gm, ctx)


def test_plain_modules_are_left_alone() -> None:
    model, x = net("small")
    gm = trace(model, x)
    assert not RestoreModules().run(gm, Context(at_once(Unstructured(0.5))))
    assert listing(gm) == PLAIN
