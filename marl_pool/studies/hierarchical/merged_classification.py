"""Image classification by merged tokens."""

from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import override

from marl_pool.studies.hierarchical.networks import MergedClassifier
from marl_pool.studies.hierarchical.task import MergedImages
from marl_pool.studies.image_task import error_of
from marl_pool.training.supervised.task import Batch


class MergedClassification(MergedImages):
    """Classify images by the encoder alone: Nair and Lieck, section 4.1.

    The loss is the cross-entropy. ``error_1`` is the fraction of wrong answers from one
    token, ``error`` the mean over ``levels``.
    """

    name, metric = "merged_classification", "error"
    has_decoder = False

    @override
    def make_network(self, seed: int) -> MergedClassifier:
        return MergedClassifier(self.layout, self.hierarchy, seed, self.num_classes)

    @override
    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        labels = batch["labels"]
        return {
            "cross_entropy": cross_entropy(output, labels, reduction="none"),
            "error": error_of(output, labels),
        }

    @override
    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        common = self.labels["train"].bincount().argmax().to(batch["labels"])
        return {"most_common_class": (batch["labels"] != common).float()}
