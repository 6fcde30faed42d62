"""Image classification by merged tokens."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from marl_pool.studies.hierarchical.networks import MergedClassifier
from marl_pool.studies.hierarchical.task import MergedImages
from marl_pool.training.supervised.task import Batch


class MergedClassification(MergedImages):
    """Classify images by the encoder alone: Nair and Lieck, section 4.1.

    The loss is the cross-entropy. ``error_1`` is the fraction of wrong answers from one
    token, ``error`` the mean over ``levels``. See `MergedImages` for the arguments.
    """

    name, metric = "merged_classification", "error"
    has_decoder = False

    def make_network(self, seed: int) -> MergedClassifier:
        """Build the classifier."""
        return MergedClassifier(
            self.shape,
            self.patch,
            self.bands,
            self.num_classes,
            self.hierarchy,
            seed,
        )

    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropy and the error of each image."""
        labels = batch["labels"]
        return {
            "cross_entropy": cross_entropy(output, labels, reduction="none"),
            "error": (output.argmax(-1) != labels).float(),
        }

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """Score the most common class of the training set."""
        common = torch.bincount(self._labels["train"]).argmax().to(batch["labels"])
        return {"most_common_class": (batch["labels"] != common).float()}
