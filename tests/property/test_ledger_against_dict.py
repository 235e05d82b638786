"""The ledger equals a dict, and never exceeds its capacity."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal.core.errors import CapacityError
from shoal.core.units import Bytes
from shoal.memory.ledger import Ledger

CAPACITY = 100
owners = st.sampled_from(["a", "b", "c", "d"])


class LedgerAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger("host", Bytes(CAPACITY))
        self.model: dict[str, int] = {}
        self.peak = 0

    @rule(owner=owners, size=st.integers(0, 2 * CAPACITY))
    def reserve(self, owner: str, size: int) -> None:
        fits = sum(self.model.values()) + size <= CAPACITY
        try:
            self.ledger.reserve(owner, Bytes(size))
        except CapacityError:
            assert not fits
        else:
            assert fits
            self.model[owner] = self.model.get(owner, 0) + size
            self.peak = max(self.peak, sum(self.model.values()))

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        assert self.ledger.release(owner) == self.model.pop(owner, 0)

    @invariant()
    def agrees_with_the_dict(self) -> None:
        used = sum(self.model.values())
        assert (self.ledger.used, self.ledger.free) == (used, CAPACITY - used)
        assert self.ledger.peak == self.peak
        assert {o: self.ledger.held(o) for o in "abcd"} == {
            o: self.model.get(o, 0) for o in "abcd"
        }

    @invariant()
    def stays_within_capacity(self) -> None:
        assert 0 <= self.ledger.used <= self.ledger.peak <= CAPACITY


TestLedgerAgainstDict = LedgerAgainstDict.TestCase
TestLedgerAgainstDict.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
