"""A pooling head as a user would write one."""

from marl_pool import Pooling


class SumPooling(Pooling):
    """Sum of the tokens present."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def forward(self, x, padding=None, types=None):
        return x.sum(dim=1)


class Unfit(Pooling):
    """A head with a mistake: it returns one number instead of ``dim_out``."""

    def forward(self, x, padding=None, types=None):
        return x.sum(dim=(1, 2))[:, None]
