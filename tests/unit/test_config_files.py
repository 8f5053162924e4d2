import pytest

from adaptive_batch.__main__ import main
from adaptive_batch.config_files import config_files, copy_config, shipped_configs
from adaptive_batch.errors import SettingError


def test_every_config_is_listed_with_a_description():
    listed = shipped_configs()
    assert [name for name, _ in listed] == sorted(config_files())
    for _, description in listed:
        assert 20 < len(description) <= 120
        assert not description.startswith("#")


@pytest.mark.parametrize(("destination", "name"), [("", "demo_cpu.yaml"), ("my.yaml", "my.yaml")])
def test_a_copy_keeps_its_content_and_takes_the_name_of_a_file(tmp_path, destination, name):
    copy = copy_config("demo_cpu", tmp_path / destination)
    assert copy == tmp_path / name
    assert copy.read_bytes() == config_files()["demo_cpu"].read_bytes()


@pytest.mark.parametrize("destination", [".", "demo_cpu.yaml"])
def test_an_existing_file_is_not_overwritten_and_no_folder_is_made(tmp_path, destination):
    mine = tmp_path / "demo_cpu.yaml"
    mine.write_text("batch_size: 3\n")
    with pytest.raises(SettingError, match="it cannot be created: File exists; give a new file"):
        copy_config("demo_cpu", tmp_path / destination)
    assert mine.read_text() == "batch_size: 3\n"
    with pytest.raises(SettingError, match="No such file or directory"):
        copy_config("demo_cpu", tmp_path / "no" / "demo.yaml")
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize(("name", "near"), [("qwen2_5_0.5B", "qwen2_5_0_5B"), ("zzz", "phi4_14B")])
def test_an_unknown_name_is_refused_with_the_nearest_names(tmp_path, name, near):
    with pytest.raises(SettingError, match=near) as refused:
        copy_config(name, tmp_path)
    assert (refused.value.key, refused.value.value) == ("NAME", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["configs", "demo_cpu"], "give a destination: configs demo_cpu DEST"),
        (["configs", "demo_cpi"], "near it: demo_cpu"),
        ([], "required: command"),
    ],
)
def test_invalid_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
