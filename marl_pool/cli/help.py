"""Help of each verb: its summary, explanations and examples."""

from marl_pool.options.plugins import Registry

STATUS = """\
exit status: 0 finished; 1 failed; 2 bad input; 75 with --or-resume, not finished within
time_limit; 130, 143 and 138 stopped by Ctrl-C, SIGTERM and SIGUSR1, with a checkpoint
"""
"""Part of the help of verbs that train."""
KEYS = """\
Arguments of the form key=value set a key; group=option selects a file of a group:

  {groups}

For {classes} the option may be package.module:Class,
a class of your own. `marl-pool {verb} --cfg` prints every key with its meaning.
"""
"""First paragraphs of the help of verbs with config groups."""

HELP_OF_LIBRARY = {
    "train": """train a policy with PPO
{keys}
examples:
  marl-pool train
  marl-pool train experiment=simple_centroid pooling=max env.num_noise=16 seed=3
  marl-pool train ppo=paper total_steps=4e6 --num-env-runners 4 --run-dir runs/paper
  marl-pool train pooling=my_package.my_module:MyPool pooling.width=16
""",
    "evolve": """evolve a policy, a population at a time
{keys}
All members of a generation play the same episodes; --num-workers processes play
simulators.

examples:
  marl-pool evolve experiment=cartpole_attention_neuron
  marl-pool evolve policy=feed_forward evolution=pgpe evolution.population=64 seed=3
  marl-pool evolve evolution=cma init=zeros repetitions=32 time_limit=600
""",
    "clone": """clone a teacher's behavior
{keys}
teacher=… is the folder of a run or policy, heuristic, a name of `marl-pool list
teachers`, or package.module:Class of a policy. clone=sequences is for students with a
memory, clone=steps for those without.

examples:
  marl-pool clone teacher=heuristic perturbation=shuffle
  marl-pool clone teacher=runs/my-run policy=feed_forward clone=steps clone.rounds=4
  marl-pool clone experiment=pong_clone_remembering
""",
    "fit": """fit a network to a supervised task
{keys}
A supervised study of a pooling head or an encoder, without RL. scale= sets its size.
Grids of such runs: `marl-pool sweep --verb fit`.

examples:
  marl-pool fit task=knn_centroid pooling=ada task.k=4
  marl-pool fit task=clustering encoder=set_transformer pooling=none scale=tiny
  marl-pool fit task=images pooling=cls data_dir=my-data task.dataset=fashion_mnist
""",
    "sweep": """train a grid of policies, several at a time
{keys}
key=a,b or key=range(0,3) gives a key several values, and experiment=PRESET may; every
combination is a trial, an ordinary run in DIR/trials. All are checked before the first
one starts. With --address, DIR must be on a file system that the cluster shares, or
--storage must be given. With --search, Optuna proposes the values of --trials N trials
from choice(a,b), uniform(low,high), log_uniform(low,high) and int_uniform(low,high),
and ASHA stops trials that do worse than others.

examples:
  marl-pool sweep pooling=ada,avg,max,cls env.counts=1-31-0,1-3-28 seed=0,1,2
  marl-pool sweep experiment=adapool/figure5 seed=0,1,2 ppo=fast --dry-run
  marl-pool sweep --search --trials 30 'ppo.lr=log_uniform(1e-4,1e-2)'
  marl-pool sweep --verb fit task=knn_centroid pooling=ada,avg,max,cls task.k=1,4,16
""",
    "resume": """resume a stopped run or sweep
Training continues from the newest checkpoint, a sweep with its unfinished trials.
Only run control may be changed: total_steps, total_generations or total_batches,
time_limit, env_timeout, env.workers, storage, callbacks, checkpoint.*, resources.*;
threads, device and data_dir of a fit; and sweep.* of a sweep. A URL is fetched to runs/
or sweeps/, and mirrored again.

examples:
  marl-pool resume runs/my-run
  marl-pool resume runs/my-run total_steps=2e6 time_limit=600
  marl-pool resume sweeps/my-sweep sweep.concurrency=4
  marl-pool resume s3://my-bucket/runs/my-run
  marl-pool resume runs/my-run --plugin my_package.my_module:MyPool
""",
    "evaluate": """measure a policy under perturbations
{keys}
env.KEY=… measures a run in a different environment from training. A policy without a
run is named by its folder, with env=NAME if that names no environment, by
pretrained=NAME, or by hf://USER/NAME[@REVISION][/FOLDER] on the Hugging Face Hub; its
results are a new run, DIR or a folder in evaluations/.

examples:
  marl-pool evaluate runs/my-run
  marl-pool evaluate runs/my-run suite=attention_neuron env.noise_channels=5
  marl-pool evaluate runs/one runs/two suite=attention_neuron
  marl-pool evaluate runs/my-run --plugin my_package.my_module:MyPool
""",
    "render": """make a video of a policy
{keys}
Policies are named as for `marl-pool evaluate`; several are shown side by side in one
video. Tokens that the policy perceives in a perturbed form have a mark, which a legend
explains.

examples:
  marl-pool render runs/my-run
  marl-pool render runs/my-run perturbation=occlude beside_clean=true rows=2
  marl-pool render runs/ada runs/max perturbation=inject --out ada-and-max
""",
    "play": """watch and disturb a policy in the browser
{keys}
A page in the browser, served to this machine alone until Ctrl-C, shows each policy's
episode beside its unperturbed twin, and lets you disturb it by severities, clicks,
drags or a push. Policies are named as for `marl-pool evaluate`. --export needs no
server.

examples:
  marl-pool play pretrained=cartpole_attention_neuron_reshuffled
  marl-pool play runs/ada runs/max --no-browser --port 8000
  marl-pool play runs/ada --export demo.html
""",
    "report": """write a page about one run or several
FILE becomes a self-contained page: learning curves, robustness, comparisons, videos,
and the origin of each number. Runs that differ only in their seed are one method. Each
run's newest evaluation counts; evaluate=true makes missing ones with the settings of
the others, and accepts keys of `marl-pool evaluate`.
`marl-pool report --cfg` prints every key with its meaning.

examples:
  marl-pool report runs/my-run
  marl-pool report runs/ada-0 runs/ada-1 runs/max-0 runs/max-1 --out ada-or-max.html
  marl-pool report sweeps/my-sweep/trials/* videos=false
  marl-pool report runs/one runs/two evaluate=true suite=quick episodes=64
""",
    "export": """export a policy for other programs
The file computes the most likely action from features, types and padding of a batch of
sets. It is compared with the policy on random sets. torch writes a file for
torch.export.load, onnx one for any ONNX runtime. Policies with a memory cannot be
exported.
With --action-mask a fourth input, action_mask (B, L) bool, says which options of the
action's choices are allowed.

examples:
  marl-pool export runs/my-run --to onnx
  marl-pool export runs/my-run --to torch --out my-policy.pt2
  marl-pool export pretrained=cartpole --to onnx
""",
    "push": """upload a policy to the Hugging Face Hub
Policy, card, newest evaluation and video become a commit of the repository USER/NAME,
which is created if it is missing; without a video, one is rendered. From then on
hf://USER/NAME names the policy for evaluate, render, play, export and load_policy.
Files that no push has written are replaced only with --force. --dry-run needs no
network.

examples:
  marl-pool push runs/my-run hf://me/my-policy --dry-run
  marl-pool push runs/my-run hf://me/my-policy --license mit
""",
    "check-env": """check an environment before training
A few episodes with random actions are compared with the contract of an environment:
shapes, dtypes, ranges, equal episodes from equal seeds, alone and in a batch, and an
exact continuation of a saved state. Prints one line for each check; exit status 1 if
one fails.

examples:
  marl-pool check-env env=simple_tag env.prey=learned
""",
    "show": """show a run's state, results and next commands
examples:
  marl-pool show runs/my-run
""",
    "ls": """list the runs in a folder
DIR is the working directory by default. Runs in its folders, and in the trials of
sweeps in them, are listed.

examples:
  marl-pool ls
  marl-pool ls sweeps/my-sweep
""",
    "list": """list registered names, presets and pretrained policies
examples:
  marl-pool list
  marl-pool list pooling
  marl-pool list pooling ada
  marl-pool list experiments
  marl-pool list pretrained cartpole_feed_forward
""",
    "help": """show the options and examples of a verb
examples:
  marl-pool help
  marl-pool help train
""",
}
HELP: Registry[str] = Registry(
    "verb",
    HELP_OF_LIBRARY,
    lambda plugins: {
        name: f"{command.summary}\n{command.epilog}"
        for name, command in plugins.commands.items()
    },
)
"""Help of each verb: its summary, explanations and examples."""
