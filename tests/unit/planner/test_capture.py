"""Whether passes are captured where nobody says so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.spec import CaptureMeasure
from shoal.planner.capture import Life, captured_step_s, gains, told, why_no_look


def life(**changes):
    usual = {"steps": 1000, "trials": 32, "step_s": 0.002, "passes": 1, "shares": True}
    return Life(**(usual | changes))


FOUND = CaptureMeasure(eager_s=0.0018, captured_s=0.0012, make_s=0.2)


def test_light_trials_that_last_are_looked_at():
    assert why_no_look(life()) == ""
    assert why_no_look(life(step_s=0.02)) == "a step takes 20 ms, little of which is Python"
    assert why_no_look(life(steps=10, trials=1)).startswith("all steps of a device take 20 ms")
    assert why_no_look(life(steps=None)) == "how long the trials are is not known"


def test_it_has_to_be_clearly_quicker_and_to_bring_back_its_making():
    assert gains(FOUND, life())
    assert not gains(CaptureMeasure(eager_s=0.0018, captured_s=0.00175, make_s=0.2), life())
    assert not gains(CaptureMeasure(declined="a module has hooks"), life())
    noisy = CaptureMeasure(eager_s=0.0018, captured_s=0.0012, make_s=0.2, noise=0.6)
    assert not gains(noisy, life())
    # 0.6 ms a step: 300 steps do not bring back 0.2 s, and a graph for each trial never does.
    assert not gains(FOUND, life(steps=300, trials=1))
    assert gains(FOUND, life(steps=300, trials=32))
    assert not gains(FOUND, life(steps=300, trials=32, shares=False))


def test_what_is_told():
    words = told(FOUND, taken=True)
    assert words.startswith("captured, to the same bits: a pass takes ")
    assert told(CaptureMeasure(declined="a module has hooks"), taken=False) == (
        "captured: none, a module has hooks"
    )
    slow = CaptureMeasure(eager_s=0.001, captured_s=0.001, make_s=0.2)
    assert told(slow, taken=False).endswith("no clear gain over the trial's life")


@given(
    eager=st.floats(1e-5, 1e-2),
    captured=st.floats(1e-5, 1e-2),
    make=st.floats(0, 5),
    noise=st.floats(0, 1),
    steps=st.integers(1, 10**6),
    trials=st.integers(1, 100),
    passes=st.integers(1, 4),
    shares=st.booleans(),
)
def test_who_is_captured_ends_sooner(eager, captured, make, noise, steps, trials, passes, shares):
    found = CaptureMeasure(eager_s=eager, captured_s=captured, make_s=make, noise=noise)
    mine = life(
        steps=steps, trials=trials, step_s=passes * eager + 1e-4, passes=passes, shares=shares
    )
    if gains(found, mine):
        step_s = captured_step_s(found, mine)
        assert step_s < mine.step_s
        assert make + steps * trials * step_s < steps * trials * mine.step_s
