"""The verbs of ``marl-pool``: what the command line calls after it has parsed.

Each takes the flags and the ``key=value`` words, and returns the exit status. Whatever
is heavy loads inside the verb that needs it, so that help and refusals come at once.
"""
