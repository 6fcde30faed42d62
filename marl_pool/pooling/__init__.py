"""Pooling heads: from a set of vectors to one vector."""

from typing import TYPE_CHECKING, Any

from marl_pool.utils.construction import build
from marl_pool.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from marl_pool.pooling.ada import AdaPool as AdaPool
    from marl_pool.pooling.attention_neuron import AttentionNeuron as AttentionNeuron
    from marl_pool.pooling.base import Pooling as Pooling
    from marl_pool.pooling.cls_token import ClsToken as ClsToken
    from marl_pool.pooling.cnn import GridCNN as GridCNN
    from marl_pool.pooling.flatten import Flatten as Flatten
    from marl_pool.pooling.gated import GatedAttention as GatedAttention
    from marl_pool.pooling.hopfield import HopfieldPooling as HopfieldPooling
    from marl_pool.pooling.learned_aggregation import (
        LearnedAggregation as LearnedAggregation,
    )
    from marl_pool.pooling.lstm import LSTMPool as LSTMPool
    from marl_pool.pooling.means import PowerMean as PowerMean
    from marl_pool.pooling.means import SoftmaxPool as SoftmaxPool
    from marl_pool.pooling.memory import MemoryPooling as MemoryPooling
    from marl_pool.pooling.merge import Merge as Merge
    from marl_pool.pooling.multi import Multi as Multi
    from marl_pool.pooling.pma import PMA as PMA
    from marl_pool.pooling.reduce import AvgPool as AvgPool
    from marl_pool.pooling.reduce import MaxPool as MaxPool
    from marl_pool.pooling.reduce import SumPool as SumPool
    from marl_pool.pooling.vision_neuron import VisionNeuron as VisionNeuron

POOLING: dict[str, str] = {
    "ada": "marl_pool.pooling.ada:AdaPool",
    "attention_neuron": "marl_pool.pooling.attention_neuron:AttentionNeuron",
    "avg": "marl_pool.pooling.reduce:AvgPool",
    "cls": "marl_pool.pooling.cls_token:ClsToken",
    "cnn": "marl_pool.pooling.cnn:GridCNN",
    "flatten": "marl_pool.pooling.flatten:Flatten",
    "gated": "marl_pool.pooling.gated:GatedAttention",
    "hopfield": "marl_pool.pooling.hopfield:HopfieldPooling",
    "learned_aggregation": "marl_pool.pooling.learned_aggregation:LearnedAggregation",
    "lstm": "marl_pool.pooling.lstm:LSTMPool",
    "max": "marl_pool.pooling.reduce:MaxPool",
    "merge": "marl_pool.pooling.merge:Merge",
    "multi": "marl_pool.pooling.multi:Multi",
    "pma": "marl_pool.pooling.pma:PMA",
    "power": "marl_pool.pooling.means:PowerMean",
    "softmax": "marl_pool.pooling.means:SoftmaxPool",
    "sum": "marl_pool.pooling.reduce:SumPool",
    "vision_neuron": "marl_pool.pooling.vision_neuron:VisionNeuron",
}


def pooling_names() -> list[str]:
    """The registered pooling heads."""
    return sorted(POOLING)


def make_pooling(name: str, *, dim: int, **options: Any) -> "Pooling":
    """Build a pooling head.

    Args:
        name: one of `pooling_names`, or ``package.module:Class`` of your own.
        dim: D, the width of the vectors to be pooled.
        **options: of the head's constructor.

    Raises:
        InputError: an unknown name or a wrong option.
    """
    from marl_pool.pooling.base import Pooling

    return build(name, POOLING, "pooling", Pooling, {"dim": dim, **options})


__getattr__, __dir__ = lazy_exports(
    __name__,
    (
        *POOLING.values(),
        "marl_pool.pooling.memory:MemoryPooling",
        "marl_pool.pooling.base:Pooling",
    ),
)
