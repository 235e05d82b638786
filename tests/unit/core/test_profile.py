"""Profiles: figures of real devices, made slower by one factor."""

import json
from dataclasses import asdict, replace

import pytest

from shoal.core.errors import SpecError
from shoal.core.profile import PROFILES, Profile, find_profile
from shoal.core.spec import DeviceSpec
from shoal.core.units import Bytes

H200 = PROFILES["h200"]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_profile_says_what_each_of_its_parts_takes(profile: Profile) -> None:
    assert profile.link_seconds(10**9, "up") == 10**9 / profile.up_bytes_per_s
    assert profile.link_seconds(10**9, "down") == 10**9 / profile.down_bytes_per_s
    assert profile.host_seconds(10**9) == 10**9 / profile.host_bytes_per_s
    assert profile.memory_seconds(10**9) == 10**9 / profile.memory_bytes_per_s
    assert profile.kernel_seconds(1e12, "bf16") == 1e12 / profile.bf16_flops_per_s


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_slower_profile_keeps_the_ratios_of_the_real_device(profile: Profile) -> None:
    slow = profile.slowed(1000)

    assert slow.scale == 1000
    for one, other in (("fp32_flops_per_s", "up_bytes_per_s"), ("both_bytes_per_s",) * 2):
        ratio = getattr(profile, one) / getattr(profile, other)
        assert getattr(slow, one) / getattr(slow, other) == pytest.approx(ratio)
    assert slow.kernel_seconds(1e9) == pytest.approx(1000 * profile.kernel_seconds(1e9))
    assert slow.host_seconds(1) / slow.link_seconds(1, "up") == pytest.approx(
        profile.host_seconds(1) / profile.link_seconds(1, "up")
    )
    assert slow.memory == profile.memory


def test_scales_multiply_and_devices_share_the_host_s_memory() -> None:
    slow = H200.slowed(10).slowed(5, sharing=2)

    assert slow.scale == 50
    assert slow.host_bytes_per_s == pytest.approx(H200.host_bytes_per_s / 100)
    assert slow.up_bytes_per_s == pytest.approx(H200.up_bytes_per_s / 50)


def test_the_cost_model_s_figures_are_those_of_the_h200() -> None:
    assert (H200.up_bytes_per_s, H200.host_bytes_per_s) == (55e9, 150e9)
    assert H200.bf16_flops_per_s == 550e12


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"no profile 'a100'.*h200, rtx4090, v100"):
        find_profile("a100")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"up_bytes_per_s": 0}, "up_bytes_per_s of profile 'h200' is a number above 0, got 0"),
        ({"memory": -1}, "memory of profile 'h200'"),
        ({"fp32_flops_per_s": "fast"}, "fp32_flops_per_s of profile 'h200'"),
        ({"both_bytes_per_s": 0}, "both_bytes_per_s of profile 'h200'"),
    ],
)
def test_a_profile_that_no_device_has_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        replace(H200, **changes)


@pytest.mark.parametrize("scale", [0, -1, True, "slow"])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(SpecError, match="scale is a number above 0"):
        H200.slowed(scale)


def test_a_device_with_a_profile_survives_json() -> None:
    spec = DeviceSpec(name="cpu:0", kind="virtual", memory=Bytes(1), profile=H200.slowed(7))

    assert DeviceSpec(**json.loads(json.dumps(asdict(spec)))) == spec
