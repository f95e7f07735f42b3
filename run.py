"""Runs an experiment: `python run.py experiment=quickstart`. `python run.py --help` tells what can be chosen
and which commands there are beside it (list, show, report, compare, stale, predict, trace)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.lab import interrupts, sweep
from experiments.lab.commands import COMMANDS
from experiments.lab.config import ablation_spec, catalog, schema, typed
from experiments.lab.config.explain import explain
from mini_infer.core.errors import ConfigError, MiniInferError

ROOT = Path(__file__).resolve().parent
CONF = ROOT / "conf"


@contextmanager
def told() -> Iterator[None]:
    """Ends the program with a message for a person where the input was at fault. Other errors pass."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped by Ctrl-C or SIGTERM", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        message = explain(error, list(catalog.groups(CONF)))
        if message is None:
            raise
        label = "error: " if not isinstance(error, MiniInferError) or len(sys.argv) > 1 else ""
        print(f"{label}{message}", file=sys.stderr)
        sys.exit(2)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(config: DictConfig) -> None:
    # Here, too: of an error that leaves a job Hydra would say "Error executing job" first. An exit it lets pass.
    with told(), sweep.job():
        chosen = HydraConfig.get().runtime.choices.get("experiment")
        if config.experiment is None or chosen is None:
            raise ConfigError(f"no experiment chosen: add experiment=<name>\n\n{catalog.experiment_list(CONF)}")
        overrides = list(HydraConfig.get().overrides.task)
        ablation_spec.require_possible(typed.settle(config, chosen, overrides).config)  # before torch is loaded
        from experiments.lab.execute import execute

        execute(config, chosen, overrides, ROOT)


def main() -> None:
    # A scheduler's time limit, or `timeout`, is an interrupt as well: what was measured is kept.
    interrupts.listen(signal.SIGTERM)
    with told():
        first = next(iter(sys.argv[1:]), "")
        if first in COMMANDS:
            COMMANDS[first].run(first, sys.argv[2:], ROOT)
            return
        catalog.require_setting(first, CONF)
        if len(sys.argv) == 1:
            raise ConfigError(
                "choose an experiment: python run.py experiment=<name>\n\n"
                f"{catalog.experiment_list(CONF)}\n\n`python run.py --help` tells what else can be chosen."
            )
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its errors on, and `explain` words them
        schema.register(CONF, catalog.chosen(sys.argv[1:]))
        OmegaConf.register_new_resolver("lab.help", lambda: catalog.help_text(CONF), replace=True)
        sys.argv[1:] = catalog.shorthand(sys.argv[1:], CONF)
        job()


if __name__ == "__main__":
    main()
