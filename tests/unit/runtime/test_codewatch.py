"""What a model's code reads is seen to change, before a pass is run again without it."""

from torch import nn

from shoal.runtime.capture.codewatch import CodeWatch


def counted():
    def loss(output, batch):
        nonlocal seen
        seen = 1
        return output.sum()

    def forget():
        nonlocal seen
        del seen

    return loss, forget
    seen = 0


def test_what_a_function_closes_over_may_be_assigned_later_and_not_any_more():
    loss, forget = counted()
    first = CodeWatch(nn.Linear(1, 1), {"loss": loss})
    assert not first.change()
    loss(nn.Linear(1, 1).weight, None)
    assert first.change() == "'seen' of the recipe's loss"
    second = CodeWatch(nn.Linear(1, 1), {"loss": loss})
    assert not second.change()
    forget()
    assert second.change() == "'seen' of the recipe's loss"
