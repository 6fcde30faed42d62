"""Verbs that list registered names and import published weights."""

from argparse import Namespace

from marl_pool.cli.arguments import KINDS, PRETRAINED, PUBLISHED, WEIGHTS
from marl_pool.cli.common import print_paths
from marl_pool.utils import names
from marl_pool.utils.errors import InputError


def list_registered(arguments: Namespace, overrides: list[str]) -> int:
    """Print what is registered, of one kind or of all."""
    from marl_pool.config import registry
    from marl_pool.pretrained import pretrained_names, pretrained_summary
    from marl_pool.utils.signatures import summary

    if overrides:
        raise InputError(f"list takes no keys, got {overrides[0]!r}")
    if arguments.kind and arguments.kind not in KINDS:
        raise names.unknown("registry", arguments.kind, KINDS)
    # Print one kind, or all kinds under headings.
    for kind in [arguments.kind] if arguments.kind else KINDS:
        if not arguments.kind:
            print(f"{kind}:")
        if kind == PRETRAINED:
            lines = [(name, pretrained_summary(name)) for name in pretrained_names()]
        else:
            found = sorted(registry(kind).items())
            lines = [(name, summary(target)) for name, target in found]
        for name, text in lines:
            print(f"  {name:<16} {text}")
    return 0


def import_weights(arguments: Namespace, overrides: list[str]) -> int:
    """Convert published weights to a policy of this package."""
    if overrides:
        raise InputError(f"import-weights takes no keys, got {overrides[0]!r}")
    for kind, given, choices in (
        ("source", arguments.source, WEIGHTS),
        ("agent", arguments.agent, PUBLISHED),
    ):
        if given not in choices:
            raise names.unknown(kind, given, choices)
    from marl_pool.studies.attention_neuron.weights import import_weights

    print_paths([import_weights(arguments.file, arguments.agent, arguments.out)])
    return 0
