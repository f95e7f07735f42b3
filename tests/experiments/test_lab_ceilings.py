"""The ceilings experiment, small: its rows, and the file that it keeps."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from experiments import ceilings as experiment
from experiments.ceilings import CeilingsExperiment
from experiments.lab.config.axes import CONF
from experiments.lab.execute import execute
from experiments.lab.measure import ceilings, clocks, hardware
from experiments.lab.measure.hardware import Hardware
from experiments.lab.show import answer
from experiments.lab.show.progress import Steps
from experiments.lab.store import result as store
from experiments.lab.store.rows import Row
from mini_infer.core.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_figures")]  # some seconds together

SMALL = [
    "experiment=ceilings",
    "engine.model.device=cpu",
    "experiment.mib.cpu=[1,2,4]",
    "experiment.matmul.cpu=[32,64]",
    "experiment.claims=[]",
    "measure.repeats=1",
    "measure.threads=2",
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(experiment, "PASS_S", 1e-4)
    monkeypatch.setattr(experiment, "TOTAL_S", 1e-3)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_runs_reports_and_keeps_what_it_found(compose_config, tmp_path, monkeypatch):
    config = compose_config(*SMALL, f"paths.results={tmp_path / 'results'}", f"paths.reports={tmp_path / 'reports'}")
    gpu = SimpleNamespace(read=lambda: clocks.GpuState(1755.0, 690.0, 61.0, None))
    monkeypatch.setattr(clocks, "find_gpu", lambda device: gpu)
    text = execute(config, "ceilings", [], tmp_path).read_text()
    assert "Ceilings: what this machine can do at most" in text
    assert "the GPU had in the median (power: over a second) 1,755 MHz, 690 W, 61 °C." in text
    kept = tmp_path / "results" / "hardware" / "cpu.yaml"  # beside results that are not the repository's own
    found = ceilings.read(kept)
    assert (found.machine, found.host_memory_gib) == (hardware.name("cpu"), hardware.host_memory_gib())
    assert [c.threads for c in found.ceilings] == [1, 2]
    assert set(found.ceilings[0].matmul_tflop_s) == {"float32", "bfloat16"}
    one, two = found.ceilings
    assert two.read_gb_s >= one.read_gb_s  # a machine may leave a thread idle
    assert ceilings.find(kept.parent, Hardware(), "cpu", 2)[0] == two


def test_what_was_not_measured_again_stays(tmp_path):
    path = tmp_path / "gpu.yaml"
    known = hardware.Ceilings(4000.0, 4400.0, {"int8": 1500.0}, link_gb_s={"to_host": 50.0, "to_peer": 390.0})
    ceilings.save(path, Hardware("a GPU", ceilings=(known,)))
    now = hardware.Ceilings(4100.0, 4500.0, {"int8": 1400.0}, link_gb_s={"to_host": 55.0})
    ceilings.save(path, Hardware("a GPU", ceilings=(now,)))
    (kept,) = ceilings.read(path).ceilings
    assert kept == dataclasses.replace(now, link_gb_s={"to_host": 55.0, "to_peer": 390.0})
    ceilings.save(path, Hardware("another GPU", ceilings=(now,)))
    assert ceilings.read(path).others[0].ceilings == (now,), "a link of the first one is not its own"


def test_each_machine_keeps_its_own_result(compose_config, tmp_path, monkeypatch):
    paths = [f"paths.results={tmp_path / 'results'}", f"paths.reports={tmp_path / 'reports'}"]
    for machine in ("AMD EPYC (family 25, model 17)", "Another CPU 1", "AMD EPYC (family 25, model 17)"):
        monkeypatch.setattr(hardware, "name", lambda device, name=machine: name)
        page = execute(compose_config(*SMALL, *paths), "ceilings", [], tmp_path).read_text()
    stored = sorted((tmp_path / "results/ceilings/none.in_process/cpu").glob("*.json"))
    assert {path.stem: store.read(path).info.machine for path in stored} == {
        "default": "AMD EPYC (family 25, model 17)",
        "Another_CPU_1": "Another CPU 1",
    }
    assert "cpu: AMD EPYC (family 25, model 17) |" in page
    assert "## cpu, with `Another_CPU_1`" in page
    kept = ceilings.read(tmp_path / "results/hardware/cpu.yaml")
    assert [each.machine for each in kept.machines] == ["AMD EPYC (family 25, model 17)", "Another CPU 1"]


def test_the_name_of_a_run_says_the_machine_once_and_what_was_changed(tmp_path):
    stored = tmp_path / "repeats=2.json"
    assert ceilings.run_of(stored, "A CPU") == "repeats=2"
    stored.write_text("{")
    assert ceilings.run_of(stored, "A CPU") == "repeats=2", "what cannot be read is replaced"


def test_the_repositorys_ceilings_are_where_they_are_looked_for():
    assert ceilings.read(ceilings.FOLDER / "h200.yaml").machine == "NVIDIA H200"


def test_the_page_begins_with_what_a_reader_looks_for():
    sentence = answer.sentence(store.read(CONF.parent / "results/ceilings/none.in_process/h200/default.json"))
    for name in ("reading", "copying", "(PCIe)", "bf16 products", "fp8 products", "int8 products"):
        assert re.search(rf"{re.escape(name)} [\d.,]+ (GB|TFLOP)/s", sentence), name


def test_the_repositorys_file_is_written_for_the_repositorys_results_only(compose_config, tmp_path):
    own = CeilingsExperiment.from_config(compose_config(*SMALL, "paths.results=results"))  # --record
    assert own._file == CONF.parent / "conf" / "hardware" / "cpu.yaml"
    elsewhere = CeilingsExperiment.from_config(compose_config(*SMALL, f"paths.results={tmp_path}"))
    assert elsewhere._file == tmp_path / "hardware" / "cpu.yaml"
    assert CeilingsExperiment.from_config(compose_config(*SMALL, "experiment.write=false"))._file is None


def test_torch_threads_are_put_back(compose_config):
    torch.set_num_threads(1)
    made = CeilingsExperiment.from_config(compose_config(*SMALL, "experiment.write=false"))
    with Steps("test") as steps:
        findings = made.measure(steps)
    assert torch.get_num_threads() == 1
    assert {(row.variant, row.point, row.metric) for row in findings.rows} == {
        (variant, point, metric)
        for variant in ("one_thread", "machine")
        for point, metrics in (
            *((f"mib={n}", ("read_gb_s", "copy_gb_s")) for n in (1, 2, 4)),
            *((f"size={n}", ("matmul_float32_tflop_s", "matmul_bfloat16_tflop_s")) for n in (32, 64)),
        )
        for metric in metrics
    }


def test_the_best_repeat_counts_and_cached_rates_fall_with_size(compose_config):
    made = CeilingsExperiment.from_config(
        compose_config(*SMALL, "experiment.mib.cpu=[1,4,16,64,256]", "experiment.write=false", "measure.threads=1")
    )
    reads = {1: 40.0, 4: 90.0, 16: 70.0, 64: 21.0, 256: 20.0}  # 1 MiB is slowed down by the calls' own cost
    rows = [
        Row("machine", f"mib={mib}", repeat, "read_gb_s", rate - repeat, "GB/s")
        for mib, rate in reads.items()
        for repeat in range(2)
    ]
    rows += [Row("machine", f"mib={mib}", 0, "copy_gb_s", 15.0, "GB/s") for mib in reads]
    rows += [
        Row("machine", f"size={n}", 0, f"matmul_{dtype}_tflop_s", n / 1000, "TFLOP/s")
        for n in (32, 64)
        for dtype in ("float32", "bfloat16")
    ]
    (found,) = made.found(rows).ceilings
    assert (found.read_gb_s, found.copy_gb_s, found.threads) == (20.0, 15.0, 1)
    assert found.cached_read_gb_s == {1: 90.0, 4: 90.0, 16: 70.0, 64: 21.0}
    assert found.matmul_tflop_s == {"float32": 0.064, "bfloat16": 0.064}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experiment.mib.cpu=[]", "experiment.mib.cpu must be a list of numbers from 1 on"),
        ("experiment.matmul.cpu=[0]", "experiment.matmul.cpu must be a list of numbers from 1 on"),
        ("experiment.formats.cpu=[int3]", "experiment.formats.cpu must be a list of float32, .*int8, got"),
        ("experiment.formats.cuda=[]", "experiment.formats.cuda must be a list of"),
        ("experiment.sustained_s=0", "experiment.sustained_s must be above 0"),
    ],
)
def test_mistakes_are_named(compose_config, override, message):
    with pytest.raises(ConfigError, match=message):
        CeilingsExperiment.from_config(compose_config(*SMALL, override))
