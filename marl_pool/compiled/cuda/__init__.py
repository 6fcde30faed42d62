"""The kernel for narrow set transformers on a GPU, compiled when it is first used."""
