"""``python -m marl_pool`` is the ``marl-pool`` command."""

from marl_pool.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
