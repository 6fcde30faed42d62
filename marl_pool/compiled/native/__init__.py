"""The kernel for narrow set transformers on a CPU, in C++."""
