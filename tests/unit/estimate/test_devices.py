import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import parse_devices
from adaptive_batch.estimate.devices import DEVICES, find_device
from adaptive_batch.memory import GIB
from adaptive_batch.torchtune.configuration import block
from adaptive_batch.torchtune.settings import EstimateSettings

# Devices by their torch.cuda.get_device_name().
NAMES_OF_TORCH = {
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA GH200 480GB": "GH200",
    "AMD Instinct MI300X": "MI300X",
}


@given(st.sampled_from(DEVICES), st.data())
def test_case_and_punctuation_are_ignored(device, data):
    separator = data.draw(st.sampled_from(["", "-", " ", "_", "/"]))
    written = re.sub(r"[-]", separator, device.name)
    written = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in written)
    assert find_device(written) is device


@pytest.mark.parametrize(("name", "device"), NAMES_OF_TORCH.items())
def test_the_names_of_torch_are_known(name, device):
    assert find_device(name).name == device


@pytest.mark.parametrize(
    ("size", "total_bytes", "shown"),
    [
        ("900 MiB", 900 * 1024**2, "0.879 GiB"),
        ("24GB", 24 * 10**9, "22.35 GiB"),
        (16 * GIB, 16 * GIB, "16.00 GiB"),
    ],
)
def test_a_size_is_a_device(size, total_bytes, shown):
    device = find_device(size)
    assert (device.total_bytes, device.describe(), device.source) == (total_bytes, shown, "")


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("A100", "near it: A100-..GB, A100-..GB$"),
        ("H1000", "near it: H100, "),
        ("potato", "there are: T4, V100-16GB"),
        *((value, "; ") for value in ("", "80", "80 apples", "-80GiB", "0GiB")),
        *((value, "$") for value in (0.9, 1.0, float("nan"), 4090, -1, 0, True, None, {"H100": 1})),
    ],
)
def test_an_unknown_device_is_refused_with_suggestions(value, remedy):
    says = 'give a size with its unit, such as "80GiB", or a device such as H100'
    with pytest.raises(
        SettingError, match=rf"^estimate\.devices={re.escape(repr(value))}: {says}.*{remedy}"
    ):
        find_device(value)
    with pytest.raises(SettingError, match=f"such as H100.*{remedy}"):
        parse_devices(["T4", value])


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [(None, None), (0, 0), (10**9, 10**9), ("600MiB", 600 * 2**20), ("0.5 GiB", 2**29)],
)
def test_the_context_is_a_number_of_bytes_or_a_size(given, num_bytes):
    assert block(EstimateSettings)("estimate", {"context": given}).context == num_bytes


@pytest.mark.parametrize(
    ("name", "mebibytes"), [("H100", 770), ("H200", 770), ("A100-80GB", 500), ("80GiB", 500)]
)
def test_the_default_context_depends_on_the_device(name, mebibytes):
    (device,) = parse_devices(name)
    taken = mebibytes * 2**20
    assert device.target(context_bytes=None).budget_bytes == device.total_bytes - taken
    assert device.target(context_bytes=0).budget_bytes == device.total_bytes


@pytest.mark.parametrize("given", [-1, True, 0.5, "much", "600", [1]])
def test_an_invalid_context_is_refused(given):
    says = rf"^estimate\.context={re.escape(repr(given))}: give a size such as "
    with pytest.raises(SettingError, match=says):
        block(EstimateSettings)("estimate", {"context": given})
