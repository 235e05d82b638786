"""Hardware: virtual devices, what the machine has, and the command line's text."""

import subprocess
import sys

import pytest
import torch

from shoal import Recipe, Study, askfree, grid
from shoal import hardware as hardware_module
from shoal.core.errors import PlanError, SpecError
from shoal.core.profile import PROFILES
from shoal.core.spec import DeviceSpec, shared_gpus
from shoal.core.technique import DataParallel, Pipelined, Resident
from shoal.hardware import CONTEXT_BYTES, Hardware, available_cores, free_memory
from shoal.observe.timeline import read_study_timeline
from shoal.planning.gangs import early

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """A machine of four cores and 10 GiB of free memory, without GPUs."""
    monkeypatch.setattr(hardware_module, "_num_gpus", lambda: 0)
    monkeypatch.setattr(hardware_module, "available_cores", lambda: 4)
    monkeypatch.setattr(hardware_module, "free_memory", lambda: 10 * GIB)


@pytest.fixture
def two_gpus(machine, monkeypatch):
    monkeypatch.setattr(hardware_module, "_num_gpus", lambda: 2)
    monkeypatch.setattr(
        hardware_module, "_free_bytes", lambda numbers: dict.fromkeys(numbers, 80 * GIB)
    )


def test_virtual_devices_have_names_and_the_budget_that_was_asked_for():
    hardware = Hardware.virtual(devices=3, memory="256MiB", threads=2, poison=True, link="1GB/s")

    assert [device.name for device in hardware.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert {device.memory for device in hardware.devices} == {256 * 2**20}
    assert {device.threads for device in hardware.devices} == {2}
    assert all(device.poison for device in hardware.devices)
    assert {device.link_bytes_per_s for device in hardware.devices} == {1e9}


def test_emulated_devices_take_a_profile_s_times_made_slower_by_one_factor():
    hardware = Hardware.emulated("h200", devices=2, memory="64MiB", scale=1000, poison=True)

    assert [device.name for device in hardware.devices] == ["cpu:0", "cpu:1"]
    assert {device.memory for device in hardware.devices} == {64 * 2**20}
    assert all(device.poison and device.kind == "virtual" for device in hardware.devices)
    profile = hardware.devices[1].profile
    assert profile.up_bytes_per_s == 55e9 / 1000
    assert profile.host_bytes_per_s == 150e9 / 1000 / 2  # both devices are beside one host
    assert profile.scale == 1000


@pytest.mark.parametrize("name", PROFILES)
def test_by_default_one_core_keeps_up_in_float32_and_memory_shrinks_alike(name):
    (device,) = Hardware.emulated(name).devices

    assert device.profile.fp32_flops_per_s == pytest.approx(20e9)
    assert device.memory == int(PROFILES[name].memory / device.profile.scale)


def test_a_profile_of_one_s_own_can_be_emulated():
    own = PROFILES["v100"].slowed(2)

    (device,) = Hardware.emulated(own, scale=3).devices

    assert device.profile.scale == 6
    assert device.profile.up_bytes_per_s == pytest.approx(PROFILES["v100"].up_bytes_per_s / 6)


def test_without_a_gpu_the_cores_and_the_free_memory_are_shared(machine):
    hardware = Hardware.detect()

    assert [device.name for device in hardware.devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert {device.memory for device in hardware.devices} == {int(0.8 * 10 * GIB) // 4}
    assert {device.threads for device in hardware.devices} == {1}


def test_gpus_get_most_of_what_is_free_and_a_share_of_the_cores(two_gpus):
    hardware = Hardware.detect()

    assert [(d.name, d.kind, d.threads) for d in hardware.devices] == [
        ("cuda:0", "cuda", 2),
        ("cuda:1", "cuda", 2),
    ]
    assert hardware.devices[0].memory == int(0.8 * 80 * GIB)
    assert hardware.host_memory == int(0.8 * 10 * GIB)


def test_fewer_trials_get_fewer_and_wider_devices_on_a_detected_machine(machine):
    hardware = Hardware.detect().fewer_trials(2)

    assert [(d.name, d.threads) for d in hardware.devices] == [("cpu:0", 2), ("cpu:1", 2)]
    assert {device.memory for device in hardware.devices} == {int(0.8 * 10 * GIB) // 4 * 4 // 2}


def test_fewer_trials_never_change_the_threads_somebody_chose():
    hardware = Hardware.virtual(devices=4, memory="64MiB", threads=1)

    assert hardware.fewer_trials(2).devices == hardware.devices[:2]
    assert hardware.fewer_trials(9) is hardware


def test_a_trial_of_stages_has_a_device_for_each():
    hardware = Hardware.virtual(devices=4, memory="64MiB", threads=1)

    assert hardware.fewer_trials(1, Pipelined(stages=3)).devices == hardware.devices[:3]
    assert hardware.fewer_trials(1, Pipelined()) is hardware
    assert hardware.fewer_trials(1, Pipelined(width=2)) is hardware
    assert hardware.fewer_trials(2, Pipelined(stages=2)) is hardware
    assert hardware.fewer_trials(1, Resident()).devices == hardware.devices[:1]
    more = Hardware.virtual(devices=5, memory="64MiB", threads=1)
    assert more.fewer_trials(1, Pipelined(stages=2, width=2)).devices == more.devices[:4]


def test_detected_devices_are_as_wide_as_a_pipeline_leaves_them(machine):
    hardware = Hardware.detect()

    wider = hardware.fewer_trials(1, Pipelined(stages=2))
    assert [device.threads for device in wider.devices] == [2, 2]
    again = hardware.with_threads(2, 1, Pipelined(stages=2))
    assert again.devices == wider.devices


@pytest.mark.parametrize("memory", [None, "10GiB"])
def test_gpus_that_come_later_are_used_with_the_threads_that_a_study_began_with(memory, two_gpus):
    began = Hardware.parse("cuda:0", memory)
    (threads,) = {device.threads for device in began.devices}

    more = Hardware.parse("cuda:0,1", memory).with_threads(threads, trials=5)

    assert [(d.name, d.threads) for d in more.devices] == [("cuda:0", 4), ("cuda:1", 4)]
    assert {d.memory for d in more.devices} == {began.devices[0].memory}


def test_devices_idle_that_no_trial_has_and_whose_cores_are_nobody_elses(machine):
    hardware = Hardware.virtual(devices=3, memory="64MiB", threads=1)
    used = hardware.fewer_trials(1)

    assert hardware.idle(used, None) == hardware.devices[1:]
    assert hardware.idle(used, Pipelined()) == ()
    assert hardware.idle(hardware, None) == ()
    assert Hardware.detect().idle(Hardware.detect().fewer_trials(1), None) == ()


def test_a_second_gpu_idles(two_gpus):
    hardware = Hardware.detect()
    used = hardware.fewer_trials(1)

    (idle,) = hardware.idle(used, None)
    assert (idle.name, idle.threads) == ("cuda:1", used.devices[0].threads)


def test_a_wider_gpu_keeps_its_own_memory(two_gpus):
    (device,) = Hardware.detect().fewer_trials(1).devices

    assert (device.threads, device.memory) == (4, int(0.8 * 80 * GIB))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cpu:2", ["cpu:0", "cpu:1"]),
        ("cpu", ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]),
        (None, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]),
        ("auto", ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]),
    ],
)
def test_the_text_of_the_command_line_names_virtual_devices(machine, text, names):
    assert [device.name for device in Hardware.parse(text).devices] == names


@pytest.mark.parametrize(
    ("text", "names"),
    [("cuda", ["cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1"]), ("CUDA:0,1", ["cuda:0", "cuda:1"])],
)
def test_the_text_of_the_command_line_names_gpus(two_gpus, text, names):
    assert [device.name for device in Hardware.parse(text).devices] == names


@pytest.mark.parametrize(
    ("text", "names", "scale"),
    [
        ("cpu:2@h200", ["cpu:0", "cpu:1"], 2250),
        ("CPU@H200", ["cpu:0"], 2250),
        ("cpu:1@v100/62.5", ["cpu:0"], 62.5),
    ],
)
def test_the_text_of_the_command_line_names_profiles(machine, text, names, scale):
    hardware = Hardware.parse(text, "32MiB", "8GiB", threads=2)

    assert [device.name for device in hardware.devices] == names
    assert {device.profile.scale for device in hardware.devices} == {scale}
    assert {(device.memory, device.threads) for device in hardware.devices} == {(32 * 2**20, 2)}
    assert hardware.host_memory == 8 * GIB


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cpu:2@a100", "no profile 'a100' to emulate. Known: h200, rtx4090, v100"),
        ("h200:2", r"cpu:2@h200 for two .*profiles: h200, rtx4090, v100"),
        ("cuda:0@h200", "only virtual devices emulate another one. Write cpu:1@h200"),
        ("cpu@h200/1.2.3", r"cannot read the scale '1\.2\.3' of h200"),
        ("cpu@h200/0", "scale is a number above 0"),
        ("cpu:1,2@h200", "write how many virtual devices"),
        ("cpu:0@h200", "devices is a whole number from 1"),
    ],
)
def test_text_that_names_no_profile_is_refused_with_a_way_out(machine, text, words):
    with pytest.raises(SpecError, match=words):
        Hardware.parse(text)


def test_memory_given_on_the_command_line_is_each_device_s_budget(machine):
    hardware = Hardware.parse("cpu:2", "256MiB", "8GiB", threads=2)

    assert {device.memory for device in hardware.devices} == {256 * 2**20}
    assert {device.threads for device in hardware.devices} == {2}
    assert hardware.host_memory == 8 * GIB


def test_a_budget_above_a_gpu_s_free_memory_is_refused_with_both_numbers(two_gpus):
    with pytest.raises(SpecError, match=r"100\.0 GiB was asked for on cuda:0, but 80\.0 GiB are"):
        Hardware.parse("cuda", "100GiB")


@pytest.mark.parametrize("text", ["gpu", "cpu:", "cpu:two", "cuda:0;1", "cpu:2:3"])
def test_text_that_names_no_device_is_refused_with_the_forms_there_are(machine, text):
    with pytest.raises(SpecError, match=r"cannot read the devices .*cpu:2.*cuda:0,1"):
        Hardware.parse(text)


def test_a_gpu_named_twice_is_two_devices_of_half_its_memory(two_gpus):
    hardware = Hardware.parse("cuda:0,0")

    free = 80 * GIB - CONTEXT_BYTES  # of the second process
    assert [(d.name, d.torch_name) for d in hardware.devices] == [
        ("cuda:0/0", "cuda:0"),
        ("cuda:0/1", "cuda:0"),
    ]
    assert {(d.memory, d.threads) for d in hardware.devices} == {(int(0.8 * (free // 2)), 2)}
    assert {d.share_bytes for d in hardware.devices} == {free // 2}
    assert {d.share_bytes for d in Hardware.parse("cuda").devices} == {0}
    smaller = Hardware.parse("cuda:0,0", "30GiB").devices[0]
    assert (smaller.memory, smaller.share_bytes) == (30 * GIB, free // 2)
    with pytest.raises(SpecError, match=r"50\.0 GiB was asked for on cuda:0/0, but 39\.7 GiB are"):
        Hardware.parse("cuda:0,0", "50GiB")


def test_few_trials_have_a_gpu_each_before_two_of_them_share_one(two_gpus):
    hardware = Hardware.parse("cuda:0,0,1,1")

    names = [device.name for device in hardware.devices]
    assert names == ["cuda:0/0", "cuda:1/0", "cuda:0/1", "cuda:1/1"]
    used = hardware.fewer_trials(2)
    assert [device.name for device in used.devices] == ["cuda:0/0", "cuda:1/0"]
    assert hardware.idle(used, None) == ()  # the other halves would bring nothing


def test_beside_a_gpu_that_is_shared_another_is_whole(two_gpus):
    hardware = Hardware.parse("cuda:0,0,1")

    assert [device.name for device in hardware.devices] == ["cuda:0/0", "cuda:1", "cuda:0/1"]
    assert hardware.devices[1].memory == int(0.8 * 80 * GIB)
    assert shared_gpus(hardware.devices) == ["cuda:0"]


@pytest.mark.parametrize(
    ("technique", "words"),
    [
        (Pipelined(stages=2), "the stages of a pipeline over devices that share a GPU"),
        (DataParallel(width=2), "replicas over devices that share a GPU"),
    ],
)
def test_no_trial_is_over_devices_that_share_a_gpu(two_gpus, technique, words):
    devices = Hardware.parse("cuda:1,1").devices

    with pytest.raises(PlanError, match=rf"{words} .*parts of cuda:1: cuda:1/0, cuda:1/1\."):
        early(technique, RECIPE, devices)
    early(Resident(), RECIPE, devices)


def test_a_gpu_that_is_not_there_is_refused(machine, two_gpus):
    with pytest.raises(SpecError, match=r"cuda:0,5 was asked for, but torch sees 2 GPU"):
        Hardware.parse("cuda:0,5")


@pytest.fixture
def asked_torch(monkeypatch, tmp_path):
    """Another process finds a torch that tells so much free, in words of Python."""

    def tell(words):
        (tmp_path / "torch.py").write_text(f"class cuda:\n    mem_get_info = lambda n: {words}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return hardware_module._free_bytes

    return tell


def test_another_process_asks_what_is_free_and_only_of_the_gpus_that_are_named(
    asked_torch, monkeypatch
):
    def never(*args):
        raise AssertionError("this process would have a context")

    monkeypatch.setattr(torch.cuda, "mem_get_info", never)

    assert asked_torch("(100 * n + 7, 10**9)")([3, 1, 3]) == {1: 107, 3: 307}
    assert asked_torch("(5, 9) if n == 2 else 1 / 0")([2]) == {2: 5}


class Driver:
    """CUDA's, with two GPUs."""

    def __init__(self, fails=""):
        self.fails, self.here = fails, None

    def __getattr__(self, name):
        def call(*arguments):
            if name == self.fails:
                return 100
            getattr(self, f"_{name}")(*arguments)
            return 0

        return call

    def _cuInit(self, flags):
        assert flags == 0

    def _cuDeviceGet(self, device, number):
        device._obj.value = 10 + number

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 + device.value

    def _cuCtxSetCurrent(self, context):
        self.here = context.value

    def _cuMemGetInfo_v2(self, free, total):
        free._obj.value, total._obj.value = self.here, 999


def test_the_driver_is_asked_rather_than_torch_whose_import_takes_longer(monkeypatch, capsys):
    monkeypatch.setattr(askfree.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(askfree, "of_torch", None)
    monkeypatch.setattr(sys, "argv", ["askfree.py", "1", "0"])
    askfree.main()
    assert capsys.readouterr().out == "111 110\n"


@pytest.mark.parametrize("driver", [None, "cuInit", "cuMemGetInfo_v2"])
def test_torch_says_what_is_wrong_with_a_driver(monkeypatch, capsys, driver):
    def load(name):
        if driver is None:
            raise OSError("there is none")
        return Driver(fails=driver)

    monkeypatch.setattr(askfree.ctypes, "CDLL", load)
    monkeypatch.setattr(askfree, "of_torch", lambda numbers: [n + 7 for n in numbers])
    monkeypatch.setattr(sys, "argv", ["askfree.py", "1", "0"])
    askfree.main()
    assert capsys.readouterr().out == "8 7\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("1 / 0", "cuda:0, cuda:2 cannot be asked .*: ZeroDivisionError: division by zero"),
        ("__import__('os')._exit(3)", "memory: it ended with 3"),
        ("'?'", r"memory: the answer was '\? \?\\n'"),
    ],
)
def test_a_gpu_that_cannot_be_opened_is_refused_with_what_cuda_says(asked_torch, words, why):
    with pytest.raises(SpecError, match=f"{why}.*nvidia-smi.*other devices"):
        asked_torch(words)([2, 0])


def test_cuda_without_a_gpu_is_refused_with_a_way_out(machine):
    with pytest.raises(SpecError, match=r"torch sees no GPU.*--devices cpu:2"):
        Hardware.parse("cuda")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": 0}, "devices is a whole number from 1, got 0"),
        ({"threads": 0}, "threads is a whole number from 1, got 0"),
        ({"memory": "lots"}, "cannot read the size 'lots'"),
        ({"link": -1}, "link is bytes per second"),
    ],
)
def test_a_virtual_device_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(SpecError, match=words):
        Hardware.virtual(**arguments)


def test_hardware_without_devices_or_with_a_name_twice_is_refused():
    device = Hardware.virtual(1).devices[0]

    with pytest.raises(SpecError, match="no device"):
        Hardware(devices=())
    with pytest.raises(SpecError, match="a name of its own, got cpu:0, cpu:0"):
        Hardware(devices=(device, device))


def test_a_container_s_limits_bound_what_is_free(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    8388608 kB\n")
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.current").write_text("3221225472\n")
    (tmp_path / "memory.stat").write_text("file 5\ninactive_file 1048576\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")

    assert free_memory(tmp_path / "meminfo", tmp_path) == 2**30 + 2**20
    assert available_cores(tmp_path) == 1


def test_a_machine_without_a_container_has_what_the_kernel_says(tmp_path):
    (tmp_path / "meminfo").write_text("MemAvailable: 1024 kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")

    assert free_memory(tmp_path / "meminfo", tmp_path) == 2**20
    assert available_cores(tmp_path) == available_cores(tmp_path / "nowhere")


def test_naming_virtual_devices_searching_and_observing_leave_torch_unloaded():
    code = (
        "import sys, shoal.observe, shoal.search; from shoal.hardware import Hardware; "
        "Hardware.parse('cpu:2'); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_bound_the_host_tier_is_what_is_free_less_a_fifth(monkeypatch):
    monkeypatch.setattr(hardware_module, "free_memory", lambda: 1000)
    unbounded = Hardware.virtual(devices=2, memory="8MiB")
    assert unbounded.host_memory is None
    assert unbounded.with_host_limit().host_memory == 800
    named = Hardware.virtual(devices=2, memory="8MiB", host_memory=5000)
    assert named.with_host_limit() is named


def test_two_parts_of_a_device_train_and_are_shown_beside_each_other(tmp_path):
    parts = [DeviceSpec(name=f"cpu:0/{n}", kind="virtual", memory=8 * 2**20) for n in range(2)]
    study = Study("s", RECIPE, space=grid(lr=[0.1, 0.2]), steps=3, directory=tmp_path)

    report = study.run(hardware=Hardware(devices=tuple(parts)))

    assert list(report.peaks) == ["cpu:0/0", "cpu:0/1"]
    assert read_study_timeline(tmp_path / "s").devices == ("cpu:0/0", "cpu:0/1")


def test_a_study_of_more_than_the_host_has_is_refused_with_what_fits(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware_module, "free_memory", lambda: 2**20)
    space = grid(lr=[n / 100 for n in range(1, 41)])
    study = Study("s", RECIPE, space=space, steps=1, directory=tmp_path)
    with pytest.raises(PlanError, match="Together fit trials 0 to"):
        study.plan(hardware=Hardware.virtual(devices=1, memory="8MiB"))


def wide(hp):
    return torch.nn.Linear(64, 64)


def mean(output, batch):
    return output.mean()


def rows(hp):
    return [(torch.zeros(2, 64), torch.zeros(2))], None


RECIPE = Recipe(model=wide, data=rows, loss=mean)
