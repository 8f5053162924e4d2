import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from adaptive_batch.__main__ import main
from adaptive_batch.config_files import config_files, copy_config, shipped_configs
from adaptive_batch.errors import SettingError

NAMES = {
    "demo_cpu",
    "gemma2_2B",
    "llama3_1_70B_8gpu",
    "llama3_1_8B",
    "llama3_1_8B_8gpu",
    "llama3_1_8B_dpo_8gpu",
    "llama3_1_8B_lora",
    "llama3_1_8B_lora_dpo",
    "llama3_1_8B_qlora",
    "llama3_2_1B",
    "llama3_2_1B_lora",
    "llama3_2_1B_lora_distill",
    "llama3_2_3B",
    "llama3_2_3B_lora_dpo",
    "phi4_14B",
    "qwen2_5_0_5B",
    "qwen2_5_1_5B",
    "qwen2_5_7B",
    "qwen2_5_7B_lora",
    "qwen2_5_7B_lora_dpo",
}


def test_every_config_is_listed_with_a_description():
    listed = shipped_configs()
    assert {name for name, _ in listed} == NAMES
    assert [name for name, _ in listed] == sorted(NAMES)
    for _, description in listed:
        assert 20 < len(description) <= 120
        assert not description.startswith("#")


def test_the_demo_config_does_not_write_to_the_folders_of_the_demo():
    config = OmegaConf.load(config_files()["demo_cpu"])
    folder = Path(config.demo_dir)
    assert Path(config.output_dir).parent == folder
    assert Path(config.output_dir).name not in ("base", "cache", "data", "tuned")


def test_a_config_is_found_by_its_name():
    assert config_files()["demo_cpu"].name == "demo_cpu.yaml"
    for no_name in ("", "demo", "demo_cpu.yaml", "../configs/demo_cpu", "DEMO_CPU"):
        assert no_name not in config_files()


@pytest.mark.parametrize(("destination", "name"), [("", "demo_cpu.yaml"), ("my.yaml", "my.yaml")])
def test_a_copy_keeps_its_content_and_takes_the_name_of_a_file(tmp_path, destination, name):
    copy = copy_config("demo_cpu", tmp_path / destination)
    assert copy == tmp_path / name
    assert copy.read_bytes() == config_files()["demo_cpu"].read_bytes()


@pytest.mark.parametrize("destination", [".", "demo_cpu.yaml"])
def test_an_existing_file_is_not_overwritten(tmp_path, destination):
    mine = tmp_path / "demo_cpu.yaml"
    mine.write_text("batch_size: 3\n")
    with pytest.raises(SettingError, match="the file exists already"):
        copy_config("demo_cpu", tmp_path / destination)
    assert mine.read_text() == "batch_size: 3\n"


def test_a_dangling_link_is_not_overwritten(tmp_path):
    link = tmp_path / "demo_cpu.yaml"
    link.symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(SettingError, match="exists already"):
        copy_config("demo_cpu", link)
    assert not (tmp_path / "elsewhere.yaml").exists()


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(SettingError, match=f"the folder {tmp_path / 'no'} does not exist"):
        copy_config("demo_cpu", tmp_path / "no" / "demo.yaml")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama3_1_8b", "llama3_1_8B"),
        ("Demo-CPU", "demo_cpu"),
        ("qwen2_5_0.5B", "qwen2_5_0_5B"),
        ("zzz", "phi4_14B"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_names(tmp_path, name, near):
    with pytest.raises(SettingError, match=near) as refused:
        copy_config(name, tmp_path)
    assert (refused.value.key, refused.value.value) == ("NAME", name)
    assert list(tmp_path.iterdir()) == []


def test_the_command_lists_a_config_on_each_line(capsys):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(NAMES)
    assert (
        len(
            {
                line.index(description)
                for line, (_, description) in zip(lines, shipped_configs(), strict=True)
            }
        )
        == 1
    )


def test_the_command_needs_no_torch():
    program = "import sys; sys.modules.update(dict.fromkeys(['torch', 'torchtune', 'omegaconf'])); "
    program += "from adaptive_batch.__main__ import main; main(['configs'])"
    listed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "demo_cpu" in listed


def test_the_command_copies_and_prints_the_path(tmp_path, capsys):
    assert main(["configs", "demo_cpu", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "demo_cpu.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["configs", "demo_cpu"], "give a destination: configs demo_cpu DEST"),
        (["configs", "demo_cpi", "."], "near it: demo_cpu"),
        ([], "required: command"),
    ],
)
def test_invalid_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
