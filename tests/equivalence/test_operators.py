"""torch's operators and modules, all of them, train in an array as they do alone, or are declined.

Whatever is not listed here is equal in losses, gradients, parameters, buffers and random numbers.
"""

from __future__ import annotations

import operators
import pytest
import torch

from shoal.fusion.graphs.traced import TracedBackend

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PARTS = 8
SAMPLES = 2  # of each operator, each as a function, as a method and in place

DECLINED = {  # an operator: the words in which an array does, or a dry run
    "as_strided": "as_strided is told where in the memory of a tensor to begin",
    "as_strided_copy": "as_strided is told where in the memory of a tensor to begin",
    "as_strided.partial_views": "as_strided is told where in the memory of a tensor to begin",
    "as_strided_scatter": "as_strided is told where in the memory of a tensor to begin",
    "to_sparse": "the backward of all slots at once fails: Could not run 'aten::select_backward'",
    "linalg.pinv.singular": "these trials cannot share an array: parameter 'part.t",
}
NARROW = ("bfloat16", "half", "chalf")
"""Cast to few bits, of which sums in another order are others."""
ENDLESS = "polygamma"
"""Torch's own kernel takes minutes where steps have led far off."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_an_operator_is_in_an_array_what_it_is_alone(part):
    wrong, count = {}, 0
    for operator in operators.database("op_db")[part::PARTS]:
        if not operator.supports_autograd or torch.float64 not in operator.dtypes:
            continue
        if operator.name in NARROW or ENDLESS in operator.name:
            continue
        name = ".".join(filter(None, (operator.name, operator.variant_test_name)))
        backend = TracedBackend if count % 4 == 0 else lambda: None
        for case in operators.cases_of_operator(operator, SAMPLES):
            words, count = operators.outcome(case, backend=backend()), count + 1
            if words and not words.startswith(f"declined: {DECLINED.get(name, '.')}"):
                wrong[case.name] = words

    assert not wrong
    assert count > 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_module_is_in_an_array_what_it_is_alone(part):
    wrong, count = {}, 0
    for info in operators.database("module_db")[part::PARTS]:
        for case in operators.cases_of_module(info, 4):
            words, count = operators.outcome(case), count + 1
            if words:
                wrong[case.name] = words

    assert not wrong
    assert count > 20
