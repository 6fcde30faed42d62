"""Write a pooling layer, use it in a torch model, and train a policy with it.

    python examples/custom_pooling.py
    marl-pool train pooling=custom_pooling:GatedSum pooling.scale=0.1   # in examples/

Arguments are overrides, as for ``marl-pool train``.
"""

import argparse

import torch
from torch import Tensor, nn

import marl_pool
from marl_pool.pooling import Pooling


class GatedSum(Pooling):
    r"""Sum of the tokens, each scaled by a learned gate.

    .. math:: y = s \sum_i \sigma(w^\top x_i + b) \, x_i

    Args:
        dim: D, width of the tokens.
        scale: s, a constant factor.
    """

    def __init__(self, dim: int, *, scale: float = 0.1) -> None:
        super().__init__(dim)
        self.scale, self.gate = scale, nn.Linear(dim, 1)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool (B, N, D) to (B, D); padded tokens are already zero."""
        return self.scale * (self.gate(x).sigmoid() * x).sum(dim=1)


def main() -> None:
    """Pool a batch of sets, then train a policy that pools in the same way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="as for marl-pool train")
    vectors = GatedSum(64)(torch.randn(32, 10, 64))
    print(tuple(vectors.shape))
    # The run stores the name module:Class, by which the class is found again.
    head = ("pooling=custom_pooling:GatedSum", "pooling.scale=0.05")
    run = marl_pool.train(*head, "time_limit=60", *parser.parse_args().overrides)
    print(f"{run.path}: last return {run.rows()[-1]['return_mean']:.2f}")


if __name__ == "__main__":
    main()
