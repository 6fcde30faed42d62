"""Train set networks by TorchRL's PPO, and measure how robust the actor is.

    pip install '.[torchrl,plots]'
    python examples/torchrl_ppo.py --iterations 100

Two agents share the actor; the critic reads the set of both agents' tokens.
"""

import argparse

import torch
from torchrl.collectors import Collector
from torchrl.envs import PettingZooWrapper
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss

import marl_pool
from marl_pool.adapters.torchrl import SetActor, SetCritic, as_policy
from marl_pool.envs import make_env

ENV = {"name": "simple_centroid", "counts": "2-3-4"}  # agents, signal, distractors
LARGE, SIZES = {**ENV, "counts": "4-3-28"}, {"encoder": "identity", "dim": 64}


def main() -> None:
    """Train on the PettingZoo view of an environment, then evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--frames", type=int, default=1000, help="of an iteration")
    parser.add_argument("--episodes", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)
    env = PettingZooWrapper(make_env(**ENV), use_mask=False, seed=0)
    tokens, params = ("agent", "observation"), [("agent", "loc"), ("agent", "scale")]
    space = env.full_action_spec["agent", "action"].space
    low, high, spec = space.low[0], space.high[0], env.observation_spec
    actor = ProbabilisticActor(
        SetActor(spec, len(low), in_key=tokens, out_keys=params, **SIZES),
        in_keys=params,
        out_keys=[("agent", "action")],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": low, "high": high},
        return_log_prob=True,
        log_prob_key=("agent", "log_prob"),
    )
    critic = SetCritic(spec, scope="agents", in_key=tokens, **SIZES)
    loss = ClipPPOLoss(actor, critic, normalize_advantage=True)
    names = {key: ("agent", key) for key in ("action", "reward", "done", "terminated")}
    keys = {"sample_log_prob": ("agent", "log_prob"), "value": ("agent", "state_value")}
    loss.set_keys(**names, **keys)
    loss.make_value_estimator(gamma=0.9, lmbda=0.9)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    frames, total = args.frames, args.frames * args.iterations
    for batch in Collector(env, actor, frames_per_batch=frames, total_frames=total):
        for _ in range(4):
            with torch.no_grad():
                loss.value_estimator(batch, params=loss.critic_network_params)
            for rows in torch.randperm(len(batch)).split(250):
                losses = loss(batch[rows])
                objective = sum(v for k, v in losses.items() if k.startswith("loss_"))
                optimizer.zero_grad()
                objective.backward()
                optimizer.step()
    for env in (ENV, LARGE):
        marl_pool.evaluate(as_policy(actor), env, episodes=args.episodes, title="PPO")


if __name__ == "__main__":
    main()
