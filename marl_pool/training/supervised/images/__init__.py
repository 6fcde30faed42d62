"""Image datasets: IDX and CIFAR files, downloads, augmentation, patches."""
