"""experiment=probe with what a test gives, small enough to be measured in a moment."""

from omegaconf import OmegaConf

from experiments.ablation import Ablation
from experiments.lab.show.progress import Steps


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
