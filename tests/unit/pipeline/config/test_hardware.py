"""Hardware files and the clusters that are named by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.hardware import FOLDER, GIB, hardware_names, hardware_with, load_hardware, read_cluster
from pipeline.errors import ConfigError


@pytest.mark.parametrize("name", hardware_names())
def test_a_shipped_file_loads_and_every_number_has_a_source(name: str) -> None:
    config = load_hardware(name)
    assert config.bf16_flops > config.fp32_flops or not config.gpu  # an old CPU computes both alike
    lines = [line for line in (FOLDER / f"{name}.yaml").read_text("utf8").splitlines() if not line.startswith("#")]
    values = {key.strip(): rest for key, _, rest in (line.partition(":") for line in lines)}
    assert bool(config.gpu) == bool(config.gpus_per_node)
    assert len(values) == len(lines) == 17, "with the GPU's name, or the bandwidth that one core reaches"
    for key, rest in values.items():
        number = rest.partition("#")[0].strip()
        assert key == "description" or number == "0" or "#" in rest, f"{key} of {name} has no source"


def test_a_gpu_of_another_form_has_no_file() -> None:
    """An H100 for PCIe has other links than one on a board with NVLink."""
    found = hardware_with("NVIDIA H100 80GB HBM3")
    assert found is not None
    assert found[0] == "H100-80"
    assert hardware_with("NVIDIA H100 PCIe") is None
    assert hardware_with("") is None


def test_a_cluster_is_nodes_gpus_and_hardware() -> None:
    cluster = read_cluster("16x8xH100-80")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus) == (16, 8, 128)
    assert cluster.device_bytes == int(79.1 * GIB)
    assert cluster.host_bytes == 1862 * GIB


def test_a_part_of_a_node_has_its_share_of_memory_and_cores() -> None:
    one = read_cluster("1xH100-80")
    assert (one.nodes, one.gpus, one.cores) == (1, 1, 112 // 8)
    assert (one.host_bytes, one.shared_bytes) == (1862 * GIB // 8, 931 * GIB // 8)


def test_nodes_without_gpus() -> None:
    assert read_cluster("4xcpu") == read_cluster("4x0xcpu")
    assert (read_cluster("4xcpu").nodes, read_cluster("4xcpu").gpus) == (4, 0)
    assert (read_cluster("4xcpu").cores, read_cluster("4x2xcpu").cores) == (112, 2)
    assert read_cluster("4x2xcpu").gpus == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("H100-80", "must be NODESxGPUSxHARDWARE"),
        ("axbxH100-80", "must be NODESxGPUSxHARDWARE"),
        ("8xh100", "did you mean H100-80"),
        ("8xTPU-v5", "A100-80, B200, GB200, H100-80, H200, cpu"),
        ("8xnowhere/own.yaml", "no such file"),
        ("2x16xH100-80", "at most 8"),
        ("2x113xcpu", "at most 112"),
        ("0x8xH100-80", "1 node or more"),
        ("2x0xH100-80", "1 GPU or more"),
    ],
)
def test_a_text_that_names_no_cluster_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_cluster(text)
    assert caught.value.key == "--as"


def test_a_users_own_file_is_checked_as_a_whole(tmp_path: Path) -> None:
    text = (FOLDER / "H100-80.yaml").read_text("utf8")
    own = tmp_path / "own.yaml"
    own.write_text(text.replace("cores: 112", "cores: 48"))
    assert read_cluster(f"2x4x{own}").hardware.cores == 48
    own.write_text(text.replace("cores: 112", "core: 48").replace("links: 8", "links: many"))
    with pytest.raises(ConfigError) as caught:
        read_cluster(f"2x4x{own}")
    assert {error.key for error in caught.value.errors} == {"core", "links"}, "core suggests cores"
    own.write_text(text.replace("device_memory_gib: 79.1", "device_memory_gib: 0").replace("gpus: 8", "gpus: 0"))
    with pytest.raises(ConfigError) as caught:
        read_cluster(f"2x4x{own}")
    assert {error.key for error in caught.value.errors} == {"device_memory_gib", "nvlink_gpus"}
    assert all(str(own) in str(error) for error in caught.value.errors)
