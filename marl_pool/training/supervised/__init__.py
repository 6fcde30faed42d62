"""Supervised fits: a `Task`, one trainer, k-fold cross-validation."""

TASKS: dict[str, str] = {
    "clustering": "marl_pool.studies.swarm.tasks:Clustering",
    "generation": "marl_pool.studies.swarm.generation:ImageGeneration",
    "images": "marl_pool.studies.adapool.image_classification:ImageClassification",
    "knn_centroid": "marl_pool.studies.adapool.knn_centroid:KnnCentroid",
    "mixture": "marl_pool.studies.swarm.tasks:MixtureLikelihood",
    "reconstruction": "marl_pool.studies.hierarchical.tasks:Reconstruction",
    "merged_classification": (
        "marl_pool.studies.hierarchical.tasks:MergedClassification"
    ),
}
"""Supervised tasks by short name."""
