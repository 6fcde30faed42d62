"""The options of a config group that suit a verb, and errors for the others."""

from collections.abc import Mapping
from pathlib import Path

from marl_pool.config.option_files import (
    bases_first,
    choices_in,
    content_of,
    files_of,
)
from marl_pool.config.sections import GROUPS, NONE, Group, built_in
from marl_pool.config.verbs import VERBS
from marl_pool.options import names
from marl_pool.utils.errors import InputError


def options_for(verb: str, group: str, config_dir: Path | None = None) -> list[str]:
    """List the options of a config group that suit a verb."""
    options = sorted({*built_in(group), *files_of(group, config_dir)})
    return [option for option in options if suits(verb, group, option, config_dir)]


def suits(verb: str, group: str, option: str, config_dir: Path | None = None) -> bool:
    """Return whether an option of a config group suits a verb.

    An option with a ``name`` suits the verbs that construct a registered class from its
    section; one without, the verbs that do not. A preset suits the verbs that have all
    the groups and options that it chooses, and all the keys that it sets.
    """
    files = files_of(group, config_dir)
    if option not in files and option not in built_in(group):
        return False
    try:
        if group in VERBS[verb].presets:
            return not _preset_misfit(verb, group, option, files, config_dir)
        return _option_suits(verb, group, option, files)
    except InputError:  # a broken file, which is an error only where it is used
        return False


def verbs_for(group: str, option: str, config_dir: Path | None = None) -> list[str]:
    """List the verbs that an option of a config group is made for."""
    return [
        verb
        for verb, kind in VERBS.items()
        if group in kind.config_groups and suits(verb, group, option, config_dir)
    ]


def unsuited(
    verb: str, group: str, option: str, config_dir: Path | None = None
) -> InputError:
    """Build the error for an option that does not exist, or is for other verbs."""
    choices = options_for(verb, group, config_dir)
    if suited := verbs_for(group, option, config_dir):
        advice = f"choose from {', '.join(choices)}" if choices else "there is none"
        *verbs, last = suited
        made_for = f"{', '.join(verbs)} and {last}" if verbs else last
        return InputError(
            f"{group}={option} is made for {made_for}; for {verb} {advice}"
        )
    files = files_of(group, config_dir)
    if option in files:
        # No verb suits a file that cannot be read; this raises the reason.
        if group not in VERBS[verb].presets:
            _option_suits(verb, group, option, files)
        elif reason := _preset_misfit(verb, group, option, files, config_dir):
            return InputError(f"{group}={option}: {files[option]}: {reason}")
    # A paper's presets are in a folder of its name.
    nested = [name for name in files if name.endswith(f"/{option}")]
    if matches := [name for name in nested if name in choices]:
        return InputError(
            f"unknown {group} {option!r}: did you mean {' or '.join(matches)}?"
        )
    if nested:
        return unsuited(verb, group, nested[0], config_dir)
    if option.endswith((".yaml", ".yml")):
        name = Path(option).stem
        return InputError(
            f"{group}: expected a name, got the file {option!r}; with --config-dir DIR "
            f"{group}={name} is DIR/{group}/{name}.yaml"
        )
    return names.unknown(group, option, choices)


def _preset_misfit(
    verb: str,
    preset_group: str,
    option: str,
    files: Mapping[str, Path],
    config_dir: Path | None,
) -> str:
    """Return the reason why a preset does not suit a verb, or an empty string."""
    kind = VERBS[verb]
    # A preset with a key that no verb has is listed; its use reports the misspelt key.
    foreign = set().union(*(v.keys for v in VERBS.values())) - kind.keys
    # Collect the choices that the preset makes for other groups.
    presets = bases_first(preset_group, option, files)
    contents = [content_of(files[preset]) for preset in presets]
    choices = [choice for content in contents for choice in choices_in(content).items()]
    # The preset suits if the verb has all its keys and choices.
    for key in sorted({key for content in contents for key in content} & foreign):
        return f"expected keys of {verb}, got {key!r}, a key of other verbs"
    for group, value in choices:
        if group not in kind.config_groups:
            return f"expected groups of {verb}, got {group}={value}"
        # Asking whether presets that choose each other suit would recurse forever.
        if group in kind.presets:
            options = sorted(files_of(group, config_dir))
        elif value is not None and suits(verb, group, value, config_dir):
            continue
        else:
            options = options_for(verb, group, config_dir)
        if value not in options:
            return f"{group}: expected one of {', '.join(options)}, got {value}"
    return ""


def _option_suits(
    verb: str, group: str, option: str, files: Mapping[str, Path]
) -> bool:
    # Only optional groups can be none.
    section = VERBS[verb].section(group)
    if option == NONE:
        return isinstance(section, Group) and section.optional
    # Where all verbs construct the group alike, all options suit.
    sections = (v.section(group) for v in VERBS.values() if group in v.sections)
    if len({isinstance(candidate, Group) for candidate in sections}) == 1:
        return True
    # An option names a class by itself or by what it builds on.
    owner = section if isinstance(section, Group) else GROUPS.get(group)
    registered = owner.names().keys() if owner else set()
    has_name = any(
        base in registered or (base in files and "name" in content_of(files[base]))
        for base in bases_first(group, option, files)
    )
    return has_name == isinstance(section, Group)
