"""Trials that would go on to other bits than before."""

from __future__ import annotations

import pytest

from shoal.core.errors import SpecError
from shoal.core.plan import Plan
from shoal.core.units import Seconds
from shoal.launch.starts import check_numerics, refuse_numerics
from shoal.testing import make_device, make_job


def key_of(**numerics) -> Plan:
    job = make_job(0, numerics=numerics)
    return Plan(
        study="s",
        devices=(make_device(),),
        jobs=(job,),
        active=1,
        seconds=Seconds(1.0),
        failures={},
    )


def test_other_software_or_devices_are_named_and_refused():
    changes = check_numerics(key_of(torch="3", threads=2), {0: {"torch": "2", "threads": 2}})

    assert changes == ["torch of trial 0 was '2' and is '3'"]
    with pytest.raises(SpecError, match="torch of trial 0 was '2' and is '3'") as error:
        refuse_numerics(changes)
    assert "--accept-numerics" in str(error.value)


def test_many_differences_are_shown_in_part():
    with pytest.raises(SpecError) as error:
        refuse_numerics([f"difference {n}" for n in range(9)])

    assert "difference 4; ..." in str(error.value)
    assert "difference 5" not in str(error.value)


def test_the_same_key_how_it_was_cut_and_new_trials_are_no_change():
    before = {0: {"torch": "2", "cut": "none"}}

    assert check_numerics(key_of(torch="2", cut="bitwise in the pilot"), before) == []
    assert check_numerics(key_of(torch="2", new="entry"), before) == []
    assert check_numerics(key_of(torch="9"), {}) == []
    refuse_numerics([])


def test_what_an_accepted_recipe_changes_is_left_to_who_takes_up_a_trial():
    now = key_of(optimizer="SGD", schedule="each epoch")
    changed, other = {0: {"optimizer": "foreach Adam"}}, {0: {"optimizer": "foreach SGD"}}

    assert check_numerics(now, changed) == [
        "optimizer of trial 0 was 'foreach Adam' and is 'SGD'",
        "schedule of trial 0 was 'each step' and is 'each epoch'",
    ]
    assert check_numerics(now, changed, accepted=True) == []
    (there,) = check_numerics(now, other, accepted=True)
    assert there == "optimizer of trial 0 was 'foreach SGD' and is 'SGD'"


NAMES = (
    *("copies", "replicas", "weights", "micro_batches"),
    *("use_cache", "loss_rows", "compiled modules"),
)


@pytest.mark.parametrize("name", NAMES)
def test_what_only_one_of_the_keys_says_is_another_one_too(name):
    """A trial in copies of a pipeline, say, does not go on alone unasked."""
    alone, other = {"accumulate": 4}, {"accumulate": 4, name: 8}
    (there,) = check_numerics(key_of(**other), {0: alone})
    (back,) = check_numerics(key_of(**alone), {0: other})
    assert there.startswith(f"{name} of trial 0 was")
    assert back.startswith(f"{name} of trial 0 was 8 and is")
    assert not check_numerics(key_of(**other), {0: other})


@pytest.mark.parametrize("missing", [{}, {"cut": "none"}, {"cut": "bitwise in the pilot"}])
def test_caches_that_are_off_are_no_change_where_the_pilot_found_the_same_bits(missing):
    """Also of trials that began resident, or before the key said so."""
    off = {"torch": "2", "use_cache": "off", "cut": "bitwise in the pilot"}
    on = {"torch": "2", **missing}
    assert check_numerics(key_of(**off), {0: on}) == []
    assert check_numerics(key_of(**on), {0: off}) == []
    assert len(check_numerics(key_of(**(off | {"cut": "none"})), {0: on})) == 1
