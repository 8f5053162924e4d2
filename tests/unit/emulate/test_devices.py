import pytest
from support.paths import ROOT

from adaptive_batch.__main__ import main
from adaptive_batch.emulate import EmulationError, find_device, read_devices

DEVICES = read_devices(ROOT / "adaptive_batch/estimate/devices.csv")


@pytest.mark.parametrize("name", ["H100", "nvidia h100", "GeForce RTX 4090", "A100-SXM4-40GB"])
def test_names_do_not_depend_on_case_and_maker(name):
    assert find_device(DEVICES, name).total_bytes > 2**34


@pytest.mark.parametrize("text", ["24GiB", "24 gib", "25769803776", "25769803776B"])
def test_a_size_has_the_kernels_of_its_architecture(text):
    device = find_device(DEVICES, text, "sm_89")
    assert (device.total_bytes, device.capability) == (24 * 2**30, 89)
    assert device.multiprocessors == 128


@pytest.mark.parametrize(
    ("text", "architecture", "message"),
    [
        ("h1000", "sm_80", "device h1000 is not known; give one of H100"),
        ("400MiB", "sm_80", "smaller than the CUDA context"),
        ("24GiB", "sm_999", "architecture sm_999 is not known; give one of sm_100, sm_120"),
    ],
)
def test_what_is_no_device_is_refused_with_the_remedy(text, architecture, message):
    with pytest.raises(EmulationError, match=message):
        find_device(DEVICES, text, architecture)


def test_the_list_has_the_devices_with_cuda(capsys):
    assert main(["emulate", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(DEVICES)
    assert "H100           sm_90" in "\n".join(lines)
    assert "MI300X" not in "\n".join(lines)


def test_a_program_has_to_be_given(capsys):
    assert main(["emulate", "--device", "h100"]) == 2
    assert "the program" in capsys.readouterr().err
