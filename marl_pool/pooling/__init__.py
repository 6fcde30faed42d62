"""Pooling heads, which map a set of vectors to one vector."""

from typing import TYPE_CHECKING, Any

from marl_pool.options.construction import build
from marl_pool.options.plugins import Registry
from marl_pool.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from marl_pool.pooling.ada import AdaPooling as AdaPooling
    from marl_pool.pooling.attention import ClsPooling as ClsPooling
    from marl_pool.pooling.attention import (
        GatedAttentionPooling as GatedAttentionPooling,
    )
    from marl_pool.pooling.attention import HopfieldPooling as HopfieldPooling
    from marl_pool.pooling.attention import PMAPooling as PMAPooling
    from marl_pool.pooling.attention_neuron import (
        AttentionNeuronPooling as AttentionNeuronPooling,
    )
    from marl_pool.pooling.base import MemoryPooling as MemoryPooling
    from marl_pool.pooling.base import Pooling as Pooling
    from marl_pool.pooling.basic import AvgPooling as AvgPooling
    from marl_pool.pooling.basic import MaxPooling as MaxPooling
    from marl_pool.pooling.basic import PowerMeanPooling as PowerMeanPooling
    from marl_pool.pooling.basic import SoftmaxPooling as SoftmaxPooling
    from marl_pool.pooling.basic import SumPooling as SumPooling
    from marl_pool.pooling.merge import MergePooling as MergePooling
    from marl_pool.pooling.multi import MultiPooling as MultiPooling
    from marl_pool.pooling.recurrent import LSTMPooling as LSTMPooling
    from marl_pool.pooling.recurrent import Set2SetPooling as Set2SetPooling
    from marl_pool.pooling.slots import CNNPooling as CNNPooling
    from marl_pool.pooling.slots import FlattenPooling as FlattenPooling
    from marl_pool.pooling.slots import (
        LearnedAggregationPooling as LearnedAggregationPooling,
    )
    from marl_pool.pooling.statistics import PNAPooling as PNAPooling
    from marl_pool.pooling.statistics import QuantilePooling as QuantilePooling
    from marl_pool.pooling.statistics import SqrtNPooling as SqrtNPooling
    from marl_pool.pooling.statistics import StdPooling as StdPooling
    from marl_pool.pooling.statistics import TrimmedMeanPooling as TrimmedMeanPooling
    from marl_pool.pooling.vision_neuron import (
        VisionNeuronPooling as VisionNeuronPooling,
    )

POOLING = Registry(
    "pooling",
    {
        "ada": "marl_pool.pooling.ada:AdaPooling",
        "avg": "marl_pool.pooling.basic:AvgPooling",
        "max": "marl_pool.pooling.basic:MaxPooling",
        "cls": "marl_pool.pooling.attention:ClsPooling",
        "attention_neuron": "marl_pool.pooling.attention_neuron:AttentionNeuronPooling",
        "vision_neuron": "marl_pool.pooling.vision_neuron:VisionNeuronPooling",
        "flatten": "marl_pool.pooling.slots:FlattenPooling",
        "sum": "marl_pool.pooling.basic:SumPooling",
        "sqrtn": "marl_pool.pooling.statistics:SqrtNPooling",
        "std": "marl_pool.pooling.statistics:StdPooling",
        "quantile": "marl_pool.pooling.statistics:QuantilePooling",
        "trimmed": "marl_pool.pooling.statistics:TrimmedMeanPooling",
        "pna": "marl_pool.pooling.statistics:PNAPooling",
        "power": "marl_pool.pooling.basic:PowerMeanPooling",
        "softmax": "marl_pool.pooling.basic:SoftmaxPooling",
        "gated": "marl_pool.pooling.attention:GatedAttentionPooling",
        "pma": "marl_pool.pooling.attention:PMAPooling",
        "set2set": "marl_pool.pooling.recurrent:Set2SetPooling",
        "hopfield": "marl_pool.pooling.attention:HopfieldPooling",
        "merge": "marl_pool.pooling.merge:MergePooling",
        "multi": "marl_pool.pooling.multi:MultiPooling",
        "learned_aggregation": "marl_pool.pooling.slots:LearnedAggregationPooling",
        "lstm": "marl_pool.pooling.recurrent:LSTMPooling",
        "cnn": "marl_pool.pooling.slots:CNNPooling",
    },
)


def pooling_names() -> list[str]:
    """Return the names of the registered pooling heads."""
    return sorted(POOLING)


def make_pooling(name: str, *, dim: int, **options: Any) -> "Pooling":
    """Build a pooling head from its name.

    Args:
        name: one of `pooling_names`, or ``package.module:Class`` of a custom head.
        dim: D, the width of the vectors to pool.
        **options: options of the head's constructor.

    Raises:
        InputError: an unknown name or a wrong option.
    """
    from marl_pool.pooling.base import Pooling, validate_constructed

    head: Pooling = build(name, POOLING, "pooling", Pooling, {"dim": dim, **options})
    validate_constructed(head, f"pooling {name!r}")
    return head


__getattr__, __dir__ = lazy_exports(__name__)
