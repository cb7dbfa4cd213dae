import torch

from pdp_fx.ops.decay import half_squares


def test_its_gradients_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 6, 3, dtype=torch.float64).transpose(0, 1).requires_grad_()
    chosen = torch.rand(6, 4, 3) < 0.5
    expected = 0.5 * weight[chosen].square().sum()
    torch.testing.assert_close(half_squares(weight, chosen), expected)
    assert torch.autograd.gradcheck(lambda w: half_squares(w, chosen), weight)
    assert torch.autograd.gradgradcheck(lambda w: half_squares(w, chosen), weight)


def test_it_can_be_differentiated_by_a_transform() -> None:
    torch.manual_seed(0)
    weight, chosen = torch.randn(6, 4), torch.rand(6, 4) < 0.5
    found = torch.func.grad(half_squares)(weight, chosen)
    assert found.equal(torch.where(chosen, weight, 0))


def test_it_keeps_no_tensor_of_the_size_of_the_weight_but_the_choice() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    chosen = torch.rand(64, 64) < 0.5
    kept = list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        half_squares(weight, chosen)
    assert {tensor.data_ptr() for tensor in kept} == {weight.data_ptr(), chosen.data_ptr()}
