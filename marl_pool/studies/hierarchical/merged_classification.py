"""Classification by the tokens that an image's patches merged into."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from marl_pool.studies.hierarchical.networks import MergedClassifier
from marl_pool.studies.hierarchical.task import MergedImages
from marl_pool.training.supervised.task import Batch


class MergedClassification(MergedImages):
    """Image classification by the encoder alone (Nair and Lieck, section 4.1).

    ``error_1`` is the share of wrong answers from one token, ``error`` the mean over
    ``levels``.

    Args: see `MergedImages`.
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
        """Cross-entropy, and whether the answer is wrong."""
        labels = batch["labels"]
        return {
            "cross_entropy": cross_entropy(output, labels, reduction="none"),
            "error": (output.argmax(-1) != labels).float(),
        }

    def baselines(self, batch: Batch) -> dict[str, Tensor]:
        """The most common class of the training set for each image."""
        common = torch.bincount(self._labels["train"]).argmax().to(batch["labels"])
        return {"most_common_class": (batch["labels"] != common).float()}
