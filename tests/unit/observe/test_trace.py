"""The trace and the chart: what every device did, for other programs and for eyes."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from shoal.core.errors import SpecError
from shoal.core.event import PeakMeasured
from shoal.observe import Database, write_gantt, write_trace
from shoal.observe.gantt import Axis, draw_gantt, merged, nice_step, shares
from shoal.observe.timeline import (
    Slice,
    build_timeline,
    busy_fractions,
    covered,
    read_study_timeline,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def study_dir(tmp_path, tell):
    """Two devices; the second one starts late, both compute half of the ten seconds."""
    events = [
        tell.study(devices=2),
        tell.action(0, 4, "B s0 m0 t1", trial=1),
        tell.action(0, 1, "LOAD s1 param", stream="up"),
        tell.action(9, 10, "F s0 m0"),
        tell.action(5, 10, "F s0 m0", trial=2, device="cpu:1"),
        PeakMeasured(
            time=1002.0, device="cpu:0", peak_bytes=77, budget_bytes=100, predicted_bytes=80
        ),
    ]
    with Database(tmp_path) as log:
        log.write(events)
    return tmp_path


def test_busy_is_compute_over_the_study_s_time(study_dir):
    fractions = busy_fractions(read_study_timeline(study_dir))
    assert fractions == pytest.approx({"cpu:0": 0.5, "cpu:1": 0.5})


def test_a_directory_without_actions_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"no actions .* in .*timeline\.jsonl.*=False"):
        read_study_timeline(tmp_path)


def test_the_trace_has_a_process_per_device_and_a_thread_per_stream(study_dir, tmp_path):
    write_trace(study_dir, tmp_path / "trace.json")

    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [r["args"]["name"] for r in records if r["name"] in ("process_name", "thread_name")]
    assert names == ["digits cpu:0", "compute", "up", "digits cpu:1", "compute"]
    load = next(r for r in records if r["name"] == "LOAD s1 param")
    assert (load["ph"], load["cat"], load["ts"], load["dur"]) == ("X", "trial 0", 0.0, 1e6)
    (memory,) = [r for r in records if r["ph"] == "C"]
    assert (memory["ts"], memory["args"]) == (2e6, {"peak bytes": 77})


def test_the_chart_is_xml_with_every_device_trial_and_percentage(study_dir, tmp_path):
    write_gantt(study_dir, tmp_path / "chart.svg")

    root = ET.parse(tmp_path / "chart.svg").getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert root.get("width") == "1200"
    assert {"digits", "cpu:0", "cpu:1", "trial 0", "trial 1", "trial 2"} <= set(texts)
    assert texts.count("50%") == 2
    assert "B s0 m0" in texts
    assert texts[-1].startswith(
        "F forward; B forward and backward; LOAD host to device (up); s0, m0, ...: "
    )


def test_a_study_s_name_cannot_break_the_chart(tell):
    root = ET.fromstring(draw_gantt(build_timeline("<b>&", [tell.action(0, 1)])))

    assert next(root.iter(f"{SVG}text")).text == "<b>&"


def test_fifty_thousand_actions_make_a_small_chart_with_a_readable_moment(tell):
    actions = [
        tell.action(n / 100, n / 100 + 0.009, f"F s{n % 4} m0", trial=n % 3) for n in range(50_000)
    ]

    text = draw_gantt(build_timeline("many", actions))

    assert len(text) < 300_000
    texts = [element.text for element in ET.fromstring(text).iter(f"{SVG}text")]
    assert "F s2" in texts
    assert "0.2 s in detail" in texts


def test_slices_of_one_trial_closer_than_half_a_pixel_are_one():
    axis = Axis(0.0, 1000.0)  # about a pixel a second
    row = [
        Slice(0.0, 10.0, 0, 1, "F"),
        Slice(10.3, 20.0, 0, 1, "F"),
        Slice(20.1, 30.0, 1, 1, "F"),
        Slice(40.0, 50.0, 1, 1, "F"),
    ]

    boxes = merged(row, axis)

    assert [box.trial for box in boxes] == [0, 1, 1]
    assert boxes[0].width == pytest.approx(20.0 * axis.scale)


def test_in_shares_the_heights_add_up_to_the_time_at_work():
    axis = Axis(0.0, 481.0)  # a column a second
    row = [Slice(n + 0.25 * k, n + 0.25 * k + 0.25, k, 1, "F") for n in range(9) for k in (0, 1)]

    boxes = shares(row, axis)

    assert sum(box.height for box in boxes) == pytest.approx(covered(row))
    assert {round(box.height, 6) for box in boxes} == {0.25}


def test_an_array_is_named_so_and_all_of_its_trials_count(tell):
    timeline = build_timeline("fused", [tell.action(0, 10, trial=4)])
    timeline = replace(timeline, planned=frozenset(range(8)), widths={4: 4})

    chart = draw_gantt(timeline)

    assert "8 trials on 1 device" in chart
    assert ">trial 4, array of 4<" in chart


def test_the_time_between_two_runs_is_left_out(tell):
    actions = [tell.action(0, 10), tell.action(3600, 3610)]

    timeline = build_timeline("resumed", actions, resumes=[1000.0 + 3590])

    assert timeline.seconds == pytest.approx(20.0)
    assert timeline.resumes == pytest.approx((10.0,))
    assert "resumed" in draw_gantt(timeline)


def test_two_resumes_without_work_between_them_count_once(tell):
    actions = [tell.action(0, 10), tell.action(3600, 3610)]

    timeline = build_timeline("resumed", actions, resumes=[3000.0, 4600.0])

    assert timeline.seconds == pytest.approx(10.0 + 10.0)


@pytest.mark.parametrize(("least", "step"), [(0.3, 0.5), (1, 1), (1.1, 2), (6, 10), (0.02, 0.02)])
def test_the_axis_is_cut_at_round_numbers(least, step):
    assert nice_step(least) == pytest.approx(step)


def test_one_instant_of_work_can_be_drawn(tell):
    ET.fromstring(draw_gantt(build_timeline("short", [tell.action(0, 0)])))
