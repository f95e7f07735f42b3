"""experiment=probe with what a test gives, small enough to be measured in a moment."""

from omegaconf import OmegaConf

from experiments.ablation import Ablation
from experiments.lab.load import subject
from experiments.lab.peers.process import PeerProcess
from experiments.lab.show.progress import Steps

# On the clock of an engine without a model, and requests that half share a prefix.
DRY = [
    *("model=dry", "engine.model.device=cpu", "engine.model.dry.max_model_len=2048", "engine.model.dry.step_ms=4"),
    *("engine.model.dry.prefill_token_us=50", "engine.model.dry.decode_token_us=300"),
]
FEW = ["workload.count=24", "workload.prefix_tokens=64", "workload.suffix_tokens=16", "workload.output_tokens=12"]


def probe(compose_config, *overrides, **experiment):
    """Two variants of the engine at one point; without claims, plots and samples."""
    nothing = ("experiment.claims=[]", "experiment.plots=[]", "experiment.samples=0")
    config = compose_config("experiment=probe", *nothing, *overrides)
    OmegaConf.set_struct(config, False)
    config.experiment.update({"variants": {"transformers": {}, "engine": {"seed": 7}}, "points": {}, **experiment})
    OmegaConf.set_struct(config, True)
    return Ablation.from_config(config)


def measured(experiment):
    with Steps("test") as steps:
        return experiment.measure(steps)


def run(config, cls=Ablation):
    experiment = cls.from_config(config)
    return experiment, measured(experiment)


def served_by(kind, config, settings):
    """A server in a process of its own, with clients."""
    server = PeerProcess(kind.label, kind.can.module, config, settings.of(kind), threads=1)
    return subject.open_subject(kind, settings, server)
