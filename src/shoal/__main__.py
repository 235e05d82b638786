"""``python -m shoal``: the same program as ``shoal``."""

from shoal.ui.cli import main

if __name__ == "__main__":
    main()
