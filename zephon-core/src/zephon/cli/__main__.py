"""`python -m zephon.cli`: the command `zephon` where its script is not on the path."""

from __future__ import annotations

from zephon.cli import main

if __name__ == "__main__":
    main()
