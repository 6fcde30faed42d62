"""The supervised studies, by name; each file holds one `Task`."""

TASKS: dict[str, str] = {
    "clustering": "marl_pool.training.supervised.tasks.clustering:Clustering",
    "generation": "marl_pool.training.supervised.tasks.generation:ImageGeneration",
    "images": "marl_pool.training.supervised.tasks.images:ImageClassification",
    "knn_centroid": "marl_pool.training.supervised.tasks.knn_centroid:KnnCentroid",
    "mixture": "marl_pool.training.supervised.tasks.mixture:MixtureLikelihood",
    "reconstruction": (
        "marl_pool.training.supervised.tasks.reconstruction:Reconstruction"
    ),
    "merged_classification": (
        "marl_pool.training.supervised.tasks.merged_classification:MergedClassification"
    ),
}
"""Short name → ``module:Class``."""
