"""Variations of an example call."""

from collections.abc import Callable

import pytest
import torch

from pdp_fx.tracing.examples import ExampleCall, first_taken


def shapes_apart(*given: torch.Tensor, single: bool = False) -> list[list[tuple[int, ...]]]:
    call = ExampleCall(given, {})
    return [[tuple(t.shape) for t in made.args] for made in call.apart(call.sizes(), single)]


def test_images_get_sizes_that_are_all_different() -> None:
    found = shapes_apart(torch.rand(32, 3, 32, 32))
    assert found[:3] == [[(2, 4, 48, 16)], [(2, 3, 48, 16)], [(2, 3, 16, 16)]]
    assert found[-1] == [(2, 3, 32, 32)]


def test_inputs_of_one_length_keep_one_length() -> None:
    found = shapes_apart(torch.ones(2, 16, 64), torch.ones(2, 16, dtype=torch.long))
    assert [(3, 24, 64), (3, 8)] in found, "one of them has the length as its last axis"
    assert [(3, 8, 64), (3, 8)] in found
    assert found[-1] == [(3, 16, 64), (3, 16)]


def test_a_single_example_stays_alone_where_nothing_else_can_change() -> None:
    assert all(shape != [(1, 3)] for shape in shapes_apart(torch.rand(1, 3)))
    assert shapes_apart(torch.rand(1)) == []
    assert shapes_apart(torch.rand(1, 3), single=True)[-1] == [(2, 3)]
    assert shapes_apart(torch.tensor(1.0)) == []


def test_axes_of_one_index_become_longer_in_the_first_calls() -> None:
    assert [(2, 3, 5, 4)] in shapes_apart(torch.rand(1, 3, 1, 1))
    found = shapes_apart(torch.rand(2, 1, 8, 8))
    assert found[0] == [(3, 2, 12, 4)]
    assert [(3, 1, 12, 4)] in found, "the model may take one channel only"


def test_unlike_sizes_share_no_factor_with_each_other_or_with_numbers() -> None:
    example = ExampleCall((torch.rand(2, 10, 8, 8),), {})
    found = [tuple(call.args[0].shape) for call in example.unlike(example.sizes(), {14, 22})]
    assert found == [(13, 31, 8, 8), (13, 10, 31, 23)], "both would be 500 times as many numbers"
    wide = ExampleCall((torch.rand(2, 10, 80, 80),), {})
    found = [tuple(call.args[0].shape) for call in wide.unlike(wide.sizes(), {14, 22})]
    assert found == [(13, 71, 47, 23), (13, 10, 47, 23)], "(13, 31, 80, 80) would be 20 times as many"
    large = ExampleCall((torch.rand(2, 3, 256, 256),), {})
    found = [tuple(call.args[0].shape) for call in large.unlike({256}, {14, 22})]
    assert found == [(5, 3, 127, 71)], "behind five strides of 2 more than a pixel is left, and not a square"
    small, numbers = ExampleCall((torch.rand(2, 3, 64, 64),), {}), {7, 23, 31, 47, 71, 79, 103, 127}
    found = [tuple(call.args[0].shape) for call in small.unlike({64}, numbers)]
    assert found == [(5, 3, 167, 151)], "the sizes of weights may leave none that are smaller"
    gray = ExampleCall((torch.rand(1, 1, 6, 6),), {})
    assert [tuple(call.args[0].shape) for call in gray.unlike(gray.sizes(), {0, 8})] == [
        (5, 2, 23, 7),
        (5, 2, 6, 6),
        (5, 1, 23, 7),
    ]


def test_sizes_that_are_taken_are_left_out() -> None:
    for (images,) in shapes_apart(torch.rand(2, 4, 6, 8))[:-1]:
        assert len(set(images)) == 4, images


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
def test_a_size_is_replaced_by_each_other_once(size: int) -> None:
    made = [call.args[0].shape[1] for call in ExampleCall((torch.rand(4, size),), {}).resized(size)]
    assert size not in made
    assert len(set(made)) == len(made) > 0


def test_several_short_axes_do_not_all_become_long() -> None:
    call = ExampleCall((torch.zeros(2, 2, 2, 4, 3, 8),), {})
    made = [*call.unlike(call.sizes(), ()), *call.apart(call.sizes(), single=True)]
    assert len(made) > 10
    assert max(each.args[0].numel() for each in made) <= 2**24


def test_of_many_examples_two_are_tried_first() -> None:
    given: list[tuple[int, int]] = []

    def run(call: ExampleCall) -> int:
        rows, size = call.args[0].shape
        given.append((rows, size))
        if size != 3:
            raise ValueError("made for one size")
        return rows

    calls = [ExampleCall((torch.zeros(shape),), {}) for shape in ((47, 5), (3, 4), (47, 3), (5, 3))]
    taken = first_taken(calls, run)
    assert taken == (calls[2], 47)
    assert given == [(2, 5), (3, 4), (2, 3), (47, 3)]
    assert first_taken(calls[:2], run) is None


def test_sizes_that_are_refused_are_not_tried_with_others() -> None:
    call = ExampleCall((torch.rand(2, 3, 8, 8), torch.rand(2, 5)), {})

    def takes(other: ExampleCall) -> None:
        images, words = other.args
        if images.shape[1] != 3 or images.shape[2] % 4 or words.shape[1] > 5:
            raise ValueError("refused")

    assert call.sizes_taken(takes) == {5, 8}
    made = [tuple(each.args[0].shape) for each in call.apart({5, 8}, single=True)]
    assert all(shape[1] == 3 for shape in made)
    assert made[-1] == (4, 3, 8, 8)


def test_complex_numbers_are_drawn_too() -> None:
    call = ExampleCall((torch.tensor(1.0 + 2.0j), torch.full((2, 3), 1.0j)), {})
    assert all(each.args[0].is_complex() for each in call.with_other_numbers())


def test_what_costs_less_is_tried_first() -> None:
    given: list[tuple[str, int]] = []

    def noted(how: str) -> Callable[[ExampleCall], int]:
        def run(call: ExampleCall) -> int:
            given.append((how, call.batch))
            return 10 // (call.batch - 3)

        return run

    calls = [ExampleCall((torch.zeros(batch, 5),), {}) for batch in (3, 4, 5)]
    assert first_taken(calls, noted("runs"), noted("takes")) == (calls[1], 10)
    assert given == [("takes", 3), ("takes", 4), ("runs", 4)]
