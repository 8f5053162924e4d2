import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import parse_devices
from adaptive_batch.estimate.devices import DEVICES, _plain, device_capacity
from adaptive_batch.memory import GIB
from adaptive_batch.torchtune.keys import block
from adaptive_batch.torchtune.settings import EstimateSettings

# What torch.cuda.get_device_name() says, and which device that is.
NAMES_OF_TORCH = {
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB",
    "NVIDIA A10G": "A10G",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA GH200 480GB": "GH200",
    "AMD Instinct MI300X": "MI300X",
}


@given(st.sampled_from(DEVICES), st.data())
def test_case_and_punctuation_of_a_name_do_not_matter(device, data):
    separator = data.draw(st.sampled_from(["", "-", " ", "_", "/"]))
    written = re.sub(r"[-]", separator, device.name)
    written = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in written)
    assert device_capacity(written) is device


@pytest.mark.parametrize(("name", "device"), NAMES_OF_TORCH.items())
def test_the_name_that_torch_gives_a_device_is_known(name, device):
    assert device_capacity(name).name == device


def test_no_two_devices_have_a_name_in_common():
    plain = [{_plain(name) for name in (device.name, *device.other_names)} for device in DEVICES]
    assert len(set().union(*plain)) == sum(map(len, plain))


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_a_device_has_a_source_an_architecture_and_less_memory_than_its_name_promises(device):
    assert device.source.startswith("https://")
    assert re.fullmatch(r"sm_\d{2,3}|gfx9\w{2}", device.architecture)
    promised = [
        int(size)
        for name in (device.name, *device.other_names)
        for size in re.findall(r"(\d+) ?GB\b", name)
        if "480" not in name  # the host memory of a Grace Hopper
    ]
    assert device.total_bytes > 10 * GIB
    assert all(device.total_bytes <= size * GIB for size in promised)


def test_the_compute_capability_follows_from_the_architecture():
    assert device_capacity("T4").compute_capability == (7, 5)
    assert device_capacity("H100").compute_capability == (9, 0)
    assert device_capacity("B200").compute_capability == (10, 0)
    assert device_capacity("RTX5090").compute_capability == (12, 0)
    assert device_capacity("MI300X").compute_capability is None
    assert device_capacity("80GiB").compute_capability is None


@pytest.mark.parametrize(
    ("size", "total_bytes", "shown"),
    [
        ("80GiB", 80 * GIB, "80.00 GiB"),
        ("900 MiB", 900 * 1024**2, "0.88 GiB"),
        ("24GB", 24 * 10**9, "22.35 GiB"),
        (16 * GIB, 16 * GIB, "16.00 GiB"),
    ],
)
def test_a_size_is_a_device_of_that_size(size, total_bytes, shown):
    device = device_capacity(size)
    assert (device.total_bytes, device.describe(), device.source) == (total_bytes, shown, "")


def test_a_device_is_shown_with_what_it_has():
    assert device_capacity("a100-40gb").describe() == "A100-40GB (39.39 GiB)"


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("A100", "there are A100-40GB and A100-80GB; give one of them"),
        ("v100", "there are V100-16GB and V100-32GB; give one of them"),
        ("H1000", "no such device is known; near it: H100, "),
        ("RTX4080", "near it: RTX4090, RTX5090, RTX3090; or give a size"),
        ("potato", "no such device is known; there are: T4, V100-16GB"),
        ("", "give a size with its unit"),
        ("80", "give a size with its unit"),
        ("80 apples", "give a size with its unit"),
        ("-80GiB", "give a size with its unit"),
        ("0GiB", "give a size with its unit"),
        (0.9, "there is no device to take a share of"),
        (1.0, "there is no device to take a share of"),
        (float("nan"), "there is no device to take a share of"),
        (4090, "a whole number is a number of bytes; .* or a device such as RTX4090"),
        (-1, "a whole number is a number of bytes"),
        (0, "a whole number is a number of bytes"),
        (True, 'give a size such as "80GiB", or a device such as H100'),
        (None, 'give a size such as "80GiB", or a device such as H100'),
        ({"H100": 1}, 'give a size such as "80GiB", or a device such as H100'),
    ],
)
def test_what_is_no_size_and_no_device_is_refused_with_what_would_do(value, remedy):
    with pytest.raises(SettingError, match=rf"^estimate\.devices={re.escape(repr(value))}: .*{remedy}"):
        device_capacity(value)
    with pytest.raises(SettingError, match=remedy):
        parse_devices(["T4", value])


def test_one_entry_or_a_list_of_them_is_read_in_its_order():
    assert [device.name for device in parse_devices("H100")] == ["H100"]
    assert [device.name for device in parse_devices(["80GiB", "l4", "A100-40GB"])] == ["80.00 GiB", "L4", "A100-40GB"]


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ([], 'give a size such as "80GiB", a device such as H100, or a list of them'),
        (["H100", "L4", "h100"], "'H100' and 'h100' are the same; leave one out"),
        (["1GiB", "1024MiB"], "'1GiB' and '1024MiB' are the same; leave one out"),
        ([["H100"]], 'give a size such as "80GiB", or a device such as H100'),
    ],
)
def test_a_list_that_is_empty_or_names_a_device_twice_is_refused(value, remedy):
    with pytest.raises(SettingError, match=re.escape(remedy)):
        parse_devices(value)


@pytest.mark.parametrize(
    ("given", "num_bytes"), [(None, None), (0, 0), (10**9, 10**9), ("600MiB", 600 * 2**20), ("0.5 GiB", 2**29)]
)
def test_the_context_is_a_number_of_bytes_or_a_size(given, num_bytes):
    assert block(EstimateSettings)("estimate", {"context": given}).context == num_bytes


@pytest.mark.parametrize("given", [-1, True, 0.5, "much", "600", [1]])
def test_what_is_no_size_of_a_context_is_refused(given):
    says = rf'^estimate\.context={re.escape(repr(given))}: give a size such as "600MiB"'
    with pytest.raises(SettingError, match=says):
        block(EstimateSettings)("estimate", {"context": given})
