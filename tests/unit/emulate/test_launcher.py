import pytest

from adaptive_batch import SettingError
from adaptive_batch.__main__ import emulated_device, main


@pytest.mark.parametrize("name", ["H100", "nvidia h100", "GeForce RTX 4090", "A100-SXM4-40GB"])
def test_case_and_manufacturer_are_ignored(name):
    assert emulated_device(name, "sm_80").total_bytes > 2**34


@pytest.mark.parametrize("text", ["24GiB", "24 gib", "25769803776B"])
def test_a_size_has_the_kernels_of_its_architecture(text):
    device = emulated_device(text, "sm_89")
    assert (device.total_bytes, device.capability) == (24 * 2**30, 89)
    assert device.multiprocessors > 0
    assert device.setting.count(",") == 3


@pytest.mark.parametrize(
    ("text", "architecture", "message"),
    [
        ("h1000", "sm_80", "--device='h1000': give a size .* H100"),
        ("400MiB", "sm_80", "--device='400MiB': the CUDA context needs more"),
        ("MI300X", "sm_80", "--device='MI300X': it does not run CUDA"),
        ("24GiB", "sm_999", "--architecture='sm_999': give one of sm_100, sm_120"),
    ],
)
def test_an_unknown_device_is_refused(text, architecture, message):
    with pytest.raises(SettingError, match=message):
        emulated_device(text, architecture)


def test_the_list_has_the_devices_with_cuda(capsys):
    assert main(["emulate", "--list"]) == 0
    said = capsys.readouterr().out
    assert "H100           sm_90" in said
    assert "MI300X" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h100"], "--device='h100': give it and, after --, the program"),
        (["--device", "h1000", "--", "python"], "--device='h1000': "),
    ],
)
def test_a_missing_program_and_an_unknown_device_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["emulate", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
