"""AdaPool: the KNN-centroid task and image classification."""
