"""Additions of the studies to `marl_pool`, found by the entry point ``studies``."""

from pathlib import Path

from marl_pool.options.plugins import PluginCommand, Plugins

ATTENTION_NEURON = "marl_pool_studies.attention_neuron"
ADAPOOL = "marl_pool_studies.adapool"
SWARM = "marl_pool_studies.swarm"
HIERARCHICAL = "marl_pool_studies.hierarchical"
DIAGNOSE = """\
{keys}
The policy plays unperturbed in an environment that marks which tokens matter for the
task. Signal loss, relation scores and the bounds of the AdaPool paper's Theorem 3.12
are written to the run, or with --out DIR to that folder, which also takes the table of
several runs. Environments and policies without a run are named as for `marl-pool
evaluate`.

examples:
  marl-pool diagnose runs/my-run
  marl-pool diagnose runs/my-run episodes=256 max_observations=32768 checkpoint=last
  marl-pool diagnose runs/my-run env.num_noise=60
  marl-pool diagnose runs/ada runs/avg runs/max --out my-table
"""
IMPORT_WEIGHTS = """\
FILE is a model.npz of the folder AttentionNeuron/pretrained in the repository
github.com/google/brain-tokyo-workshop. DIR becomes a folder with a policy, as in a run.

examples:
  marl-pool import-weights attention-neuron model.npz --agent cartpole_pi --out cartpole
"""
WEIGHTS = ("attention-neuron",)
"""Sources of published weights."""
AGENTS = ("ant_mlp", "ant_pi", "carracing", "carracing_pi", "cartpole_pi")
"""Agents with published weights."""
PLUGINS = Plugins(
    registries={
        "analysis": {
            "regression": f"{ATTENTION_NEURON}.analyses:regression",
            "latents": f"{ATTENTION_NEURON}.figures:draw_latents",
            "codes": f"{ATTENTION_NEURON}.figures:draw_code_map",
            "patches": f"{ATTENTION_NEURON}.figures:draw_attended",
        },
        "policy": {
            "attention_agent": f"{ATTENTION_NEURON}.attention_agent:AttentionAgent",
            "vision": f"{ATTENTION_NEURON}.vision:Vision",
        },
        "task": {
            "clustering": f"{SWARM}.tasks:Clustering",
            "generation": f"{SWARM}.generation:ImageGeneration",
            "images": f"{ADAPOOL}.image_classification:ImageClassification",
            "knn_centroid": f"{ADAPOOL}.knn_centroid:KnnCentroid",
            "mixture": f"{SWARM}.tasks:MixtureLikelihood",
            "reconstruction": f"{HIERARCHICAL}.tasks:Reconstruction",
            "merged_classification": f"{HIERARCHICAL}.tasks:MergedClassification",
        },
        "teacher": {"value_table": f"{ATTENTION_NEURON}.value_table:ValueTableTeacher"},
    },
    configs=Path(__file__).with_name("configs"),
    commands={
        "diagnose": PluginCommand(
            "measure how a policy pools signal",
            f"{ADAPOOL}.diagnosis.command:diagnose",
            DIAGNOSE,
            settings=f"{ADAPOOL}.diagnosis.settings:DiagnoseSettings",
        ),
        "import-weights": PluginCommand(
            "make a policy of published weights",
            f"{ATTENTION_NEURON}.weights:import_command",
            IMPORT_WEIGHTS,
            {
                "source": {"help": ", ".join(WEIGHTS), "metavar": "SOURCE"},
                "file": {"help": "the published .npz", "metavar": "FILE"},
                "--agent": {
                    "help": ", ".join(AGENTS),
                    "metavar": "NAME",
                    "required": True,
                },
                "--out": {"help": "new folder", "metavar": "DIR", "required": True},
            },
        ),
    },
    after_evaluation=f"{ATTENTION_NEURON}.analyses:compare_published",
)
